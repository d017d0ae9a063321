"""Every key of a DeepSpeed file is run, refused, or named: none is taken in and then without effect."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from bridge.engine.fields import check
from bridge.errors import BridgeError
from bridge.plan.section import fields
from bridge.testing.strategies import values as typed_values
from bridge.translation.lift import lift, plan_claims
from compat.deepspeed import initialize
from compat.deepspeed.dialect import DIALECT
from compat.deepspeed.releases import release
from compat.deepspeed.runtime import dropin
from compat.deepspeed.schema import DeepSpeed
from compat.deepspeed.strategies import BESIDE, OWN, settable

EXAMPLES = int(os.environ.get("STAGEBRIDGE_EXAMPLES", "40"))
ADAMW = {"optimizer.type": "AdamW", "optimizer.params.lr": 0.01}
BASES: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "bf16, ZeRO 1": {"bf16.enabled": True, "zero_optimization.stage": 1},
    "bf16, ZeRO 2": {
        "bf16.enabled": True,
        "zero_optimization.stage": 2,
        "data_types.grad_accum_dtype": "fp32",
    },
    "fp16, ZeRO 3": {"fp16.enabled": True, "zero_optimization.stage": 3},
}


def config_of(values: Mapping[str, Any]) -> Any:
    return DIALECT.config(
        {"train_micro_batch_size_per_gpu": 2, **ADAMW, **values}, entry="file", world_size=1
    )


def heard(values: Mapping[str, Any], base: Mapping[str, Any], path: str) -> bool:
    """Whether anything comes of `values` beside `base`."""
    try:
        usual = config_of(base)
        config = config_of({**base, **values})
        if config.effective.flat().get(path) == usual.effective.flat().get(path) or any(
            dropin.beyond(config)
        ):
            return True
        plan = dropin.leave_open(lift(config), own=False)
        _, findings = check(plan, 1)
    except BridgeError:
        return True
    if (
        path.startswith((*dropin.READ, *dropin.RUN))
        or lift(config).values() != lift(usual).values()
    ):
        return True
    rules = plan_claims(DIALECT)
    named = {
        carrier
        for it in findings
        if it.path in rules
        for carrier in rules[it.path].carriers(it.path)
    }
    return path in named | {finding.path for finding in dropin.find_unsupported(config)}


@pytest.mark.parametrize("base", BASES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_no_key_is_without_an_answer(base: str, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(settable(DIALECT.versions[-1])))
    value = data.draw(
        OWN[path] if path in OWN else typed_values(fields(DeepSpeed)[path].annotation)
    )
    assume(value is not None)
    assert heard(
        {**BESIDE.get(path, {}), path: value}, {**BASES[base], **BESIDE.get(path, {})}, path
    ), (path, value)


def test_a_refusal_names_what_runs_instead() -> None:
    def said(**values: Any) -> list[str]:
        return list(
            dropin.beyond(
                config_of({path.replace("__", "."): value for path, value in values.items()})
            )
        )

    (line,) = said(optimizer__params__amsgrad=True)
    assert line.startswith("optimizer.params.amsgrad: found True") and line.endswith(
        dropin.OWN_RULE
    )
    (line,) = said(optimizer__params__max_grad_norm=0.5)
    assert line.endswith("; set gradient_clipping to this value")
    (line,) = said(managed_gradient_accumulation=False)
    assert "set gradient_accumulation_steps" in line
    model = torch.nn.Linear(2, 2)
    own = torch.optim.AdamW(model.parameters(), amsgrad=True)
    engine = initialize(model=model, optimizer=own, config={"train_batch_size": 1})[0]
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert engine.global_steps == 1


PARAMS = "optimizer.params."
RUN = ("AdamW", "Adam", "SGD")
OTHERS = sorted(
    {*release(DIALECT.versions[-1]).types["optimizers"], "OneBitAdam", "ZeroOneAdam", "Mine"}
    - {*RUN, "adamw", "adam"}
)
OF_PARAMS: Mapping[str, Any] = {"betas": (0.9, 0.9), "freeze_step": 3, "ns_method": "gram"}
NAMES = ("lr", "betas", "eps", "weight_decay", "momentum", "freeze_step", "ns_method", "muon_lr")


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    kind=st.sampled_from([*RUN, *OTHERS]), names=st.sets(st.sampled_from(NAMES)), half=st.booleans()
)
def test_a_config_runs_with_the_type_that_the_refusal_of_another_names(
    kind: str, names: set[str], half: bool
) -> None:
    base = {"train_micro_batch_size_per_gpu": 2, "bf16.enabled": half}
    given = {f"{PARAMS}{name}": OF_PARAMS.get(name, 0.01) for name in names}
    try:
        config = DIALECT.config(
            {**base, "optimizer.type": kind, **given}, entry="file", world_size=1
        )
    except BridgeError:
        return  # an argument that DeepSpeed does not take
    problems = list(dropin.beyond(config))
    assert bool(problems) is (kind in OTHERS)
    assert not [line for line in problems if not line.startswith("optimizer.type: ")]
    for instead in RUN if problems else ():
        assert (
            f"use AdamW, Adam or SGD, with no {PARAMS[:-1]} but lr and weight_decay" in problems[0]
        )
        left = {path: given[path] for path in given if path.endswith((".lr", ".weight_decay"))}
        values = {**base, "optimizer.type": instead, **left}
        again = DIALECT.config(values, entry="file", world_size=1)
        assert not list(dropin.beyond(again))
        check(dropin.leave_open(lift(again), own=False), 1)
