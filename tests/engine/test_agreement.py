"""Ranks that were started with different things all say so, in one line, before their first collective."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import bridge.engine.agreement
import compat.deepspeed
from bridge.engine import initialize
from bridge.engine.training import Training
from bridge.errors import ConfigError
from bridge.plan.plan import Plan
from tests.engine.dropin_scripts import Model, config_of
from tests.engine.runs import Case, model_of

BASE = {"optimizer.lr": 1e-3, "batch.micro": 2, "zero.stage": 1}


def native(rank: int, values: dict[str, Any]) -> None:
    initialize(model_of(Case({})), Plan.of({**BASE, **(values if rank else {})}))


def seeded(rank: int) -> None:
    initialize(model_of(Case({})), Plan.of(BASE), seed=rank)


def shaped(rank: int) -> None:
    initialize([nn.Linear(4, 4), nn.Linear(4, 2 + rank)], Plan.of(BASE))


def frozen(rank: int) -> None:
    initialize(model_of(Case({}, frozen=("block0",) if rank else ())), Plan.of(BASE))


def released(rank: int) -> None:
    known = bridge.engine.agreement.__version__
    bridge.engine.agreement.__version__ = f"{known}.{rank}"
    try:
        initialize(model_of(Case({})), Plan.of(BASE))
    finally:
        bridge.engine.agreement.__version__ = known


def dropped_in(rank: int, more: dict[str, Any], level: int = 1) -> None:
    compat.deepspeed.initialize(
        model=Model(), config=config_of(level if rank else 1, **(more if rank else {}))
    )


def trained(rank: int) -> None:
    Training.of(Plan.of(BASE), alike={"--steps": 3 + rank})


def refused(rank: int, world: int, start: Any, arguments: tuple[Any, ...]) -> tuple[str, ...]:
    """What the error says."""
    with pytest.raises(ConfigError) as raised:
        start(rank, *arguments)
    return raised.value.problems


WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}}
STARTS: list[tuple[Any, tuple[Any, ...], str]] = [
    (
        native,
        ({"optimizer.lr": 5e-4},),
        "optimizer.lr: rank 0 has 0.001, rank 1 has 0.0005; start all ranks with the same",
    ),
    (native, ({"zero.stage": 3},), "zero.stage: rank 0 has 1, rank 1 has 3; start"),
    (native, ({"optimizer.clip": 1.0},), "optimizer.clip: rank 0 has none, rank 1 has 1.0; start"),
    (native, ({"parallel.tensor": 2},), "parallel.tensor: rank 0 has none, rank 1 has 2; start"),
    (seeded, (), "seed: rank 0 has 0, rank 1 has 1; start"),
    (shaped, (), "parameter 1.weight: rank 0 has (2, 4) float32, rank 1 has (3, 4) float32; start"),
    (
        frozen,
        (),
        "parameter block0.norm1.weight: rank 0 has (16,) float64, rank 1 has (16,) float64, frozen; start",
    ),
    (released, (), "stagebridge: rank 0 has "),
    (dropped_in, ({}, 3), "zero_optimization.stage: rank 0 has 1, rank 1 has 3; start"),
    (
        dropped_in,
        (WARMUP,),
        "scheduler.params.warmup_num_steps: rank 0 has none, rank 1 has 7; start",
    ),
    (trained, (), "--steps: rank 0 has 3, rank 1 has 4; start"),
]


@pytest.mark.parametrize(
    ("start", "arguments", "said"), STARTS, ids=[said.partition(": ")[0] for _, _, said in STARTS]
)
def test_the_first_difference_is_one_line_on_all_ranks(
    run: Any, start: Any, arguments: tuple[Any, ...], said: str
) -> None:
    for problems in run(2, refused, start, arguments):
        assert len(problems) == 1 and problems[0].startswith(said) and "\n" not in problems[0]


def alike(rank: int, world: int) -> str:
    initialize(model_of(Case({})), Plan.of(BASE)).comm.ledger.clear()
    return "started"


def test_ranks_that_are_alike_start(run: Any) -> None:
    assert run(2, alike) == ["started"] * 2
