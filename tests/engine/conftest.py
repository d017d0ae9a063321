"""Fixtures of engine tests: pools of processes, shared by all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]

# Other processes find the functions that they run by module name: those of a helper module, and those of a test module,
# which pytest names from the root of the repository on. The root comes last, so that what is installed is what is tested.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2]))

from pool import Pool

Run = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """Pools by world size, started on first use and ended with the test run."""
    import torch

    found: dict[int, Pool] = {}
    torch.set_num_threads(1)
    yield found
    for pool in found.values():
        pool.close()


@pytest.fixture(scope="module", autouse=True)
def leave_group() -> Iterator[None]:
    """One rank runs in this process, and a drop-in leaves its group and LOCAL_RANK there as DeepSpeed does."""
    local_rank = os.environ.get("LOCAL_RANK")
    yield
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
    os.environ.pop("LOCAL_RANK", None)
    if local_rank is not None:
        os.environ["LOCAL_RANK"] = local_rank


@pytest.fixture(scope="module")
def foreign(pools: dict[int, Pool]) -> Iterator[None]:
    """For modules that run other engines in the pools: these leave process groups behind, whose threads wake all the time."""
    yield
    for pool in pools.values():
        pool.close()


@pytest.fixture
def run(pools: dict[int, Pool]) -> Run:
    """`run(world, function, *arguments)`: results by rank; one rank runs in this process."""

    def start(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if world == 1:
            return [function(0, 1, *arguments)]
        result: list[Any] = pools.setdefault(world, Pool(world)).run(function, *arguments)
        return result

    return start
