"""Collectives over real processes: what they give, and that each counts once with the bytes of the whole tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bridge.layout.traffic import Traffic
from tests.engine.counts import gathered, reduced


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alias", [False, True])
def test_each_rank_gets_its_slice_of_the_sum(
    run: Any, world: int, dtype: torch.dtype, alias: bool
) -> None:
    size = 3 * world
    whole = sum(
        torch.arange(size * 2, dtype=torch.float64).view(size, 2) + rank for rank in range(world)
    )
    for rank, (found, total) in enumerate(run(world, reduced, dtype, alias)):
        assert torch.equal(found, whole[3 * rank : 3 * rank + 3].to(dtype))
        assert total == Traffic(1, size * 2 * dtype.itemsize)


@pytest.mark.parametrize("world", [2, 4])
def test_slices_come_together_in_the_order_of_ranks(run: Any, world: int) -> None:
    for found, total in run(world, gathered):
        assert found.tolist() == [
            number for rank in range(world) for number in (10 * rank, 10 * rank + 1)
        ]
        assert total == Traffic(1, world * 2 * 8)
