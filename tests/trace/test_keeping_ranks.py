"""Thinned logs of engines that shard: no rank waits for another, what is kept is what a whole log has, and faults stay in it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bridge.trace.retention import Keep
from bridge.trace.run import TracedRun
from bridge.trace.run_comparison import compare_runs
from tests.trace.planting import LOGS, STACKS, Loop, nudges, plants

pytestmark = pytest.mark.usefixtures("foreign")
SHARDED = ("FSDP1", "FSDP2", "DeepSpeed ZeRO 1", "DeepSpeed ZeRO 2", "DeepSpeed ZeRO 3")
KEEPS = {
    "whole": Keep(),
    "every": Keep(every=2),
    "first rank": Keep(ranks=(0,)),
    "second rank": Keep(ranks=(1,)),
    "once": Keep(once=True),
    "budget": Keep(budget=160_000),
    "everything": Keep(every=2, ranks=(1,), once=True, budget=200_000),
}


def trained(rank: int, world: int, stack: str, folder: Path, ways: Sequence[str]) -> None:
    """One run for each way of keeping; of an odd one, a weight of the second rank is changed by hand."""
    warnings.simplefilter("ignore")
    for way in ways:
        loop = Loop(rank, world, keep=KEEPS[way.removeprefix("odd ")])
        if way.startswith("odd"):
            plants("begins", nudges("blocks.0.norm1.weight"), rank=1)(loop)
        STACKS[stack](loop, folder / way, LOGS)


def held(folder: Path, rank: int, kind: str) -> int:
    """How many tensors of a kind a rank logged, over all steps."""
    run = TracedRun.read(folder)
    return sum(
        part.rank == rank and part.record.name.kind == kind
        for step in run.steps
        for part in run.parts(step)
    )


@pytest.mark.parametrize("stack", SHARDED)
def test_a_thin_log_is_a_part_of_the_whole_one(stack: str, run: Any, tmp_path: Path) -> None:
    run(2, trained, stack, tmp_path, list(KEEPS))
    whole = TracedRun.read(tmp_path / "whole")
    for name, keep in KEEPS.items():
        thin = TracedRun.read(tmp_path / name)
        found = compare_runs(thin, whole)
        assert found.divergence is None, (name, found.divergence)
        assert {line.name.step for line in found.lines} == set(thin.steps_with_all_tensors), name
        assert any(
            line.verdict == "equal" and line.name.kind == "weight" for line in found.lines
        ), name
        silent = [rank for rank in range(2) if keep.ranks and rank not in keep.ranks]
        assert not any(held(tmp_path / name, rank, "weight") for rank in silent)
    assert set(TracedRun.read(tmp_path / "every").steps_with_all_tensors) == {0, 2}
    assert set(TracedRun.read(tmp_path / "budget").steps_with_all_tensors) < set(
        whole.steps_with_all_tensors
    ), "it is less than all of it takes"
    if stack.startswith("DeepSpeed"):
        assert held(tmp_path / "once", 0, "weight") == held(tmp_path / "whole", 1, "weight") > 0
        assert held(tmp_path / "once", 1, "weight") == held(tmp_path / "once", 1, "gradient") == 0
    assert held(tmp_path / "once", 1, "buffer") == 0 < held(tmp_path / "whole", 1, "buffer")
    assert held(tmp_path / "once", 1, "output") == held(tmp_path / "whole", 1, "output") > 0, (
        "of samples of its own"
    )


@pytest.mark.parametrize("stack", ["DeepSpeed ZeRO 1"])
def test_what_differs_between_ranks_is_not_left_out(stack: str, run: Any, tmp_path: Path) -> None:
    """The weights with which the second rank computes are others than those that it updates, which both ranks put together."""
    run(2, trained, stack, tmp_path, ["odd once", "once"])
    parted = compare_runs(
        TracedRun.read(tmp_path / "odd once"), TracedRun.read(tmp_path / "once"), every=False
    ).divergence
    assert (
        parted is not None
        and str(parted.name) == "2/forward/blocks.0/output"
        and parted.ranks == (1,)
    )
