"""Traffic: predicted collectives against counts and closed forms that were measured elsewhere."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from bridge.layout.residency import Residency, stage_visits
from bridge.layout.shard import Home, Layout, Parameter
from bridge.layout.traffic import AGREE, GATHER, REDUCE, Traffic, step_traffic
from bridge.plan.plan import Plan

SIZE = 12


def layout(
    stages: int,
    nw: int | None = None,
    ng: int | None = None,
    level: int = 1,
    data: int = 2,
    frozen: int = 0,
) -> Layout:
    """Equal bf16 stages of twelve elements, the first `frozen` of them frozen."""
    zero = {"stage": level, "weight_buffers": nw, "grad_buffers": ng}
    plan = Plan.model_validate({"zero": zero, "precision": {"compute": "bf16"}})
    weights = [
        Parameter(f"{stage}.w", (SIZE,), "fp32", (stage,), trainable=stage >= frozen)
        for stage in range(stages)
    ]
    return Layout.of(plan, weights, stages, data)


# Restores and reductions of Fast-LLM's runner for eight stages and one, two and four depth-first
# microbatches.
@pytest.mark.parametrize(
    ("nw", "ng", "accumulation", "gathers", "reductions"),
    [
        (None, None, 1, 8, 8), (None, 2, 1, 8, 8), (2, 2, 1, 14, 8), (1, 1, 1, 15, 8), (3, 3, 1, 13, 8),
        (None, None, 4, 8, 8), (None, 2, 4, 8, 32), (2, 2, 4, 50, 32), (1, 1, 4, 57, 32),
        (None, 2, 2, 8, 16), (2, 2, 2, 26, 16), (1, 1, 2, 29, 16),
    ],
)  # fmt: skip
def test_counts_of_eight_stages(
    nw: int | None, ng: int | None, accumulation: int, gathers: int, reductions: int
) -> None:
    traffic = step_traffic(layout(8, nw, ng), accumulation, 2)
    assert traffic[GATHER] == Traffic(gathers, gathers * SIZE * 2)
    assert traffic[REDUCE] == Traffic(reductions, reductions * SIZE * 4)


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 16), st.integers(1, 4))
def test_closed_forms(stages: int, weights: int, grads: int, accumulation: int) -> None:
    traffic = step_traffic(layout(stages, weights, grads), accumulation, 2)
    if weights < stages:
        assert traffic[GATHER].count == accumulation * (2 * stages - 2 * weights) + weights
    alone = stages if grads >= stages else max(0, 2 * grads - stages)
    assert traffic[REDUCE].count == accumulation * (stages - alone) + alone


def test_replication_reduces_once_and_gathers_nothing() -> None:
    assert step_traffic(layout(4, level=0), 3, 2) == {
        REDUCE: Traffic(4, 4 * SIZE * 4),
        AGREE: Traffic(1, 48),
    }


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(0, 3))
def test_one_rank_is_silent(stages: int, weights: int, accumulation: int, level: int) -> None:
    assert step_traffic(layout(stages, weights, level=level, data=1), accumulation, 1) == {}


def test_frozen_stages_are_gathered_only_where_they_are_shared() -> None:
    whole = step_traffic(layout(6, frozen=3), 2, 2)
    assert whole[GATHER].count == whole[REDUCE].count == 3
    shared = step_traffic(layout(6, 1, 1, frozen=3), 1, 2)
    assert shared[GATHER].count == 3 + (3 + 2) and shared[REDUCE].count == 3


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Stages of which some are frozen and some share a tied parameter."""
    stages, weights = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    plan = Plan.model_validate({"zero": {"weight_buffers": weights}})
    trained = draw(st.lists(st.booleans(), min_size=stages, max_size=stages))
    parameters = [
        Parameter(f"{stage}.w", (SIZE,), "fp32", (stage,), trainable=trained[stage])
        for stage in range(stages)
    ]
    if draw(st.booleans()):
        parameters.append(
            Parameter(
                "tied",
                (SIZE,),
                "fp32",
                tuple(sorted({draw(st.integers(0, stages - 1)), stages - 1})),
            )
        )
    return Layout.of(plan, parameters, stages, 2)


@given(layouts(), st.integers(1, 12))
def test_gathers_of_many_microbatches_are_those_followed_one_by_one(
    shape: Layout, accumulation: int
) -> None:
    residency = Residency(shape)
    for _ in range(2):
        residency.drop(index for index, flat in enumerate(shape.flats) if flat.trainable)
        path = stage_visits(shape) * accumulation
        followed = [index for place in range(len(path)) for index in residency.due(path[place:])]
    size = sum(shape.flats[index].padded * 4 for index in followed)
    assert step_traffic(shape, accumulation, 2).get(GATHER, Traffic()) == Traffic(
        len(followed), size
    )


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3))
def test_every_visit_finds_its_weights_and_two_buffers_suffice_to_prefetch(
    stages: int, weights: int, accumulation: int
) -> None:
    shape = layout(stages, weights)
    residency, held = Residency(shape), dict[Home, int]()
    path = stage_visits(shape) * accumulation
    for place, stage in enumerate(path):
        before = dict(held)
        for index in residency.due(path[place:]):
            held[shape.flats[index].weight_home] = index
        needed = residency.flats_for_stage(stage)
        assert all(held[shape.flats[index].weight_home] == index for index in needed)
        if place and stages > weights > 1:
            assert all(before.get(shape.flats[index].weight_home) == index for index in needed)
