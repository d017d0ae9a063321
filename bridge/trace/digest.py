"""Digests: two numbers for a tensor that tell whether a replica of it has the same bits in the same order."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

COLUMNS = 1024
"""Words in a row. A row's words, and then the rows, are summed with weights that depend on their places."""

ROWS = 512
"""Rows that a CPU widens at a time: 4 MiB, still in the cache when they are summed."""


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """(2,) int64: a hash of the bits of `tensor`, and its count of NaNs, on its device and without waiting for it.

    Each 32-bit word is multiplied by an odd 64-bit number of its own and all are added modulo 2^64, so a change of any
    one bit changes the sum for certain, and other changes (elements or rows swapped, all signs flipped) do except for
    a chance of less than 2^-32. All NaNs hash alike: their payloads differ between kernels and mean nothing. Shape and
    dtype do not enter; compare them apart.
    """
    if not tensor.numel():
        return torch.zeros(2, dtype=torch.int64, device=tensor.device)
    values, nans = _canonical(tensor.detach())
    return torch.stack([_hash(_words(values)), nans])


def _canonical(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """`tensor` with one payload for all NaNs, and their count."""
    if not tensor.is_floating_point() or (tensor.device.type == "cpu" and not tensor.sum().isnan()):
        return tensor, torch.zeros((), dtype=torch.int64, device=tensor.device)
    nan = tensor.isnan()
    return tensor.masked_fill(nan, float("nan")), nan.sum()


def _words(tensor: Tensor) -> Tensor:
    """The bytes of `tensor` in order, as 32-bit words; the last is filled up with zeros."""
    flat = tensor.contiguous().view(-1)
    if flat.stride(0) != 1 or flat.storage_offset() * flat.element_size() % 4:
        flat = flat.clone(memory_format=torch.contiguous_format)
    raw = flat.view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, -len(raw) % 4)).view(torch.int32) if len(raw) % 4 else raw.view(torch.int32)


def _hash(words: Tensor) -> Tensor:
    full = len(words) // COLUMNS * COLUMNS
    sums = [_row_sums(words[:full].view(-1, COLUMNS))]
    if full < len(words):
        rest = words[full:].long()
        sums.append(rest.dot(_weights(COLUMNS, words.device)[: len(rest)]).view(1))
    rows = torch.cat(sums)
    return rows.dot(_weights(_at_least(len(rows)), words.device, salt=1)[: len(rows)])


def _row_sums(rows: Tensor) -> Tensor:
    """Weighted sum of each row, in 64 bits."""
    weights = _weights(COLUMNS, rows.device)
    if rows.device.type != "cpu":
        # GPUs have no product of integer matrices.
        return (rows.long() * weights).sum(1)
    sums, wide = torch.empty(len(rows), dtype=torch.int64), torch.empty(min(ROWS, len(rows)), COLUMNS, dtype=torch.int64)
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        torch.mv(wide[: len(part)].copy_(part), weights, out=sums[start : start + ROWS])
    return sums


def _at_least(count: int) -> int:
    """A power of two from 1,024 on, so that few tables of weights are kept."""
    return max(1024, 1 << (count - 1).bit_length()) if count else 1024


@lru_cache(maxsize=64)
def _weights(count: int, device: torch.device, salt: int = 0) -> Tensor:
    """The first `count` odd multipliers, the same wherever they are computed: splitmix64 of their places."""
    word = torch.arange(count, dtype=torch.int64) * 2 + salt + 1
    word = word * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        word = (word ^ _shifted(word, shift)) * factor
    return ((word ^ _shifted(word, 31)) | 1).to(device)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Shifted right with zeros moving in."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)
