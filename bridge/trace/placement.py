"""Placements: which part of a whole tensor a rank holds, in a form that is the same for all
layouts, so that parts can be joined.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """A part of a tensor of shape `whole`. The box at `offsets` with `sizes` is cut out of the
    tensor, and the part is its elements `start` to `stop` in row-major order. Ranks along the axes
    `replicas` hold the same part.
    """

    whole: Shape
    offsets: Shape
    sizes: Shape
    start: int
    stop: int
    replicas: tuple[str, ...] = ()

    @classmethod
    @lru_cache(maxsize=4096)
    def full(cls, shape: Shape, replicas: tuple[str, ...] = ()) -> Placement:
        """Return the placement of a whole tensor."""
        return cls(shape, (0,) * len(shape), shape, 0, prod(shape), replicas)

    @classmethod
    def box(
        cls, whole: Shape, offsets: Shape, sizes: Shape, replicas: tuple[str, ...] = ()
    ) -> Placement:
        """Return the placement of a whole box."""
        return cls(whole, offsets, sizes, 0, prod(sizes), replicas)

    def split(self, dim: int, index: int, parts: int) -> Placement:
        """Return the placement of the same elements in a larger tensor, which consists of `parts`
        equal parts along `dim`. The present tensor is part `index` of these.
        """
        size, change = self.sizes[dim], {dim: self.sizes[dim] * index}
        whole = tuple(
            length * parts if at == dim else length for at, length in enumerate(self.whole)
        )
        offsets = tuple(offset + change.get(at, 0) for at, offset in enumerate(self.offsets))
        assert size * parts == whole[dim], "expected a tensor that is not cut along this dimension"
        return Placement(whole, offsets, self.sizes, self.start, self.stop, self.replicas)

    def run(self, start: int, stop: int) -> Placement:
        """Return the placement of the elements `start` to `stop` of the box, in row-major order."""
        return Placement(self.whole, self.offsets, self.sizes, start, stop, self.replicas)

    @property
    def count(self) -> int:
        """Elements held."""
        return self.stop - self.start

    @property
    def complete(self) -> bool:
        """Whether the rank holds the whole tensor."""
        return self.count == prod(self.whole)

    def within(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Find the elements with these `indices` (in the whole tensor, int64, row-major
        order) in this part. Returns for each index whether the part has the element, and the
        indices within the part of those that it has.
        """
        mask = torch.ones_like(indices, dtype=torch.bool)
        place, rest = torch.zeros_like(indices), indices
        for at, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            stride = prod(self.whole[at + 1 :])
            index, rest = rest // stride - offset, rest % stride
            mask &= (index >= 0) & (index < size)
            # Row-major inside of the box; what lies outside of it `mask` leaves out.
            place = place * size + index
        place = place - self.start
        mask &= (place >= 0) & (place < self.count)
        return mask, place[mask]

    def places(self) -> Tensor:
        """Return for each element of this part its index in the whole tensor, both in row-major
        order.
        """
        elements = torch.arange(self.start, self.stop)
        place = torch.zeros_like(elements)
        for at, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            # An empty box has no element, and must not divide by 0.
            index = elements // prod(self.sizes[at + 1 :]) % size if size else elements
            place = place + (index + offset) * prod(self.whole[at + 1 :])
        return place
