"""Shards: every element has one owner, bytes obey the known bounds, and nothing is stored twice."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
from hypothesis import given, strategies as st

from bridge.layout.boxes import boxes_of_range
from bridge.layout.shard import Flat, Layout, Parameter
from bridge.plan.plan import Plan

DTYPES = st.sampled_from(["fp64", "fp32", "bf16", "fp16"])
COUNTS = st.none() | st.integers(1, 6)


@st.composite
def parameters(draw: st.DrawFn, stages: int) -> list[Parameter]:
    """A few parameters for each of `stages` stages, some of them frozen, split or tied."""
    found = []
    for stage in range(stages):
        for index in range(draw(st.integers(1, 3))):
            shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
            used = (
                tuple(sorted({stage, draw(st.integers(stage, stages - 1))}))
                if index == 2
                else (stage,)
            )
            split = draw(st.none() | st.just(0))
            partial = split is None and draw(st.booleans())
            trainable = draw(st.integers(0, 3)) > 0
            found.append(
                Parameter(
                    f"{stage}.{index}", shape, "fp32", used, trainable, split, partial=partial
                )
            )
    return found


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout of a small model."""
    stages = draw(st.integers(1, 6))
    zero = {
        "stage": draw(st.none() | st.integers(0, 3)),
        "weight_buffers": draw(COUNTS),
        "grad_buffers": draw(COUNTS),
    }
    precision = {
        "compute": draw(st.none() | DTYPES),
        "master": draw(st.none() | DTYPES),
        "reduce": draw(st.none() | DTYPES),
    }
    optimizer = {
        "name": draw(st.sampled_from(["sgd", "adamw"])),
        "momentum": draw(st.sampled_from([0.0, 0.9])),
    }
    plan = Plan.model_validate({"zero": zero, "precision": precision, "optimizer": optimizer})
    return Layout.of(plan, draw(parameters(stages)), stages, draw(st.sampled_from([1, 2, 3, 4, 8])))


def equal(stages: int, data: int, size: int = 48, **zero: Any) -> Layout:
    """Equal stages of `size` bf16 parameters with fp32 gradients, AdamW."""
    plan = Plan.model_validate(
        {"zero": zero, "precision": {"compute": "bf16"}, "optimizer": {"name": "adamw"}}
    )
    return Layout.of(
        plan,
        [Parameter(f"{stage}.w", (size,), "fp32", (stage,)) for stage in range(stages)],
        stages,
        data,
    )


def owned_elements(flat: Flat) -> list[tuple[str, int]]:
    """Every (parameter, element) that some shard owns, with repetitions."""
    pieces = (piece for index in range(flat.shards) for piece in flat.pieces(index))
    return sorted(
        (piece.parameter.name, element)
        for piece in pieces
        for element in range(piece.start, piece.stop)
    )


@given(layouts())
def test_every_element_of_every_parameter_has_one_owner(layout: Layout) -> None:
    for flat in layout.flats:
        expected = [
            (slot.parameter.name, element)
            for slot in flat.slots
            for element in range(slot.parameter.size)
        ]
        assert owned_elements(flat) == sorted(expected)


@given(layouts(), st.data())
def test_every_parameter_lies_in_one_flat_that_its_stages_need(
    layout: Layout, data: st.DataObject
) -> None:
    slots = [slot for flat in layout.flats for slot in flat.slots]
    assert len({slot.parameter.name for slot in slots}) == len(slots)
    stage = data.draw(st.integers(0, layout.stages - 1))
    needed = {slot.parameter.name for flat in layout.of_stage(stage) for slot in flat.slots}
    assert needed >= {slot.parameter.name for slot in slots if stage in slot.parameter.stages}


@given(layouts())
def test_padding_is_less_than_an_element_a_rank_and_only_where_there_are_shards(
    layout: Layout,
) -> None:
    for flat in layout.flats:
        assert 0 <= flat.padded - flat.size < flat.shards
        assert [flat.elements_of(index).stop for index in range(flat.shards)][-1] == flat.padded


@given(layouts())
def test_shared_means_that_another_flat_has_the_same_home(layout: Layout) -> None:
    homes = [flat.weight_home for flat in layout.flats]
    assert all(flat.weight_shared == (homes.count(flat.weight_home) > 1) for flat in layout.flats)
    homes = [flat.grad_home for flat in layout.flats if flat.trainable]
    assert all(
        flat.grad_shared == (homes.count(flat.grad_home) > 1)
        for flat in layout.flats
        if flat.trainable
    )


@given(layouts())
def test_split_parameters_come_first_and_partial_ones_last(layout: Layout) -> None:
    for flat in layout.flats:
        assert all(
            (slot.stop <= flat.split.stop) == (slot.parameter.split is not None)
            for slot in flat.slots
        )
        assert all(
            (slot.start >= flat.partial.start) == slot.parameter.partial for slot in flat.slots
        )


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_cover_a_range_in_order(shape: list[int], data: st.DataObject) -> None:
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    places = {point: number for number, point in enumerate(product(*map(range, shape)))}
    found = []
    for box in boxes_of_range(tuple(shape), start, stop):
        sides = (
            range(offset, offset + length)
            for offset, length in zip(box.offsets, box.sizes, strict=True)
        )
        found += [places[point] for point in product(*sides)]
    assert found == list(range(start, stop))


@given(layouts())
def test_slices_of_a_part_cover_it_once(layout: Layout) -> None:
    for flat in layout.flats:
        for part in (flat.split, flat.partial):
            found = [
                flat.elements_of(index).start + place
                for index in range(flat.shards)
                for place in flat.own(part, index)
            ]
            assert found == list(part)


@given(layouts())
def test_tied_parameters_never_share_a_buffer_with_whole_stages(layout: Layout) -> None:
    tied = {flat.weight_home for flat in layout.flats if flat.tied}
    assert not tied & {flat.weight_home for flat in layout.flats if not flat.tied}
    assert all(
        not flat.weight_shared and not flat.grad_shared for flat in layout.flats if flat.tied
    )


BUFFERS = (None, 1, 2, 3, 5, 8)


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("data", [2, 3, 4, 8])
def test_bytes_stay_within_the_bound_of_counted_buffers(stages: int, data: int) -> None:
    for level, nw, ng in product((1, 2, 3), BUFFERS, BUFFERS):
        layout = equal(stages, data, 840, stage=level, weight_buffers=nw, grad_buffers=ng)
        weights = min(stages, nw or (2 if level == 3 else stages))
        grads = min(stages, ng or (2 if level >= 2 else stages))
        bound = 16 / data + 2 * weights / stages + 4 * grads / stages
        assert sum(layout.bytes().values()) <= bound * layout.parameters + 1e-6
        shared = (
            sum(flat.weight_shared for flat in layout.flats),
            sum(flat.grad_shared for flat in layout.flats),
        )
        if shared == (stages, stages):
            assert sum(layout.bytes().values()) == pytest.approx(bound * layout.parameters)


@pytest.mark.parametrize("stages", range(1, 9))
def test_replication_takes_eighteen_bytes(stages: int) -> None:
    for data, size in product(range(1, 9), (1, 17, 100)):
        layout = equal(stages, data, size, stage=0)
        assert sum(layout.bytes().values()) == 18 * layout.parameters
        assert layout.level == 0


@pytest.mark.parametrize("stages", range(1, 9))
def test_one_data_rank_takes_at_most_eighteen_bytes(stages: int) -> None:
    for level, nw, ng in product(range(4), BUFFERS, BUFFERS):
        layout = equal(stages, 1, 17, stage=level, weight_buffers=nw, grad_buffers=ng)
        assert sum(layout.bytes().values()) <= 18 * layout.parameters


def test_full_precision_on_one_rank_stores_weights_and_gradients_once() -> None:
    plan = Plan.model_validate(
        {"zero": {"stage": 3}, "precision": {"compute": "fp32"}, "optimizer": {"name": "adamw"}}
    )
    layout = Layout.of(
        plan, [Parameter(f"{stage}.w", (10,), "fp32", (stage,)) for stage in range(4)], 4, 1
    )
    assert layout.bytes() == {"weights": 160, "gradients": 160, "master": 0, "moments": 320}


def test_frozen_parameters_have_neither_gradients_nor_state() -> None:
    frozen = [
        Parameter(f"{stage}.w", (10,), "fp32", (stage,), trainable=False) for stage in range(4)
    ]
    layout = Layout.of(
        Plan.model_validate({"zero": {"stage": 1}, "precision": {"compute": "bf16"}}), frozen, 4, 2
    )
    assert layout.bytes() == {"weights": 80, "gradients": 0, "master": 0, "moments": 0}
    assert layout.first_trained == 4
    sharded = Layout.of(
        Plan.model_validate({"zero": {"stage": 3}, "precision": {"compute": "bf16"}}), frozen, 4, 2
    )
    assert sharded.bytes()["weights"] == 2 * 20 + 4 * 10


@pytest.mark.parametrize(
    ("level", "data", "frozen", "kept"),
    [
        (0, 1, "compute", {"weights": 80}),
        (0, 1, "master", {"weights": 80, "master": 160}),
        (0, 2, "master", {"weights": 80, "master": 160}),
        (1, 2, "master", {"weights": 80, "master": 80}),
        (3, 2, "compute", {"weights": 2 * 20 + 4 * 10}),
        (3, 2, "master", {"weights": 2 * 20, "master": 4 * 20}),
    ],
)
def test_frozen_parameters_are_kept_in_the_format_asked_for(
    level: int, data: int, frozen: str, kept: dict[str, int]
) -> None:
    parameters = [
        Parameter(f"{stage}.w", (10,), "fp32", (stage,), trainable=False) for stage in range(4)
    ]
    plan = Plan.of({"zero.stage": level, "precision.compute": "bf16", "precision.frozen": frozen})
    assert {
        kind: size for kind, size in Layout.of(plan, parameters, 4, data).bytes().items() if size
    } == kept


@pytest.mark.parametrize(
    ("zero", "level"),
    [
        ({}, 0), ({"stage": 0}, 0), ({"stage": 1}, 1), ({"stage": 2}, 2), ({"stage": 3}, 3),
        ({"stage": 0, "grad_buffers": 1}, 2), ({"weight_buffers": 3}, 3),
        ({"stage": 3, "weight_buffers": 8, "grad_buffers": 8}, 1),
    ],
)  # fmt: skip
def test_counts_win_over_the_level(zero: dict[str, int], level: int) -> None:
    assert equal(8, 2, **zero).level == level
