"""Torch's own parallelism and DeepSpeed give the engine's losses on the same model and data."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.engine.oracles import BUILDERS, Task, batch_of, losses
from tests.engine.pool import Pool

pytestmark = pytest.mark.usefixtures("foreign")
TASK = Task()
SIX_DIGITS = 1e-6


@cache
def engines_losses(pool: Pool) -> list[float]:
    """Losses of the engine on replicated weights."""
    found: list[float] = pool.run(losses, "native zero 0", TASK)[0]
    return found


@pytest.fixture
def expected(pools: dict[int, Pool]) -> list[float]:
    """See `engines_losses`."""
    return engines_losses(pools.setdefault(2, Pool(2)))


@pytest.mark.parametrize("name", BUILDERS)
def test_the_same_losses(run: Any, expected: list[float], name: str) -> None:
    if name.startswith("deepspeed") and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    for found in run(2, losses, name, TASK):
        assert found == pytest.approx(expected, rel=SIX_DIGITS, abs=0.0)


def test_the_loss_falls_by_a_fifth_on_data_that_differs_by_rank_and_step(
    expected: list[float],
) -> None:
    assert len(expected) == 20 and expected[-1] < 0.8 * expected[0]
    first, second, later = (
        batch_of(TASK, step, rank, 2)[0] for step, rank in ((0, 0), (0, 1), (1, 0))
    )
    assert not torch.equal(first, second) and not torch.equal(first, later)
    assert torch.equal(batch_of(TASK, 0)[0], torch.cat([first, second]))
