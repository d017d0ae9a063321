"""Sketches: a few numbers computed from a tensor, such that the sketch of a sum of tensors is the
sum of their sketches.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

COUNT = 4
"""Number of values in a sketch."""
COLUMNS = 512


@torch.no_grad()
def sketch(tensor: Tensor) -> Tensor:
    """Return the sketch of a tensor, fp64 of shape (COUNT,). Each number is the sum of all
    elements with random signs, and about as large as the tensor's norm.
    """
    flat = flattened(tensor)
    # Sums in 16 bits would lose what a sketch has to prove.
    wide = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat
    rows = wide.numel() // COLUMNS
    columns, weights = (
        _signs(COLUMNS, wide.dtype, wide.device, 1),
        _signs(rows + 1, wide.dtype, wide.device, 2),
    )
    found = wide.new_zeros(COUNT)
    if rows:
        # Over rows first: so a CPU reads the tensor at the speed of its memory.
        found = found + (
            (weights[:rows].T @ wide[: rows * COLUMNS].view(rows, COLUMNS)) * columns.T
        ).sum(1)
    rest = wide[rows * COLUMNS :]
    if rest.numel():
        found = found + (rest @ columns[: rest.numel()]) * weights[rows]
    return found.double()


@lru_cache(maxsize=256)
def _signs(count: int, dtype: torch.dtype, device: torch.device, salt: int) -> Tensor:
    # Made on the CPU: all ranks need the same signs, and generators of devices differ.
    generator = torch.Generator().manual_seed(salt)
    size = 1 << max(9, (count - 1).bit_length())
    signs = torch.randint(0, 2, (size, COUNT), generator=generator)[:count] * 2 - 1
    return signs.to(device=device, dtype=dtype)


def flattened(tensor: Tensor) -> Tensor:
    """Return all elements as one flat tensor of real numbers. A complex number becomes two
    elements, and a sparse tensor becomes dense.
    """
    whole = tensor.detach()
    whole = whole if whole.layout == torch.strided else whole.to_dense()
    return (torch.view_as_real(whole.resolve_conj()) if whole.is_complex() else whole).reshape(-1)


def sample(tensor: Tensor, most: int = 64) -> Tensor:
    """Return a copy of up to `most` elements, spread over the tensor."""
    flat = flattened(tensor)
    return flat[:: max(1, flat.numel() // most)][:most].clone()
