"""Segments: arrays of unequal length that lie one after the other in one array, so that all of
them are processed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of an array: the length and the first index of each segment, and for each
    element the number of its segment.
    """

    lengths: Places
    begins: Places
    numbers: Places

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Segments:
        """Return segments with these lengths, one after the other."""
        sizes = np.array(lengths, np.int64)
        return cls(sizes, np.cumsum(sizes) - sizes, np.repeat(np.arange(len(sizes)), sizes))

    @property
    def size(self) -> int:
        """Number of elements in all segments."""
        return len(self.numbers)

    def elements(self, which: Places) -> Places:
        """Return the indices of all elements in the segments `which`, segment by segment in this
        order.
        """
        return join_ranges(self.begins[which], self.lengths[which])

    def sums(self, values: Floats) -> Floats:
        """Return the sum of each segment of `values`: an array (elements,) becomes an array
        (segments,). The sum of an empty segment is 0.
        """
        totals: Floats = np.bincount(self.numbers, values, len(self.lengths)).astype(np.float64)
        return totals

    def rms(self, values: Floats) -> Floats:
        """Return the root mean square of each segment of `values`, an array (elements,) or (rows,
        elements); all rows count together. It is 0 for an empty segment.
        """
        with np.errstate(all="ignore"):
            squares = values**2 if values.ndim == 1 else (values**2).sum(axis=0)
            count = np.maximum(self.lengths * (values.size // max(1, values.shape[-1])), 1)
            result: Floats = np.sqrt(self.sums(squares) / count)
        return result

    def spread(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return each segment's value once for each of its elements: an array (segments,) becomes
        an array (elements,).
        """
        return values[self.numbers]


def join_ranges(begins: Places, lengths: Places) -> Places:
    """Return the integers of several ranges, one after the other. Each range has a first number
    and a length.
    """
    ends = np.cumsum(lengths)
    integers: Places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(
        begins - (ends - lengths), lengths
    )
    return integers
