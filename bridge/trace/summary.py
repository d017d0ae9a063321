"""Summaries: statistics and samples of a tensor. Summaries of a tensor's parts can be merged."""

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
"""Lowest level at which a record has statistics. At level 1 it has only the shape, dtype and
device of the tensor.
"""

SAMPLES = 3
"""Lowest level at which a record also has samples: 2^(level - 3) values of the tensor."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of the elements of a tensor. NaNs and infinities are counted; the other
    statistics leave them out.
    """

    count: int
    nans: int
    infs: int
    total: float
    squares: float
    low: float
    high: float

    @classmethod
    def of(cls, statistics: Tensor) -> Summary:
        """Return the summary for a result of `measure_statistics`. The call waits for the device."""
        count, nans, infs, total, squares, low, high = statistics.tolist()
        return cls(int(count), int(nans), int(infs), total, squares, low, high)

    @classmethod
    def merge_parts(cls, parts: Iterable[Summary]) -> Summary:
        """Return the summary of a tensor whose parts have the summaries `parts`."""
        summaries = list(parts)
        return cls(
            sum(part.count for part in summaries),
            sum(part.nans for part in summaries),
            sum(part.infs for part in summaries),
            math.fsum(part.total for part in summaries),
            math.fsum(part.squares for part in summaries),
            min((part.low for part in summaries), default=math.inf),
            max((part.high for part in summaries), default=-math.inf),
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
        """The standard deviation of the finite elements; NaN if there are none. The sum of squares
        is divided by the number of elements, not by this number less one.
        """
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
def measure_statistics(tensor: Tensor) -> Tensor:
    """Return the seven statistics of a tensor as fp64 numbers on the tensor's device. On a GPU,
    the call does not wait for the device.
    """
    values = _real_elements(tensor.detach())
    if not values.numel():
        return torch.tensor(EMPTY, dtype=torch.float64, device=values.device)
    # A finite sum has no NaN and no infinity in it. Elsewhere than on a CPU, asking would wait.
    if values.device.type == "cpu":
        total = float(_sum_of(values))
        if math.isfinite(total):
            extremes = map(float, torch.aminmax(values))
            numbers = [values.numel(), 0, 0, total, float(_norm_of(values)) ** 2, *extremes]
            return torch.tensor(numbers, dtype=torch.float64)
    finite = values.isfinite()
    odd = torch.stack([values.isnan().sum(), values.isinf().sum()]).double()
    low, high = values.where(finite, math.inf).amin(), values.where(finite, -math.inf).amax()
    clean = values.where(finite, 0)
    squares, count = _norm_of(clean).double().square(), odd.new_full((1,), values.numel())
    sums = [_sum_of(clean), squares, low.double(), high.double()]
    return torch.cat([count, odd, torch.stack(sums)])


def _real_elements(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as real numbers: both parts of each complex number, and also
    the zeros of a sparse tensor.
    """
    whole = tensor if tensor.layout == torch.strided else tensor.to_dense()
    if whole.is_complex():
        return torch.view_as_real(whole.resolve_conj())
    return whole if whole.is_floating_point() else whole.double()


EMPTY = (0.0, 0.0, 0.0, 0.0, 0.0, math.inf, -math.inf)
"""Result of `measure_statistics` for a tensor without elements."""


ROW = 512
"""Number of elements that are summed in fp32 before sums are added in fp64, which is slow."""


def _sum_of(values: Tensor) -> Tensor:
    """Return the sum as a fp64 number."""
    flat, wide = values.reshape(-1), torch.promote_types(values.dtype, torch.float32)
    if flat.numel() < 2 * ROW or wide == torch.float64:
        return flat.sum(dtype=torch.float64)
    rows = flat.numel() // ROW
    sums = flat[: rows * ROW].view(rows, ROW).sum(1, dtype=wide)
    return sums.sum(dtype=torch.float64) + flat[rows * ROW :].sum(dtype=torch.float64)


def _norm_of(values: Tensor) -> Tensor:
    # In fp32 at least: squares of 16-bit values run over. A copy in fp64 would take memory.
    wide = torch.promote_types(values.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(values, dtype=wide)
    return norm


@lru_cache(maxsize=4096)
def sample_indices(shape: tuple[int, ...], level: int) -> Tensor:
    """Return the indices of the samples that are taken from a tensor of this shape, in row-major
    order.

    There are at most 2^(level - 3) samples, as far apart as possible, but not all in one column.
    This is the rule of Fast-LLM, so that its logs and ours show the same elements. The returned
    tensor is cached: do not change it.
    """
    size, count = prod(shape), 2 ** (level - SAMPLES)
    step = max(size // count, 1)
    while step > 1 and any(length > 1 and step % length == 0 for length in shape):
        step -= 1
    return torch.arange(0, min(count * step, size), step)


@torch.no_grad()
def take_samples(tensor: Tensor, placement: Placement, level: int) -> tuple[Tensor, Tensor]:
    """Return the samples of a whole tensor that lie in this rank's part: their indices among all
    samples, and their values.
    """
    numbers, places = _local_sample_indices(placement, level, tensor.device)
    return numbers.clone(), tensor.detach().reshape(-1)[places]


@lru_cache(maxsize=4096)
def _local_sample_indices(
    placement: Placement, level: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return two indices for each sample that lies in a rank's part: the index among all samples,
    and the index in the part. The result is cached: do not change it.
    """
    mask, places = placement.within(sample_indices(placement.whole, level))
    return mask.nonzero().view(-1), places.to(device)
