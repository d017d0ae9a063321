"""Every layout over data ranks gives the numbers of one plain process, counts the bytes and makes
the calls predicted.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.engine.runs import (
    SHAPE,
    Case,
    Outcome,
    distance,
    forwards_first,
    plain,
    trained,
    trained_all,
)

SGD = {"precision.compute": "fp64", "optimizer.name": "sgd", "optimizer.lr": 0.3}
ADAMW = {
    "precision.compute": "fp64",
    "optimizer.name": "adamw",
    "optimizer.lr": 0.01,
    "optimizer.eps": 1e-4,
    "optimizer.weight_decay": 0.1,
    "optimizer.clip": 0.5,
}
LION = {
    **ADAMW,
    "optimizer.name": "lion",
    "optimizer.lr": 0.001,
    "optimizer.eps": None,
    "optimizer.betas": (0.9, 0.95),
}
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW, "lion": LION}
RECOMPUTE = {"recompute.granularity": "full"}

# Level, weight buffers, gradient buffers.
ZERO = (
    (0, None, None),
    (1, None, None),
    (2, None, None),
    (3, None, None),
    (1, 1, 1),
    (1, 2, None),
    (2, None, 1),
    (3, 1, 2),
    (1, 3, 3),
)


def plan(
    optimizer: dict[str, Any], zero: tuple[int, int | None, int | None], accumulation: int
) -> dict[str, Any]:
    """Plan values by path."""
    names = ("zero.stage", "zero.weight_buffers", "zero.grad_buffers")
    return {**optimizer, **dict(zip(names, zero, strict=True)), "batch.accumulation": accumulation}


@cache
def reference(name: str, padded: bool = False, frozen: tuple[str, ...] = ()) -> Outcome:
    """One plain process."""
    return plain(Case(OPTIMIZERS[name], batch=16, padded=padded, frozen=frozen))


def assert_agree(found: Outcome, expected: Outcome, tolerance: float) -> None:
    """Losses, norms and changes of weights agree; bytes and traffic are as predicted."""
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=tolerance)
    assert distance(found.change, expected.change) < tolerance
    assert found.traffic == found.predicted
    assert found.bytes == found.predicted_bytes


@pytest.mark.parametrize("zero", ZERO, ids=lambda zero: "-".join(map(str, zero)))
def test_sgd_on_four_ranks(run: Any, zero: tuple[int, int | None, int | None]) -> None:
    """Every level with every number of buffers; fewer ranks, and the rest, are in `test_layouts.py`."""
    ways: list[tuple[int, dict[str, Any]]] = [(1, {}), (4, RECOMPUTE)]
    cases = [
        Case({**plan(SGD, zero, accumulation), **recompute}, batch=16)
        for accumulation, recompute in ways
    ]
    for outcomes in run(4, trained_all, cases):
        for outcome in outcomes:
            assert_agree(outcome, reference("sgd"), 1e-9)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("zero", ZERO, ids=lambda zero: "-".join(map(str, zero)))
def test_adamw_with_clipping(
    run: Any, world: int, zero: tuple[int, int | None, int | None]
) -> None:
    for outcomes in run(
        world, trained_all, [Case(plan(ADAMW, zero, number), batch=16) for number in (1, 4)]
    ):
        for outcome in outcomes:
            assert_agree(outcome, reference("adamw"), 1e-7)


@pytest.mark.parametrize("zero", ZERO[:4], ids=lambda zero: "-".join(map(str, zero)))
def test_lion(run: Any, zero: tuple[int, int | None, int | None]) -> None:
    for outcome in run(2, trained, Case(plan(LION, zero, 4), batch=16)):
        assert_agree(outcome, reference("lion"), 1e-7)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_unequal_microbatches_count_by_token(
    run: Any, world: int, level: int, accumulation: int
) -> None:
    values = {**plan(SGD, (level, None, None), accumulation), "loss": "per_token"}
    for outcome in run(world, trained, Case(values, batch=16, padded=True)):
        assert_agree(outcome, reference("sgd", padded=True), 1e-9)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("zero", [(0, None, None), (1, None, None), (3, None, None), (1, 1, 1)])
@pytest.mark.parametrize(
    "frozen", [("embedding", "block0"), ("norm", "bias"), ("block1",)], ids="-".join
)
def test_frozen_parameters(
    run: Any, world: int, zero: tuple[int, int | None, int | None], frozen: tuple[str, ...]
) -> None:
    for outcome in run(world, trained, Case(plan(ADAMW, zero, 2), batch=16, frozen=frozen)):
        expected = reference("adamw", frozen=frozen)
        still = {name for name, change in expected.change.items() if not change.any()}
        assert still and all(not outcome.change[name].any() for name in still)
        moving = {name: change for name, change in expected.change.items() if name not in still}
        assert_agree(
            replace(outcome, change={name: outcome.change[name] for name in moving}),
            replace(expected, change=moving),
            1e-7,
        )


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("zero", [(0, None, None), (3, None, None), (3, 1, 1)])
@pytest.mark.parametrize(("way", "accumulation"), [("added", 1), ("in turn", 2), ("left out", 2)])
def test_several_forward_passes_before_backward(
    run: Any, world: int, zero: Any, way: str, accumulation: int
) -> None:
    case = Case({**plan(SGD, zero, accumulation), **(RECOMPUTE if world == 2 else {})}, batch=16)
    for found in run(world, forwards_first, case, way):
        expected = reference("sgd")
        assert found.losses == pytest.approx(expected.losses, rel=1e-9)
        assert found.norms == pytest.approx(expected.norms, rel=1e-9)
        assert distance(found.change, expected.change) < 1e-9


SHAPES = {
    "untied": replace(SHAPE, tied=False),
    "gated rms": replace(SHAPE, gated=True, norm="rms", bias=False),
    "learned positions": replace(SHAPE, rotary=False, kv_heads=1, bias=False),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("level", [0, 3])
def test_other_shapes(run: Any, shape: Any, level: int) -> None:
    case = Case(plan(SGD, (level, None, None), 2), shape, batch=16)
    for outcome in run(2, trained, case):
        assert_agree(outcome, plain(case), 1e-9)


@pytest.mark.parametrize("size", [0.5, 1.5, 2, 5])
@pytest.mark.parametrize("zero", [(1, None, None), (3, None, None), (3, 1, 1)])
def test_any_number_of_layers_in_a_stage(
    run: Any, size: float, zero: tuple[int, int | None, int | None]
) -> None:
    values = {**plan(SGD, zero, 2), "stages.rule": "carry", "stages.layers_per_stage": size}
    for outcome in run(2, trained, Case(values, batch=16)):
        assert_agree(outcome, reference("sgd"), 1e-9)


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute.granularity": "full", "recompute.method": "uniform", "recompute.layers": 3},
        {"recompute.granularity": "full", "recompute.method": "block", "recompute.layers": 1},
        {"recompute.ratio": 0.5},
        {"recompute.granularity": "selective"},
    ],
    ids=["uniform", "block", "ratio", "selective"],
)
def test_ways_to_recompute(run: Any, recompute: dict[str, Any]) -> None:
    values = {**plan(SGD, (3, None, None), 2), **recompute, "stages.layers_per_stage": 2}
    for outcome in run(2, trained, Case(values, batch=16)):
        assert_agree(outcome, reference("sgd"), 1e-9)
