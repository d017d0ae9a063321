"""Summaries: statistics and samples of a tensor, by level, which can be merged over ranks and
microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from bridge.trace.placement import Placement

STATISTICS = 2
"""Level from which on a record has statistics. At level 1 a record has only shape, dtype and
device.
"""

SAMPLES = 3
"""Level from which on a record also has 2^(level - 3) values."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of some elements. NaNs and infinities are counted, and the other statistics leave
    them out.
    """

    count: int
    nans: int
    infs: int
    total: float
    squares: float
    low: float
    high: float

    @classmethod
    def of(cls, measured: Tensor) -> Summary:
        """Make the summary from a result of `measure`, for which it waits."""
        count, nans, infs, total, squares, low, high = measured.tolist()
        return cls(int(count), int(nans), int(infs), total, squares, low, high)

    @classmethod
    def merged(cls, parts: Iterable[Summary]) -> Summary:
        """Return the summary of all elements of `parts`."""
        found = list(parts)
        return cls(
            sum(part.count for part in found),
            sum(part.nans for part in found),
            sum(part.infs for part in found),
            math.fsum(part.total for part in found),
            math.fsum(part.squares for part in found),
            min((part.low for part in found), default=math.inf),
            max((part.high for part in found), default=-math.inf),
        )

    @property
    def finite(self) -> int:
        """Number of elements that are neither NaN nor infinite."""
        return self.count - self.nans - self.infs

    @property
    def mean(self) -> float:
        """The mean of the finite elements; NaN if there are none."""
        return self.total / self.finite if self.finite else math.nan

    @property
    def std(self) -> float:
        """The standard deviation of the finite elements, as a population."""
        return (
            math.sqrt(max(0.0, self.squares / self.finite - self.mean**2))
            if self.finite
            else math.nan
        )

    @property
    def norm(self) -> float:
        """The Euclidean norm of the finite elements."""
        return math.sqrt(self.squares)


@torch.no_grad()
def measure(tensor: Tensor) -> Tensor:
    """Return the values of a summary, (7,) fp64, on the tensor's device. On a GPU, the call does
    not wait for them.
    """
    values = _real(tensor.detach())
    if not values.numel():
        return torch.tensor(EMPTY, dtype=torch.float64, device=values.device)
    total = values.sum(dtype=torch.float64)
    # A finite sum has no NaN and no infinity in it. Elsewhere than on a CPU, asking would wait.
    if values.device.type == "cpu" and total.isfinite():
        return _measured(values, total, *torch.aminmax(values), torch.zeros(2, dtype=torch.float64))
    finite = values.isfinite()
    odd = torch.stack([values.isnan().sum(), values.isinf().sum()]).double()
    low, high = values.where(finite, math.inf).amin(), values.where(finite, -math.inf).amax()
    clean = values.where(finite, 0)
    return _measured(clean, clean.sum(dtype=torch.float64), low, high, odd)


def _real(tensor: Tensor) -> Tensor:
    """Return the elements as real numbers: both parts of each complex number, and all elements of a
    sparse tensor.
    """
    whole = tensor if tensor.layout == torch.strided else tensor.to_dense()
    if whole.is_complex():
        return torch.view_as_real(whole.resolve_conj())
    return whole if whole.is_floating_point() else whole.double()


EMPTY = (0.0, 0.0, 0.0, 0.0, 0.0, math.inf, -math.inf)
"""Result of `measure` for a tensor without elements."""


def _measured(finite: Tensor, total: Tensor, low: Tensor, high: Tensor, odd: Tensor) -> Tensor:
    # In fp32 at least: squares of 16-bit values run over. A copy in fp64 would take memory.
    squares = (
        torch.linalg.vector_norm(finite, dtype=torch.promote_types(finite.dtype, torch.float32))
        .double()
        .square()
    )
    count = total.new_full((1,), finite.numel())
    return torch.cat([count, odd, torch.stack([total, squares, low.double(), high.double()])])


@lru_cache(maxsize=4096)
def sampled(shape: tuple[int, ...], level: int) -> Tensor:
    """Return the indices of the samples of a whole tensor of this shape, in row-major order.

    There are 2^(level - 3) samples, as far apart as possible, but not all in one column (Fast-LLM's
    rule, so that both logs show the same elements). The returned tensor is cached: do not change
    it.
    """
    size, wanted = prod(shape), 2 ** (level - SAMPLES)
    step = max(size // wanted, 1)
    while step > 1 and any(length > 1 and step % length == 0 for length in shape):
        step -= 1
    return torch.arange(0, min(wanted * step, size), step)


@torch.no_grad()
def take(tensor: Tensor, placement: Placement, level: int) -> tuple[Tensor, Tensor]:
    """Return this rank's samples of the whole tensor: their indices among all samples, and their
    values.
    """
    numbers, places = _sampled_here(placement, level, tensor.device)
    return numbers.clone(), tensor.detach().reshape(-1)[places]


@lru_cache(maxsize=4096)
def _sampled_here(placement: Placement, level: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices of this rank's samples among all samples, and in its part. The result is
    cached: do not change it.
    """
    held, places = placement.within(sampled(placement.whole, level))
    return held.nonzero().view(-1), places.to(device)
