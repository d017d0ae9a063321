"""Boxes: rectangular regions of a tensor, and those that a run of its elements consists of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of a tensor: its offset and its size along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Divide the elements `start` to `stop` - 1 of a tensor into rectangular regions, and yield
    these regions in order. Elements are counted row by row.
    """
    if stop <= start:
        return
    if len(shape) < 2:
        yield Box((start,) if shape else (), (stop - start,) if shape else ())
        return
    row = prod(shape[1:])
    # Rows `first` to `last` - 1 are covered whole; the run may begin and end within other rows.
    first, last = -(-start // row), stop // row
    if first > last:
        # The run begins and ends within the same row.
        yield from _in_row(shape, last, start, stop)
        return
    # The end of the row before the whole ones, the whole ones as one box, the beginning of the row behind them. The first and
    # the last are empty if the run begins or ends at the edge of a row.
    yield from _in_row(shape, first - 1, start, first * row)
    if last > first:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    """Yield the regions for the elements `start` to `stop` - 1, which all have index `index` along
    the first dimension.
    """
    row = prod(shape[1:])
    # A row is a tensor with one dimension less, in which the elements count from its own beginning.
    for box in boxes_of_range(shape[1:], start - index * row, stop - index * row):
        yield Box((index, *box.offsets), (1, *box.sizes))
