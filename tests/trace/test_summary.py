"""Summaries and samples of parts make those of the whole, however it was cut."""

from __future__ import annotations

import math
from math import prod

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from bridge.trace.placement import Placement
from bridge.trace.summary import Summary, measure_statistics, sample_indices, take_samples

QUIET = settings(max_examples=100, derandomize=True, database=None, deadline=None)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Placement]]:
    """A shape, cut into boxes along one dimension, and each of these into runs."""
    dims = draw(st.integers(1, 3))
    dim, parts, size = (
        draw(st.integers(0, dims - 1)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
    )
    shape = tuple(size * parts if at == dim else draw(st.integers(1, 5)) for at in range(dims))
    local = tuple(size if at == dim else length for at, length in enumerate(shape))
    boxes = [Placement.full(local).split(dim, index, parts) for index in range(parts)]
    ends = draw(st.lists(st.integers(0, prod(local)), max_size=3).map(sorted))
    runs = list(zip([0, *ends], [*ends, prod(local)], strict=True))
    return shape, [box.run(start, stop) for box in boxes for start, stop in runs]


def part_of(whole: Tensor, placement: Placement) -> Tensor:
    return whole.reshape(-1)[placement.places()]


@QUIET
@given(cuts(), st.integers(0, 9))
def test_parts_cover_the_whole_once(
    cut: tuple[tuple[int, ...], list[Placement]], seed: int
) -> None:
    shape, placements = cut
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert sorted(torch.cat([placement.places() for placement in placements]).tolist()) == list(
        range(prod(shape))
    )
    parts = [part_of(whole, placement) for placement in placements]
    merged, straight = (
        Summary.merge_parts(Summary.of(measure_statistics(part)) for part in parts),
        Summary.of(measure_statistics(whole)),
    )
    assert (merged.count, merged.low, merged.high) == (straight.count, straight.low, straight.high)
    for name in ("mean", "std", "norm"):
        assert getattr(merged, name) == pytest.approx(getattr(straight, name), rel=1e-12, abs=1e-12)
    assert merged.mean == pytest.approx(float(whole.mean()), abs=1e-12)
    assert merged.std == pytest.approx(float(whole.std(correction=0)), abs=1e-7)


@QUIET
@given(cuts(), st.integers(3, 7))
def test_samples_are_those_of_the_whole(
    cut: tuple[tuple[int, ...], list[Placement]], level: int
) -> None:
    shape, placements = cut
    whole = torch.arange(prod(shape)).view(shape)
    found = torch.full_like(sample_indices(shape, level), -1)
    for placement in placements:
        numbers, values = take_samples(part_of(whole, placement), placement, level)
        found[numbers] = values
    assert torch.equal(found, sample_indices(shape, level))
    assert len(found) <= 2 ** (level - 3)


def test_what_is_not_finite_is_counted_apart() -> None:
    tensor = torch.tensor([1.0, math.nan, -3.0, math.inf, -math.inf, math.nan])
    found = Summary.of(measure_statistics(tensor))
    assert (found.count, found.nans, found.infs, found.finite) == (6, 2, 2, 2)
    assert (found.mean, found.low, found.high) == (-1.0, -3.0, 1.0)
    assert found.norm == pytest.approx(math.sqrt(10))
    nothing = Summary.of(measure_statistics(torch.tensor([math.nan])))
    assert nothing.nans == 1
    assert math.isnan(nothing.mean)
    assert Summary.merge_parts([nothing, found]).mean == -1.0
    assert Summary.of(measure_statistics(torch.zeros(0))) == Summary.merge_parts([])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_short_formats_do_not_overflow(dtype: torch.dtype) -> None:
    tensor = torch.ones(70_000).to(dtype) * (200 if dtype is not torch.bool else True)
    found = Summary.of(measure_statistics(tensor))
    assert found.mean == float(tensor[0])
    assert found.norm == pytest.approx(float(tensor[0]) * math.sqrt(70_000), rel=1e-6)


@pytest.mark.parametrize(
    ("shape", "level", "places"),
    [
        ((7,), 4, [0, 3]),
        ((4, 8), 5, [0, 7, 14, 21]),
        ((3,), 13, [0, 1, 2]),
        ((1000,), 3, [0]),
        ((), 3, [0]),
    ],
)
def test_samples_lie_apart(shape: tuple[int, ...], level: int, places: list[int]) -> None:
    """The step shrinks until no dimension divides it: 8 of 32 would always hit the first column, 7 does not."""
    assert sample_indices(shape, level).tolist() == places
