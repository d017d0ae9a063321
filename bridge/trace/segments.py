"""Segments: arrays of unequal length, concatenated in one array and processed all at once."""

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
    """The lengths and beginnings of segments, and the index of the segment for each element."""

    lengths: Places
    begins: Places
    numbers: Places

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Segments:
        """Segments with these lengths."""
        found = np.array(lengths, np.int64)
        return cls(found, np.cumsum(found) - found, np.repeat(np.arange(len(found)), found))

    @property
    def size(self) -> int:
        """Number of elements in all segments."""
        return len(self.numbers)

    def elements(self, which: Places) -> Places:
        """Return the indices of the elements of the segments `which`, in that order."""
        return ranges(self.begins[which], self.lengths[which])

    def sums(self, values: Floats) -> Floats:
        """Return the sums of each segment's elements: (elements,) to (segments,), with 0 for an
        empty segment.
        """
        found: Floats = np.bincount(self.numbers, values, len(self.lengths)).astype(np.float64)
        return found

    def rms(self, values: Floats) -> Floats:
        """Return the root mean square of each segment, over all rows of `values` (elements,) or
        (rows, elements); 0 if empty.
        """
        with np.errstate(all="ignore"):
            squares = values**2 if values.ndim == 1 else (values**2).sum(axis=0)
            count = np.maximum(self.lengths * (values.size // max(1, values.shape[-1])), 1)
            found: Floats = np.sqrt(self.sums(squares) / count)
        return found

    def spread(self, values: NDArray[Any]) -> NDArray[Any]:
        """Repeat each segment's value for its elements: (segments,) to (elements,)."""
        return values[self.numbers]


def ranges(begins: Places, lengths: Places) -> Places:
    """Return the concatenation of ranges of integers, given by `begins` and `lengths`."""
    ends = np.cumsum(lengths)
    found: Places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(
        begins - (ends - lengths), lengths
    )
    return found
