"""The rate of each update is that of the stack's own scheduler, asked as the stack's own loop asks it: before the
update or behind it. What a translation calls the same run has the same rates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import bridge
import compat
from bridge.engine.optimizer import rate_of_update
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config
from bridge.stack.rules import Effect
from bridge.translation.diff import compare

UPDATES = 13
RECORDED = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "stacks" / "fast_llm" / "rates.jsonl")
    .read_text()
    .splitlines()
]
"""Learning rates that Fast-LLM's optimizer told of its updates (7d61a1ba; engine/optimizer/optimizer.py: step)."""


def rates(config: Config) -> list[float]:
    """The rates of the updates, as the plan of a config says them."""
    plan = bridge.lift(config)
    return [rate_of_update(plan, steps) for steps in range(UPDATES)]


def asked(optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> Iterator[float]:
    """The rates of updates in a loop that asks the scheduler after each update."""
    for _ in range(UPDATES):
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        step()


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: str(row["learning_rate"]))
def test_fast_llm(row: dict[str, Any]) -> None:
    source = {"training": {"train_iters": UPDATES}, "optimizer": row}
    source = {**source, "optimizer": {"learning_rate": row["learning_rate"]}}
    assert rates(compat.load("fast_llm").read(source)) == pytest.approx(row["rates"], abs=1e-15)


SHAPES = list(product(("constant", "linear", "cosine"), (0, 1, 3)))


def drawn(name: str, stack: str, shape: str, warmup: int, **said: Any) -> Config:
    """A run of a stack with a schedule."""
    schedule = {"name": shape, "warmup_steps": warmup, "total_steps": 10, "minimum": 0.1, **said}
    values = {f"optimizer.schedule.{name}": value for name, value in schedule.items()}
    run = {"run.steps": 12, "batch.micro": 1, "batch.accumulation": 1, "parallel.data": 1}
    return bridge.lower(
        Plan.of({**run, "optimizer.name": "adamw", "optimizer.lr": 1.0, **values}),
        compat.load(stack),
        world_size=1,
    )


@pytest.mark.parametrize(("shape", "warmup"), SHAPES)
@pytest.mark.parametrize(
    ("stack", "place"),
    [
        ("megatron", "megatron.core.optimizer_param_scheduler"),
        ("automodel", "nemo_automodel.components.optim.scheduler"),
    ],
)
def test_megatron_and_automodel(stack: str, place: str, shape: str, warmup: int) -> None:
    module, optimizer = pytest.importorskip(place), sgd()
    config = drawn(stack, stack, shape, warmup, warmup_from=0.0)
    real = module.OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.1,
        lr_warmup_steps=warmup,
        lr_decay_steps=10,
        lr_decay_style=shape,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
    assert rates(config) == pytest.approx(list(asked(optimizer, lambda: real.step(1))))


@pytest.mark.parametrize(("shape", "warmup"), SHAPES)
def test_merak(shape: str, warmup: int) -> None:
    transformers, optimizer = pytest.importorskip("transformers"), sgd()
    name = "constant_with_warmup" if shape == "constant" else shape
    config = drawn("merak", "merak", shape, warmup, warmup_from=0.0, minimum=0.0)
    steps = config.effective.get("args.max_steps")
    real = transformers.get_scheduler(name, optimizer, warmup, steps)
    assert rates(config) == pytest.approx(list(asked(optimizer, real.step)), abs=1e-15)


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_deepspeed_lags(kind: str) -> None:
    module, optimizer = pytest.importorskip("deepspeed.runtime.lr_schedules"), sgd()
    params = {"warmup_min_lr": 0.1, "warmup_max_lr": 1.0, "warmup_num_steps": 3}
    params |= {"warmup_type": "linear"}
    params |= {"total_num_steps": 10} if kind == "WarmupDecayLR" else {}
    source = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}
    config = compat.load("deepspeed").read(
        {**source, "scheduler": {"type": kind, "params": params}}, world_size=1
    )
    real = getattr(module, kind)(optimizer, **params)
    assert rates(config) == pytest.approx(list(asked(optimizer, real.step)))


STACKS = ("fast_llm", "megatron", "automodel", "merak", "deepspeed")


@pytest.mark.parametrize(("source", "target"), list(product(STACKS, STACKS)))
def test_the_same_run_has_the_same_rates(source: str, target: str) -> None:
    """Whether `convert` and `diff` name the schedule is whether the rates differ."""
    for shape, warmup in SHAPES:
        one = drawn(source, source, shape, warmup)
        other = bridge.translate(one, compat.load(target), world_size=1)
        found = [
            {ours for row in rows if row.effect.reaches(Effect.NUMBERS) for ours in row.about}
            for rows in (other.findings, compare(one, other.config), compare(other.config, one))
        ]
        parts = ("optimizer.schedule.", "habits.first_lr_step")
        apart = [any(ours.startswith(parts) for ours in about) for about in found]
        same = rates(one) == pytest.approx(rates(other.config), abs=1e-12)
        assert apart == [not same] * 3, (shape, warmup, found)
