"""Measures the time that a rank spends in each part of its steps, if the plan sets `run.timers`."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from bridge.layout.schedule import Action, ActionKind
from bridge.plan.plan import Plan

PARTS = {
    ActionKind.FORWARD: "forward",
    ActionKind.AGAIN: "recompute",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "backward",
    ActionKind.WEIGHT: "backward",
    ActionKind.REDUCE: "reduce",
}
"""A table from the kind of an action to the part of a step in which its time is counted. Actions of
all other kinds are messages between pipeline ranks.
"""
MESSAGES, UPDATE, REST = "messages", "update", "rest"


class Timers:
    """Adds up the seconds of each part of a step, and prints the means every `every` steps to
    stderr.

    Forward includes the loss and waiting for gathered weights. `rest` is the time outside of all
    parts, such as waiting for reductions, the gradient norm, and reading data. Accelerators are
    synchronized before each reading, which makes steps slower.
    """

    def __init__(self, device: torch.device, rank: int, every: int = 1) -> None:
        self._device, self._rank, self._every = device, rank, every
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._steps = 0
        self._began: float | None = None

    @classmethod
    def of(cls, plan: Plan, rank: int, device: torch.device) -> Timers | None:
        """Return the timers that the plan asks for, or None."""
        return cls(device, rank, plan.run.log_interval or 1) if plan.run.timers else None

    def action(self, action: Action) -> AbstractContextManager[None]:
        """Context for running `action`. The time is added to the part of the step that the action
        belongs to.
        """
        return self.part(PARTS.get(action.kind, MESSAGES))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Context whose time is added to the part `name` of the step."""
        start = self._now()
        if self._began is None:
            self._began = start
        try:
            yield
        finally:
            self._sums[name] += self._now() - start

    def end(self, step: int) -> None:
        """End step number `step`. Print the means if `every` steps have passed."""
        if self._began is None:
            return
        self._sums["whole"] += self._now() - self._began
        self._began = None
        self._steps += 1
        if self._steps == self._every:
            print(f"rank {self._rank}: step {step}: {self._line()}", file=sys.stderr, flush=True)
            self._sums.clear()
            self._steps = 0

    def _line(self) -> str:
        means = {name: 1000 * seconds / self._steps for name, seconds in self._sums.items()}
        whole = means.pop("whole")
        means[REST] = whole - sum(means.values())
        text = ", ".join(f"{name} {mean:.1f}" for name, mean in means.items())
        count = f" (mean of {self._steps} steps)" if self._steps > 1 else ""
        return f"{whole:.1f} ms{count}: {text}"

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
