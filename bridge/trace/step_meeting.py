"""Meetings: all ranks wait for each other before the tensors of a step are compared. If a rank
does not come, there is a finding, and the other ranks do not hang in a collective.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from bridge.engine.comm import Comm
from bridge.trace.gather import gather_tensor

PATIENCE = 10.0
"""Number of seconds that a rank waits before it checks what the other ranks do. The environment
variable STAGEBRIDGE_MEETING overrides this number.
"""
VARIABLE = "STAGEBRIDGE_MEETING"
OVER = "over"
_made = 0
"""Number of meetings made so far. It stands in the names of a meeting's entries in the store, so
that no two meetings use the same names.
"""


class Meeting:
    """The point at which all ranks meet before a step. Ranks communicate through the store of the
    process group, without collectives.

    If a rank waits while another rank has begun a further forward pass, that other rank skipped the
    step. If a rank has waited for `PATIENCE`, and for as long as its own step took, and does not
    know why the others do not come, it gives up. In both cases `lost(id, ranks, why)` is called
    once on every rank, nothing is compared any more, and the training continues.
    """

    def __init__(self, comm: Comm, report: Callable[[str, tuple[int, ...], str], None]) -> None:
        global _made
        _made += 1
        # Ranks may have made other numbers of meetings: with the highest, their keys agree.
        _made = int(gather_tensor(comm, "meeting", torch.tensor([_made]), comm.world).max())
        self.comm, self.lost = comm, report
        self.store: Any = PrefixStore(f"stagebridge meeting {_made}", _get_default_store())
        self.patience = timedelta(seconds=float(os.environ.get(VARIABLE, PATIENCE)))
        self.passes = self.steps = 0
        self.over = False
        self.last = perf_counter()
        # A process that ends says so, or the others would go on waiting for it.
        atexit.register(self.leave)

    def begin_forward(self) -> None:
        """Record that a forward pass begins."""
        self.passes += 1
        if not self.over:
            self.store.set(f"pass {self.comm.rank}", str(self.passes))

    def met(self) -> bool:
        """Wait until all ranks have called this for the step. Returns False if some ranks do not
        come.
        """
        number, world = self.steps, self.comm.world.size
        self.steps += 1
        if self.over or self._is_over():
            return False
        begin, self.last = self.last, perf_counter()
        # The last one to come tells the others.
        if self.store.add(f"step {number}", 1) == world:
            self.store.set(f"all {number}", "1")
            if number:
                # All have come past it: a long run must not fill the store.
                self.store.delete_key(f"step {number - 1}")
            return True
        patience = max(self.patience.total_seconds(), self.last - begin)
        while not self._all(number):
            if self._is_over():
                return False
            waited = perf_counter() - self.last
            finding = self._missing_ranks(number)
            if finding is None and waited >= patience:
                finding = self._absent(number, waited)
            if finding:
                self.store.set(OVER, json.dumps(finding))
                self.over = True
                self.lost(*finding)
                return False
        self.last = perf_counter()
        return True

    def _all(self, number: int) -> bool:
        try:
            self.store.wait([f"all {number}"], self.patience)
        except RuntimeError:  # what a store says once the time is over
            return False
        return True

    def _absent(self, number: int, seconds: float) -> tuple[str, tuple[int, ...], str]:
        """Return the id, ranks and evidence of the finding that this rank waited in vain, for an
        unknown reason.
        """
        evidence = f"rank {self.comm.rank} waited {seconds:.3g} s in step {number + 1} for ranks that did not come"
        return "rank-absent", (self.comm.rank,), evidence

    def _missing_ranks(self, number: int) -> tuple[str, tuple[int, ...], str] | None:
        """Return a finding (id, ranks and evidence) if other ranks skipped this step or ended before
        it; otherwise None.
        """
        others = [rank for rank in self.comm.world.ranks if rank != self.comm.rank]
        beyond = {
            rank: count
            for rank in others
            if (count := self._read_counter(f"pass {rank}")) > self.passes
        }
        if beyond:
            counts = ", ".join(f"rank {rank} began pass {count}" for rank, count in beyond.items())
            return (
                "skipped-alone",
                tuple(beyond),
                f"{counts} without a step in between, while rank {self.comm.rank} makes a step after pass "
                f"{self.passes}",
            )
        # A rank that ended after fewer steps than this one will not come.
        departures = {
            rank: count
            for rank in others
            if 0 < (count := self._read_counter(f"left {rank}")) <= number
        }
        if departures:
            text = ", ".join(
                f"rank {rank} ended after {count} steps" for rank, count in departures.items()
            )
            here = f"rank {self.comm.rank} is in step {number + 1}"
            return "skipped-alone", tuple(departures), f"{text}, while {here}"
        return None

    def _read_counter(self, key: str) -> int:
        return int(self.store.get(key)) if self.store.check([key]) else 0

    def _is_over(self) -> bool:
        """Return whether another rank has given up the meeting. Then this rank reports the same
        finding.
        """
        if not self.store.check([OVER]):
            return False
        name, ranks, why = json.loads(self.store.get(OVER))
        self.over = True
        self.lost(name, tuple(ranks), why)
        return True

    def leave(self) -> None:
        """Tell the other ranks that this rank takes no more steps."""
        atexit.unregister(self.leave)
        if self.over:
            return
        self.over = True
        try:
            self.store.set(f"left {self.comm.rank}", str(self.steps))
        except RuntimeError:  # whoever kept the store is gone, and nobody waits there
            return


def join_meeting(wait: float | None = None) -> bool:
    """Return whether all ranks of the process group make this call within `wait` seconds. In a
    hand-written pipeline they may not: its ranks run one after the other, and some may have
    nothing to train.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return True
    store: Any = PrefixStore("stagebridge attaching", _get_default_store())
    if store.add("here", 1) == dist.get_world_size():
        _decide_end(store, "together")
    elif not store.check(["decided"]):
        patience = float(os.environ.get(VARIABLE, PATIENCE)) if wait is None else wait
        try:
            store.wait(["decided"], timedelta(seconds=patience))
        except RuntimeError:  # what a store says once the time is over
            _decide_end(store, "apart")
    store.wait(["decided"])
    return bool(store.get("decided") == b"together")


def _decide_end(store: Any, what: str) -> None:
    # The first one decides for all: another may run out of patience as the last one comes.
    if store.add("deciding", 1) == 1:
        store.set("decided", what)
