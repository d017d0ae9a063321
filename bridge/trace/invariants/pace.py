"""Invariants of pace: no rank keeps the others waiting, and the schedule and the moments are
resumed at the same step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from bridge.trace.findings import TraceFinding
from bridge.trace.invariants.check import Check, floats_as_integers, integers_as_floats
from bridge.trace.module import ModuleSource
from bridge.trace.sharding import flat_pieces

PHASES = ("before the forward pass", "in forward", "in backward", "between backward and the step")
SHARE, LEAST, TIMES = 0.5, 0.25, 2
"""A rank is reported if its delay is larger than this share of the other ranks' step time, and
than this number of seconds, in this number of consecutive steps.
"""


class Late(Check):
    """No rank takes much longer than the other ranks in a phase of a step.

    Times are measured on the host's clock, without the time in which a rank waits for others. So
    backward counts as ended with the last gradient that a rank computes itself. If torch shards
    parameters, ranks also wait for each other in forward and backward. Then only the time before
    forward and the time after backward are compared.
    """

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        self.times = [0.0] * len(PHASES)
        self.last = perf_counter()
        sharded = any(isinstance(weight, DTensor) for weight in source.module.parameters())
        self.own = source.plain and not flat_pieces(source.module) and not sharded
        self.rows: dict[tuple[int, int], int] = {}

    def _took(self, phase: int, until: float | None = None) -> None:
        now = perf_counter()
        self.times[phase] += max(0.0, (until or now) - self.last)
        self.last = now

    def passing(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        self._took(0)

    def end_forward(self) -> None:
        self._took(1)

    def row(self, step: int) -> Tensor:
        gradient = self.source.last_gradient
        # After its last gradient, a rank waits for the others' reductions: that is left out.
        if gradient > self.last:
            self._took(2, gradient)
        elif not self.own:
            self.last = perf_counter()
        self._took(3)
        return floats_as_integers(self.times)

    def judge_rows(self, step: int, rows: Tensor) -> Iterator[TraceFinding]:
        times = integers_as_floats(rows).view(len(rows), len(PHASES))
        if step < 2 or len(times) < 2:
            return
        for phase, when in enumerate(PHASES):
            if not self.own and phase in (1, 2):
                continue
            rank = int(times[:, phase].argmax())
            others = torch.cat([times[:rank], times[rank + 1 :]])
            gap = float(times[rank, phase] - others[:, phase].median())
            whole = float(others.sum(1).median())
            late = gap > LEAST and gap > SHARE * whole
            count = self.rows[rank, phase] = self.rows.get((rank, phase), 0) + 1 if late else 0
            if count == TIMES:
                evidence = (
                    f"in {TIMES} consecutive steps, rank {self.at(rank)} took much longer {when} than the "
                    f"other ranks: {gap:.2g} s longer in this step, in which others work {whole:.2g} s"
                )
                yield TraceFinding("rank-late", step, "", evidence, (self.at(rank),))

    def end_step(self) -> None:
        self.times = [0.0] * len(PHASES)
        self.last = perf_counter()


class Schedules(Check):
    """If a learning-rate schedule steps with the optimizer, both have counted equally many steps
    before this run.
    """

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        self.calls: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.steps = 0
        self.done = not source.plain
        if not self.done:
            self.handles.append(_Stepped(self))

    def count_step(self, scheduler: LRScheduler) -> None:
        """Count a step of a learning-rate schedule."""
        optimizer = getattr(scheduler, "optimizer", None)
        if any(optimizer is one for one in self.source.optimizers):
            self.calls[id(scheduler)] = self.calls.get(id(scheduler), 0) + 1
            self.counts[id(scheduler)] = int(scheduler.last_epoch)

    def local(self, step: int) -> Iterator[TraceFinding]:
        self.steps += 1
        if self.done or self.steps < 3:
            return
        self.done = True
        counts = [count for count in map(_steps_of_state, self.source.optimizers) if count]
        for key, calls in self.calls.items():
            # A schedule that goes by epochs says nothing about steps.
            if calls < self.steps - 1 or not counts:
                continue
            before, schedule_steps = max(counts) - self.steps, self.counts[key] - calls
            evidence = f"the optimizer counts {max(0, before)} steps before this run, and the schedule {max(0, schedule_steps)}"
            if before >= 2 and schedule_steps <= 0:
                yield TraceFinding("schedule-not-resumed", step, "", evidence)
            elif schedule_steps >= 2 and before <= 0:
                yield TraceFinding("moments-not-resumed", step, "", evidence)

    def end_step(self) -> None:
        if self.done:
            self.close()


def _steps_of_state(optimizer: Any) -> int:
    """Return the largest step count in an optimizer's state."""
    counts = (state.get("step") for state in optimizer.state.values())
    return max((int(count) for count in counts if count is not None), default=0)


class _Stepped:
    """Replaces the method `step` of torch's learning-rate schedules by one that also reports the
    step to a check, until `remove` is called.
    """

    def __init__(self, check: Schedules) -> None:
        self.plain = plain = LRScheduler.step
        report = check.safe(check.count_step)

        def step_and_report(scheduler: LRScheduler, *arguments: Any, **keywords: Any) -> None:
            plain(scheduler, *arguments, **keywords)
            report(scheduler)

        LRScheduler.step = step_and_report  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        """Restore torch's own method."""
        LRScheduler.step = self.plain  # type: ignore[method-assign]
