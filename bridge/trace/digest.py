"""Digests: two numbers for a tensor that tell whether a replica of it has the same bits in the same order."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

COLUMNS = 1024
"""Words in a row. A row's words are added up with weights that depend on their places, and then so are the rows."""

ROWS = {"cpu": 256}
"""Rows that are widened at a time: on a CPU 2 MiB, still in the cache when they are added up."""
MOST = 1 << 14
"""The same on other devices, where starting costs more than memory."""

WEIGHTS = 1 << 12
"""Weights of a row's words are smaller: its sums, of 1,024 words of 32 bits, stay below 2^53, up to where fp64 is exact."""


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """(2,) int64: a hash of the bits of `tensor`, and its count of NaNs, on its device and without waiting for it.

    All NaNs hash alike: their payloads differ between kernels and mean nothing. Shape and dtype do not enter; compare them
    apart. See `bits` for what the hash sees.
    """
    values, nans = _canonical(tensor.detach())
    return torch.stack([bits(values), nans])


@torch.no_grad()
def bits(tensor: Tensor) -> Tensor:
    """() int64: a hash of the bits of `tensor`, payloads of NaNs included, on its device and without waiting for it.

    The 32-bit words of each row are added up exactly, with two sets of odd weights, and these sums modulo 2^64 with odd numbers
    of their own. So a change of any one bit changes the hash for certain, and so do two words of a row that are swapped; other
    changes do except for a chance of about 2^-22 where few words of one row change, and of less than 2^-32 elsewhere.
    """
    rows = _row_sums(_words(tensor.detach())).view(-1)
    return rows.dot(_multipliers(_at_least(len(rows)), rows.device)[: len(rows)])


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


def _row_sums(words: Tensor) -> Tensor:
    """(2, rows) int64: the weighted sums of each row; the last is filled up with zeros."""
    count, most = -(-len(words) // COLUMNS), ROWS.get(words.device.type, MOST)
    sums = words.new_empty(2, count, dtype=torch.float64)
    wide = words.new_empty(min(most, count), COLUMNS, dtype=torch.float64)
    for start in range(0, count, most):
        part = words[start * COLUMNS : (start + most) * COLUMNS]
        rows = wide[: -(-len(part) // COLUMNS)]
        rows.view(-1)[: len(part)].copy_(part)
        rows.view(-1)[len(part) :].zero_()
        for total, weights in zip(sums, _weights(words.device), strict=True):
            torch.mv(rows, weights, out=total[start : start + most])
    return sums.long()


def _at_least(count: int) -> int:
    """A power of two from 1,024 on, so that few tables of multipliers are kept."""
    return 1 << max(10, (count - 1).bit_length())


@lru_cache(maxsize=64)
def _multipliers(count: int, device: torch.device) -> Tensor:
    """The first `count` odd multipliers, the same wherever they are computed."""
    return (_mixed(count, 1) | 1).to(device)


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """(2, COLUMNS) fp64: twice different odd numbers below `WEIGHTS`."""
    orders = [_mixed(WEIGHTS // 2, salt).argsort()[:COLUMNS] for salt in (2, 3)]
    return (torch.stack(orders) * 2 + 1).double().to(device)


def _mixed(count: int, salt: int) -> Tensor:
    """int64 numbers without order, all different: splitmix64 of their places."""
    word = (torch.arange(count, dtype=torch.int64) * 4 + salt) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        word = (word ^ _shifted(word, shift)) * factor
    return word ^ _shifted(word, 31)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Shifted right with zeros moving in."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)
