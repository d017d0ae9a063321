"""Sketches: a few numbers computed from a tensor, such that the sketch of a sum of tensors is the
sum of their sketches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

COUNT = 4
"""Number of values in a sketch."""
COLUMNS = 512


@torch.no_grad()
def sketch_tensor(tensor: Tensor) -> Tensor:
    """Return the sketch of a tensor, fp64 of shape (COUNT,). Each number is the sum of all
    elements with random signs, and about as large as the tensor's norm.
    """
    flat = flatten_real(tensor)
    # Sums in 16 bits would lose what a sketch has to prove.
    wide = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat
    if wide.numel() <= COLUMNS:
        signs = _random_signs(wide.numel(), wide.dtype, wide.device, 1)
        return (signs.T @ wide).double()
    rows = wide.numel() // COLUMNS
    columns, weights = (
        _random_signs(COLUMNS, wide.dtype, wide.device, 1),
        _random_signs(rows + 1, wide.dtype, wide.device, 2),
    )
    parts = []
    if rows:
        # Over rows first: so a CPU reads the tensor at the speed of its memory.
        sums = weights[:rows].T @ wide[: rows * COLUMNS].view(rows, COLUMNS)
        parts.append((sums * columns.T).sum(1, dtype=torch.float64))
    rest = wide[rows * COLUMNS :]
    if rest.numel():
        parts.append(((rest @ columns[: rest.numel()]) * weights[rows]).double())
    return parts[0] + parts[1] if len(parts) > 1 else parts[0]


@lru_cache(maxsize=256)
def _random_signs(count: int, dtype: torch.dtype, device: torch.device, salt: int) -> Tensor:
    # Made on the CPU: all ranks need the same signs, and generators of devices differ.
    generator = torch.Generator().manual_seed(salt)
    size = 1 << max(9, (count - 1).bit_length())
    signs = torch.randint(0, 2, (size, COUNT), generator=generator)[:count] * 2 - 1
    return signs.to(device=device, dtype=dtype)


def flatten_real(tensor: Tensor) -> Tensor:
    """Return all elements as one flat tensor of real numbers. A complex number becomes two
    elements, and a sparse tensor becomes dense.
    """
    whole = tensor.detach()
    whole = whole if whole.layout == torch.strided else whole.to_dense()
    return (torch.view_as_real(whole.resolve_conj()) if whole.is_complex() else whole).reshape(-1)


def sample_tensor(tensor: Tensor, most: int = 64) -> Tensor:
    """Return a copy of up to `most` elements, spread over the tensor."""
    return spread_elements(tensor, most).clone()


def sample_tensors(tensors: Mapping[str, Tensor], most: int = 64) -> dict[str, Tensor]:
    """Return a copy of up to `most` elements of each tensor, on the CPU. The call waits for a
    device once, and not once for each tensor.
    """
    return start_sampling(tensors, most)()


def start_sampling(
    tensors: Mapping[str, Tensor], most: int = 64
) -> Callable[[], dict[str, Tensor]]:
    """Copy up to `most` elements of each tensor on its device, without waiting for the device.
    Return a function that returns the copies on the CPU.
    """
    views = {name: spread_elements(tensor, most) for name, tensor in tensors.items()}
    kinds: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, view in views.items():
        kinds.setdefault((view.device, view.dtype), []).append(name)
    sizes = {name: len(view) for name, view in views.items()}
    copies = [(names, torch.cat([views[name] for name in names])) for names in kinds.values()]

    def fetch_samples() -> dict[str, Tensor]:
        samples: dict[str, Tensor] = {}
        for names, whole in copies:
            parts = torch.split(whole.cpu(), [sizes[name] for name in names])
            samples.update(zip(names, parts, strict=True))
        return {name: samples[name] for name in sizes}

    return fetch_samples


def differing_names(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> set[str]:
    """Return the names of those tensors in both of which elements differ. A NaN differs from
    itself, and tensors of different shapes are left out.
    """
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, one in first.items():
        other = second.get(name)
        if other is not None and one.shape == other.shape:
            alike.setdefault((one.shape, one.dtype, other.dtype), []).append(name)
    odd_names: set[str] = set()
    for names in alike.values():
        ours, theirs = (torch.stack([part[name] for name in names]) for part in (first, second))
        apart = (ours != theirs).flatten(1).any(1)
        odd_names.update(name for name, odd in zip(names, apart.tolist(), strict=True) if odd)
    return odd_names


def on_host(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape, stacked on the CPU. The call waits for each device once."""
    places: dict[torch.device, list[int]] = {}
    for at, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(at)
    if len(places) == 1:
        return torch.stack(list(tensors)).cpu()
    stack = torch.stack([torch.zeros_like(tensor, device="cpu") for tensor in tensors])
    for own in places.values():
        stack[own] = torch.stack([tensors[at] for at in own]).cpu()
    return stack


def spread_elements(tensor: Tensor, most: int) -> Tensor:
    """Return a view of up to `most` elements, spread over the tensor."""
    numbers, step = tensor.numel(), max(1, tensor.numel() // most)
    # One view where there can be one: each step asks for some hundred.
    if tensor.layout == torch.strided and tensor.is_contiguous() and not tensor.is_complex():
        count = min(most, -(-numbers // step))
        return tensor.detach().as_strided((count,), (step,), tensor.storage_offset())
    flat = flatten_real(tensor)
    return flat[:: max(1, flat.numel() // most)][:most]
