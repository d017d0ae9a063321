"""Partition rules: known cases of each stack, and properties that hold for all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from bridge.errors import ConfigError
from bridge.layout.partition import (
    FEW,
    SMALL,
    Layers,
    balance_stages,
    carry_boundaries,
    cut_within,
    even_boundaries,
    floor_last,
    partition_layers,
)
from bridge.plan.plan import Stages

SAMPLE = Path(__file__).parents[1] / "stacks" / "automodel" / "stages.jsonl"


def lengths(
    rule: str, layers: Layers, size: float | None = None, parts: int | None = None
) -> list[int]:
    """Layers in each stage."""
    stages = Stages.model_validate({"rule": rule, "layers_per_stage": size})
    return [len(stage) for stage in partition_layers(stages, layers, parts)]


def sizes(boundaries: tuple[int, ...]) -> list[int]:
    """Layers between boundaries."""
    return [last - first for first, last in pairwise(boundaries)]


# Embedding, eight blocks and head, as Fast-LLM's own splitting cuts them.
@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0.1, [1] * 10), (0.5, [1] * 10), (1, [1] * 10), (1.5, [1, 2, 2, 2, 2, 1]), (2, [1, 2, 2, 2, 2, 1]),
        (2.5, [1, 3, 3, 3]), (3, [1, 3, 3, 3]), (4, [1, 4, 4, 1]), (9, [1, 9]), (1000, [1, 9]), (2000, [10]),
    ],
)  # fmt: skip
def test_ceil_cuts_as_fast_llm(size: float, expected: list[int]) -> None:
    assert lengths("ceil", Layers(10, leading=1, trailing=1), size) == expected


def test_carry_carries_fractions() -> None:
    assert lengths("carry", Layers(6), 1.5) == [1, 2, 1, 2]
    assert lengths("carry", Layers(10), 2.5) == [2, 3, 2, 3]
    assert lengths("carry", Layers(33), 1.1)[9::10] == [2, 2, 2]


def test_floor_last_gives_the_rest_to_later_stages() -> None:
    assert lengths("floor_last", Layers(10), parts=4) == [2, 2, 3, 3]
    assert lengths("even", Layers(10), parts=4) == [3, 3, 2, 2]


def test_ends_join_the_outer_stages_of_rules_that_count_transformer_layers() -> None:
    assert lengths("even", Layers(10, 1, 1), parts=4) == [3, 2, 2, 3]
    explicit = Stages(rule="explicit", boundaries=(0, 3, 8))
    assert partition_layers(explicit, Layers(10, 1, 1)) == (range(4), range(4, 10))
    assert partition_layers(Stages(boundaries=(0, 1, 10)), Layers(10, 1, 1)) == (
        range(1),
        range(1, 10),
    )


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from (row for row in map(json.loads, lines) if "rejected" not in row)


def test_even_is_automodels_rule(shared: Path | None) -> None:
    rows = list(_rows(shared / "truth" / "automodel_stages.jsonl" if shared else SAMPLE))
    assert len(rows) == (585 if shared else 147)
    for row in rows:
        assert sizes(even_boundaries(row["num_layers"], row["virtual_stages"])) == row["layers"], (
            row
        )


@given(st.integers(1, 60), st.integers(1, 60))
def test_even_and_floor_last_are_mirror_images(count: int, parts: int) -> None:
    if parts <= count:
        assert sizes(even_boundaries(count, parts)) == sizes(floor_last(count, parts))[::-1]
        assert (
            max(sizes(even_boundaries(count, parts))) - min(sizes(even_boundaries(count, parts)))
            <= 1
        )


@given(st.integers(1, 60), st.integers(1, 80), st.integers(1, 10))
def test_carry_stays_within_a_layer_of_the_exact_cut(count: int, above: int, below: int) -> None:
    size = Fraction(above, below)
    boundaries = carry_boundaries(count, size)
    assert boundaries[0] == 0 and boundaries[-1] == count
    if size >= 1:
        assert all(0 <= size * index - cut < 1 for index, cut in enumerate(boundaries[:-1]))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_balanced_is_the_best_of_all_cuts(costs: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    choices = [(0, *cuts, len(costs)) for cuts in combinations(range(1, len(costs)), parts - 1)]

    def rank(boundaries: tuple[int, ...]) -> tuple[int, int]:
        totals = [sum(costs[first:last]) for first, last in pairwise(boundaries)]
        return max(totals), sum(total**2 for total in totals)

    found = balance_stages(costs, parts)
    assert len(found) == parts + 1 and all(first < last for first, last in pairwise(found))
    assert rank(found) == min(map(rank, choices))


def test_balanced_handles_a_deep_model() -> None:
    found = balance_stages([50_000, *([7_000] * 126), 50_000], 64)
    assert len(sizes(found)) == 64


@given(
    st.sampled_from(["carry", "ceil", "even", "floor_last"]),
    st.integers(1, 40),
    st.floats(0.1, 50) | st.none(),
    st.integers(1, 40),
)
def test_every_rule_covers_the_layers_in_order(
    rule: str, count: int, size: float | None, parts: int
) -> None:
    stages = Stages.model_validate({"rule": rule, "layers_per_stage": size})
    try:
        found = partition_layers(stages, Layers(count), parts)
    except ConfigError:
        assert parts > count
        return
    assert [layer for stage in found for layer in stage] == list(range(count))
    assert all(len(stage) > 0 for stage in found)


@pytest.mark.parametrize(
    ("stages", "layers", "parts", "message"),
    [
        (
            Stages(rule="parameters"),
            Layers(4),
            2,
            "stages.rule: 'parameters' needs the size of each of the 4 layers, found 0",
        ),
        (
            Stages(rule="even"),
            Layers(2),
            4,
            "stages: found 4 stages, but only 2 layers; use at most 2 stages",
        ),
        (Stages(rule="explicit"), Layers(4), None, "stages.boundaries: found (), expected 0"),
        (
            Stages(boundaries=(0, 2, 5)),
            Layers(4),
            None,
            "stages.boundaries: found 5 as the last number, expected the number of layers, 4",
        ),
        (
            Stages(boundaries=(0, 3, 3, 4)),
            Layers(4),
            None,
            "stages.boundaries: found 3 after 3, expected increasing numbers, because each stage needs a layer",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(
    stages: Stages, layers: Layers, parts: int | None, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        partition_layers(stages, layers, parts)
    assert str(caught.value).startswith(message)


def test_few_layers_keep_a_stage_each() -> None:
    assert cut_within(Layers(FEW, parameters=(1,) * FEW), [range(FEW)]) == tuple(
        range(at, at + 1) for at in range(FEW)
    )


def test_large_layers_keep_a_stage_each() -> None:
    many = 3 * FEW
    assert cut_within(Layers(many, parameters=(SMALL,) * many), [range(many)]) == tuple(
        range(at, at + 1) for at in range(many)
    )


@given(st.lists(st.integers(0, 2 * SMALL), min_size=FEW + 1, max_size=200), st.data())
def test_small_neighbours_share_a_stage(sizes: list[int], data: st.DataObject) -> None:
    """Every layer is in one stage, within one part; none is small but where a part has no more, and none has room to spare."""
    cut = data.draw(st.integers(1, len(sizes) - 1))
    parts = [range(cut), range(cut, len(sizes))]
    found = cut_within(Layers(len(sizes), parameters=tuple(sizes)), parts)
    assert [layer for stage in found for layer in stage] == list(range(len(sizes)))
    for part in parts:
        inside = [stage for stage in found if stage.start in part]
        assert inside[-1].stop == part.stop
        held = [sum(sizes[layer] for layer in stage) for stage in inside]
        assert len(held) == 1 or min(held) >= SMALL
        assert all(sum(sizes[layer] for layer in stage[:-1]) < SMALL for stage in inside[:-1])
