"""Desync checks see every fault that makes ranks differ, say where, and are silent otherwise."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from runs import Case
from traces import checked

Ranks = Callable[..., list[Any]]

ADAMW = {"precision.compute": "fp64", "optimizer.name": "adamw", "optimizer.lr": 0.01, "optimizer.eps": 1e-4}
TENSOR = {**ADAMW, "parallel.tensor": 2, "batch.micro": 4, "batch.accumulation": 2}
DATA = {**ADAMW, "parallel.data": 2, "batch.micro": 2, "batch.accumulation": 2}
FOUR = {**ADAMW, "parallel.data": 2, "parallel.tensor": 2, "batch.micro": 2, "batch.accumulation": 2}

LAYOUTS = [
    (world, {**base, "zero.stage": stage, **extra})
    for (world, base), stage, extra in product(
        [(2, DATA), (2, TENSOR), (4, FOUR)],
        [0, 1, 3],
        [{}, {"recompute.granularity": "full", "parallel.sequence": True, "precision.compute": "fp32"}],
    )
]


@pytest.mark.parametrize(("world", "plan"), LAYOUTS, ids=str)
def test_no_false_alarm(world: int, plan: dict[str, Any], run: Ranks) -> None:
    assert run(world, checked, Case(plan, steps=2)) == [([], 2)] * world


@pytest.mark.parametrize("at", [0, 2, 3])
def test_more_than_two_replicas_vote(at: int, run: Ranks) -> None:
    for reports, _ in run(4, checked, Case({**FOUR, "zero.stage": 0}, steps=3), at):
        found = [report for report in reports if f"of ranks 0, 1, 2, 3, {at} stands alone; 1 of" in report]
        assert len(found) == 1
        assert "1 ulps" in found[0]
