"""Local ranks: one that dies ends them all with its words, one that failed alone says so, and locks of builds are named."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.engine import comm
from bridge.engine.interface import Workload
from bridge.errors import BridgeError
from bridge.layout.architecture import Architecture
from bridge.plan.plan import Plan
from bridge.verify import local, measure

DYING = """
import os, sys, time
loaded = []
def warm():
    loaded.append(os.getpid())
def main():
    if os.environ["RANK"] == "1":
        sys.exit("its last words")
    print(*loaded, os.getppid(), flush=True)
    time.sleep(3600)
"""


def test_a_rank_that_dies_ends_the_others_and_is_the_one_that_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setattr(local, "GRACE", 0.1)
    said: list[str] = []
    with pytest.raises(BridgeError, match="rank 1 ended with code 1: its last words"):
        said.extend(local.run_ranks(2, "dying"))
    assert len(set(said[0].split())) == 1, "what a rank needs was loaded before it was forked"


def test_a_lock_that_a_killed_build_left_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setenv(local.BUILDS, str(tmp_path))
    monkeypatch.setattr(local, "STALE", 0.0)
    os.utime(lock, (0, 0))
    with pytest.raises(BridgeError, match="cpu_adam/lock: a killed build left this lock"):
        next(local.run_ranks(2, "dying"))


def met(rank: int, world: int) -> bool:
    """The second rank comes once the first has gone on."""
    if rank:
        comm.everyones(None)
    found = comm.together(0.0)
    if not rank:
        comm.everyones(None)
    return found


def test_a_rank_knows_whether_the_others_came(run: Any) -> None:
    assert run(2, met) == [False, True]


def fails(what: Any, workload: Workload) -> Any:
    """Opens nothing."""
    raise ValueError("its own defect")


def test_a_rank_that_failed_alone_ends_with_what_it_has_to_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "together", lambda patience: patience == 0.0)
    stack: Any = SimpleNamespace(name="stack", open=fails)
    with pytest.raises(
        measure.StrandedError, match="stack: failed before training: ValueError: its own defect"
    ):
        measure.measure(measure.EngineRun(stack, Plan()), Workload(Architecture()))
