"""Digests: two numbers for each tensor. If two copies of a tensor have different digests, their
bits differ.
"""

from __future__ import annotations

from functools import lru_cache
from threading import get_ident

import torch
from torch import Tensor

COLUMNS = 128
"""Number of 32-bit words in a row. The words of a row are summed with weights that depend on their
position; the sums of the rows are then summed in the same way.
"""

WEIGHTS = 1 << 15
"""All weights in a row are smaller than this number. Weighted sums of 128 words of 32 bits then
stay below 2^53, so that fp64 holds them exactly.
"""

ROWS = 1 << 11
"""Number of rows that a CPU converts to fp64 at a time. They take 2 MiB, which are still in the
cache when they are summed.
"""
MOST = 1 << 17
"""Number of rows that other devices convert to fp64 at a time. It is larger than on a CPU, because
each kernel launch costs time.
"""


@torch.no_grad()
def digest_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor (2,) int64: a hash of the bits of `tensor`, and the number of its NaNs.

    It is on the tensor's device, and the call does not wait for the device. All NaNs count as
    equal, because their payloads differ between kernels and have no meaning. Shape and dtype do not
    change the hash; compare them separately. `hash_bits` describes which changes the hash detects.
    """
    values, nans = _canonical_nans(tensor.detach())
    return torch.stack([hash_bits(values), nans])


@torch.no_grad()
def hash_bits(tensor: Tensor) -> Tensor:
    """Return a hash of the bits of `tensor`, payloads of NaNs included, as a tensor () int64.

    It is on the tensor's device, and the call does not wait for the device. The 32-bit words of
    each row are summed exactly with different odd weights, and the sums of the rows modulo 2^64
    with other odd weights. One changed bit always changes the hash, and so do two swapped words of
    a row. Other changes go undetected with a probability below 2^-32, or of about 2^-15 if only the
    same bit changes in three or more words of one row of 512 bytes.
    """
    words = _words_of_bytes(tensor.detach())
    weights, most = (
        _word_weights(words.device),
        COLUMNS * (ROWS if words.device.type == "cpu" else MOST),
    )
    starts = range(0, max(words.numel(), 1), most)
    # The sums are whole numbers below 2^53: fp64 adds them exactly, in any order, and fast.
    sums = [torch.mv(_words_as_fp64(words[start : start + most]), weights) for start in starts]
    rows = torch.cat(sums).long()
    factors = _odd_multipliers(_at_least(rows.numel()), rows.device)[: rows.numel()]
    # torch has products of int64 vectors on CPUs alone.
    return rows.dot(factors) if rows.device.type == "cpu" else rows.mul_(factors).sum()


@torch.no_grad()
def hash_hastily(tensor: Tensor) -> Tensor:
    """Return another hash of the bits, as a tensor () int64, with a third of the work on a CPU. It
    is the sum modulo 2^64 of 64-bit words times odd numbers. A change of one word always changes
    the hash. Changes of the highest bits (signs) of two words may cancel each other.
    """
    flat = tensor.detach().contiguous().view(-1)
    words, size = flat.numel() * flat.element_size() // WORD, flat.element_size()
    # torch multiplies int64 matrices on CPUs alone, and views as words what is aligned to them.
    if flat.device.type != "cpu" or words < 2 * HASTY or flat.storage_offset() * size % WORD:
        return hash_bits(tensor)
    rows = words // HASTY
    head = flat[: rows * HASTY * WORD // size].view(torch.int64).view(rows, HASTY)
    # 1,024 of them at least, so that there are enough for the words of a row as well.
    factors = _odd_multipliers(_at_least(rows), flat.device)
    total = torch.mv(head, factors[:HASTY]).dot(factors[:rows])
    rest = flat[rows * HASTY * WORD // size :]
    return total + hash_bits(rest) if rest.numel() else total


WORD, HASTY = 8, 256
"""Number of bytes in a word, and of words in a row."""


def _canonical_nans(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return `tensor` with the same payload for all NaNs, and the number of NaNs."""
    # A sum that is not NaN had none in it. Elsewhere than on a CPU, asking would wait.
    if not tensor.is_floating_point() or (tensor.device.type == "cpu" and not tensor.sum().isnan()):
        return tensor, torch.zeros((), dtype=torch.int64, device=tensor.device)
    nan = tensor.isnan()
    return tensor.masked_fill(nan, float("nan")), nan.sum()


def _words_of_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of `tensor` in order, as 32-bit words; the last word is padded with zeros."""
    flat = tensor.contiguous().view(-1)
    # 32-bit words can be viewed only from a multiple of 4 bytes on, where a copy begins.
    if flat.stride(0) != 1 or flat.storage_offset() * flat.element_size() % 4:
        flat = flat.clone(memory_format=torch.contiguous_format)
    raw = flat.view(torch.uint8)
    return (
        torch.nn.functional.pad(raw, (0, -len(raw) % 4)).view(torch.int32)
        if len(raw) % 4
        else raw.view(torch.int32)
    )


def _words_as_fp64(words: Tensor) -> Tensor:
    """Return the 32-bit words as fp64, of shape (rows, COLUMNS). On a CPU, the next call
    overwrites the result.
    """
    size = words.numel()
    rows = -(-size // COLUMNS)
    on_cpu = words.device.type == "cpu"
    wide = (
        _scratch_memory(get_ident())[:rows]
        if on_cpu
        else words.new_empty(rows, COLUMNS, dtype=torch.float64)
    )
    flat = wide.view(-1)
    flat[:size].copy_(words)
    flat[size:].zero_()
    return wide


@lru_cache(maxsize=4)
def _scratch_memory(thread: int) -> Tensor:
    """Return memory for rows in fp64, which is allocated once for each thread."""
    return torch.empty(ROWS, COLUMNS, dtype=torch.float64)


def _at_least(count: int) -> int:
    """Return `count` rounded up to a power of two of at least 1,024, so that tables of multipliers
    have few different sizes.
    """
    return 1 << max(10, (count - 1).bit_length())


@lru_cache(maxsize=64)
def _odd_multipliers(count: int, device: torch.device) -> Tensor:
    """Return the first `count` of the odd numbers by which rows or words are multiplied. They are
    the same on all devices.
    """
    return (_mix_numbers(count, 1) | 1).to(device)


@lru_cache(maxsize=8)
def _word_weights(device: torch.device) -> Tensor:
    """Return the weights of a row's words, fp64 of shape (COLUMNS,): different odd numbers below
    `WEIGHTS`.
    """
    return (_mix_numbers(WEIGHTS // 2, 2).argsort()[:COLUMNS] * 2 + 1).double().to(device)


def _mix_numbers(count: int, salt: int) -> Tensor:
    """Return the first `count` numbers of a pseudo-random sequence of int64 (splitmix64), in which
    no number occurs twice.
    """
    # The constants are those of splitmix64, as signed 64-bit numbers.
    word = (torch.arange(count, dtype=torch.int64) * 2 + salt) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        word = (word ^ _shift_right(word, shift)) * factor
    return word ^ _shift_right(word, 31)


def _shift_right(word: Tensor, bits: int) -> Tensor:
    """Return `word` shifted right by `bits`, with zeros as the new high bits."""
    # torch shifts signed numbers, with copies of the sign moving in.
    return (word >> bits) & ((1 << (64 - bits)) - 1)
