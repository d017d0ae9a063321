"""Real engines: plans on real DeepSpeed are the native engine's, each ZeRO level shards what it should, and `choose` says why."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

import bridge
import compat
from bridge.engine.models.gpt import GPT
from bridge.errors import BridgeError
from bridge.plan.plan import Plan
from tests.engine.backends import SHAPE, against_native, held

pytestmark = pytest.mark.usefixtures("foreign")
REAL = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

ADAMW = {
    "optimizer.name": "adamw",
    "optimizer.lr": 0.01,
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.1,
}
BASE = {
    **ADAMW,
    "optimizer.clip": 0.5,
    "batch.micro": 2,
    "batch.accumulation": 2,
    "loss": "mean_of_microbatches",
}
DATA, PIPE = {"parallel.data": 2}, {"parallel.data": 1, "parallel.pipeline": 2}
COSINE = {"name": "cosine", "warmup_steps": 2, "total_steps": 8, "minimum": 1e-4}
ENGINES: dict[str, dict[str, Any]] = {
    **{f"ZeRO {level}": {**DATA, "zero.stage": level} for level in range(4)},
    "a schedule": {
        **DATA,
        "zero.stage": 1,
        **{f"optimizer.schedule.{name}": value for name, value in COSINE.items()},
    },
    "a pipeline, ZeRO 1": {**PIPE, "zero.stage": 1},
    "a pipeline, ZeRO 0": {**PIPE, "zero.stage": 0, "optimizer.clip": 0.0},
    "a pipeline, tied": {**PIPE, "zero.stage": 1, "model.tied": True},
    "AutoTP": {"parallel.data": 1, "parallel.tensor": 2, "zero.stage": 1},
}
SILENT = ("ZeRO 0", "a pipeline, ZeRO 0")
"""Where DeepSpeed tells no gradient norm: at stage 0 in fp32."""


@REAL
@pytest.mark.parametrize("name", ENGINES)
def test_a_plan_on_real_deepspeed_is_the_native_engines(run: Any, name: str) -> None:
    for gap in run(2, against_native, "deepspeed", {**BASE, **ENGINES[name]}):
        assert gap.loss < 1e-6 and gap.update < 1e-4 and abs(gap.share - 1) < 1e-6
        assert gap.norm is None if name in SILENT else gap.norm < 1e-5


@pytest.mark.parametrize("padded", (False, True))
def test_a_plan_on_fsdp2_is_the_native_engines(run: Any, padded: bool) -> None:
    plan = {**BASE, **DATA, "zero.stage": 3, "loss": "per_token"}
    for gap in run(2, against_native, "automodel", plan, padded):
        assert gap.loss < 1e-6 and gap.update < 1e-4 and gap.norm is not None and gap.norm < 1e-5


ELEMENTS = sum(weight.numel() for weight in GPT(SHAPE).parameters())
LARGEST = max(sum(weight.numel() for weight in layer.parameters()) for layer in GPT(SHAPE))
WEIGHT, GRADIENT, STATE = 2, 2, 12
"""Bytes of an element in bf16: weight, gradient, and in fp32 the master and two moments."""
SHARDED = {
    0: (),
    1: ("optimizer",),
    2: ("optimizer", "gradients"),
    3: ("optimizer", "gradients", "weights"),
}
"""What each level splits over data ranks."""


def table(level: int) -> dict[str, int]:
    """Bytes on each of two ranks."""
    whole = {
        "weights": WEIGHT * ELEMENTS,
        "gradients": GRADIENT * ELEMENTS,
        "optimizer": STATE * ELEMENTS,
    }
    return {kind: size // 2 if kind in SHARDED[level] else size for kind, size in whole.items()}


def as_is(level: int) -> dict[str, Any]:
    """What a DeepSpeed file says for that level to be taken to the letter: stage 0 as such, and no small weights whole."""
    if level == 0:
        return {
            "zero_optimization.stage": 0,
            "data_types.grad_accum_dtype": None,
            "communication_data_type": None,
        }
    return {"zero_optimization.stage3_param_persistence_threshold": 0} if level == 3 else {}


HALF = {**BASE, **DATA, "precision.compute": "bf16", "precision.reduce": "bf16"}


@REAL
@pytest.mark.parametrize("level", SHARDED)
def test_real_deepspeed_holds_what_each_level_leaves_on_a_rank(run: Any, level: int) -> None:
    for found in run(2, held, "deepspeed", {**HALF, "zero.stage": level}, as_is(level)):
        assert found == table(level)


@pytest.mark.parametrize("level", SHARDED)
def test_the_native_engine_holds_the_same_and_two_stages_to_work_with(run: Any, level: int) -> None:
    """Where something is sharded, two stages may be whole at once; sharded weights are kept as their masters only."""
    expected, buffers = table(level), 2 * LARGEST
    if level >= 2:
        expected["gradients"] += GRADIENT * buffers
    if level == 3:
        expected["weights"] = WEIGHT * buffers
    for found in run(2, held, "native", {**HALF, "zero.stage": level}, {}):
        assert found == expected


def test_the_native_engine_runs_what_it_can() -> None:
    choice = bridge.choose(Plan.of({**HALF, "zero.stage": 2}), compat.backends())
    assert choice.backend.name == "native" and "native: runs every field of this plan" in str(
        choice
    )


@REAL
def test_another_engine_runs_what_the_native_one_cannot_and_the_field_is_named() -> None:
    choice = bridge.choose(
        Plan.of({**DATA, "optimizer.name": "lamb", "batch.micro": 1}), compat.backends()
    )
    assert choice.backend.name != "native" and any(
        "optimizer.name: found 'lamb'" in it for it in choice.refusals["native"]
    )


@REAL
@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({**PIPE, "zero.stage": 3}, "zero.stage: found 3"),
        (
            {**PIPE, "schedule.name": "interleaved_1f1b", "schedule.virtual": 2},
            "schedule.virtual: found 2",
        ),
        ({**DATA, "loss": "per_token"}, "loss: found 'per_token'"),
        (
            {**DATA, "parallel.tensor": 2, "parallel.sequence": True},
            "parallel.sequence: found True",
        ),
        ({**DATA, "precision.compute": "fp64"}, "precision.compute: found 'fp64'"),
        ({**DATA, "parallel.context": 2}, "parallel.context: found 2"),
        ({**PIPE, "parallel.tensor": 2}, "parallel.tensor: found 2"),
    ],
)
def test_what_deepspeed_cannot_run_is_named(values: dict[str, Any], field: str) -> None:
    plan = Plan.of({**BASE, **values})
    refused = (
        bridge.choose(plan, compat.backends(), wanted="native").refusals
        if "parallel.context" not in values
        else None
    )
    found = (
        compat.backends()["deepspeed"].refusals(plan, 8)
        if refused is None
        else refused["deepspeed"]
    )
    assert any(problem.startswith(field) for problem in found)


def test_an_unknown_engine_and_a_plan_that_nothing_runs_are_errors() -> None:
    with pytest.raises(BridgeError, match="engine: found nvidia, expected native or"):
        bridge.choose(Plan(), compat.backends(), wanted="nvidia")
    with pytest.raises(BridgeError, match=r"native: parallel\.context: found 2"):
        bridge.choose(Plan.of({"parallel.context": 2}), {})
