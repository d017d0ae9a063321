"""A digest sees every bit and every order, and nothing of the payloads of NaNs."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from bridge.trace.digest import digest_tensor

FORMATS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.int64: torch.int64,
}
BITS = {torch.int16: 16, torch.int32: 32, torch.int64: 64}


def sample(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-(2**62), 2**62, shape, generator=generator)


def differ(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(digest_tensor(one), digest_tensor(other))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_flipped_bit_is_seen(dtype: torch.dtype) -> None:
    """2,500 places each in tensors of odd sizes: 10,000 altogether."""
    tensor, draw, unseen = sample(dtype, (37, 211)), random.Random(1), 0
    before, words = digest_tensor(tensor), tensor.view(FORMATS[dtype]).view(-1)
    for _ in range(2500):
        place, bit = draw.randrange(len(words)), draw.randrange(BITS[words.dtype])
        mask = torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(words.dtype)
        words[place] ^= mask
        unseen += bool(torch.equal(digest_tensor(tensor), before))
        words[place] ^= mask
    assert unseen == 0
    assert torch.equal(digest_tensor(tensor), before)


@pytest.mark.parametrize("dtype", [*FORMATS, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2,), (64, 64), (3, 1024), (1025, 7), (2048, 1024)], ids=str)
def test_changes_of_many_elements_are_seen(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = sample(dtype, shape)
    flat = tensor.view(-1)
    swapped, alternating = flat.clone(), flat.clone()
    swapped[[0, -1]] = flat[[-1, 0]]
    alternating[::2] *= -1
    assert differ(flat, swapped)
    assert differ(tensor, -tensor)
    assert differ(flat, alternating)
    assert differ(tensor, tensor * 2)
    assert differ(tensor, tensor.flip(0))
    assert differ(torch.zeros_like(tensor), torch.ones_like(tensor))
    assert differ(torch.ones_like(tensor), torch.full_like(tensor, 3))
    if dtype.is_floating_point:
        assert differ(torch.zeros_like(tensor), -torch.zeros_like(tensor))


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.data())
def test_swapped_rows_and_columns_are_seen(rows: int, columns: int, data: st.DataObject) -> None:
    tensor = sample(torch.float32, (rows + 1, columns + 1))
    dim = data.draw(st.integers(0, 1))
    size = tensor.shape[dim]
    first, second = data.draw(
        st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True)
    )
    order = torch.arange(size)
    order[[first, second]] = order[[second, first]]
    assert differ(tensor, tensor.index_select(dim, order))


def test_nans_count_and_hash_alike() -> None:
    tensor, other = sample(torch.float32, (50,)), sample(torch.float32, (50,))
    tensor[7], other[7] = float("nan"), float("nan")
    other.view(torch.int32)[7] ^= 0x7
    assert torch.equal(digest_tensor(tensor), digest_tensor(other))
    assert digest_tensor(tensor)[1] == 1
    other[7] = 0.0
    assert differ(tensor, other)
    infinite = torch.tensor([float("inf"), float("-inf")])
    assert digest_tensor(infinite)[1] == 0
    assert differ(infinite, -infinite)


@settings(max_examples=100, derandomize=True, database=None, deadline=None)
@given(
    st.integers(0, 3000),
    st.integers(0, 5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.bool]),
)
def test_only_the_values_count(size: int, offset: int, dtype: torch.dtype) -> None:
    """Where a tensor lies, and with which strides, does not."""
    long = sample(torch.float32, (size + offset,)).to(dtype)
    part = long[offset:]
    assert torch.equal(digest_tensor(part), digest_tensor(part.clone()))
    strided = torch.stack([part, part], dim=-1)[..., 0]
    assert torch.equal(digest_tensor(strided), digest_tensor(part))


def test_digests_are_the_same_everywhere() -> None:
    """The numbers themselves: runs on other machines and releases must agree."""
    assert digest_tensor(torch.arange(5000)).tolist() == GOLDEN


GOLDEN = [-3423896053374503798, 0]
