"""Timelines: the time at which each action of a schedule starts and ends, the bubble, and the
number of microbatches in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from bridge.layout.schedule.action import DOWN, WRITES, Action, ActionKind, Row, Schedule


@dataclass(frozen=True, slots=True)
class Costs:
    """Durations of the actions on one microbatch in one stage: forward, the gradient of the input,
    the gradients of the weights, and recomputation (`again`; 0 without recomputation).
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    again: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """An action with its start and end time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The actions of each rank with their start and end times. If a rank waits for ever, `stuck`
    has the action that cannot start, by rank.
    """

    schedule: Schedule
    rows: tuple[tuple[Span, ...], ...]
    stuck: Mapping[int, Action]

    @cached_property
    def length(self) -> float:
        """The time at which the last rank is done."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @cached_property
    def work(self) -> float:
        """Time for which the busiest rank runs actions."""
        return max(sum(span.end - span.start for span in row) for row in self.rows)

    @property
    def bubble(self) -> float:
        """Share of the time in which a rank is idle, over all ranks: (p-1)/(m+p-1) for 1F1B with p
        ranks and m microbatches.
        """
        busy = sum(span.end - span.start for row in self.rows for span in row)
        return 1.0 - busy / (self.length * len(self.rows)) if self.length else 0.0

    @property
    def overhead(self) -> float:
        """Idle time divided by busy time, on the busiest rank: (p-1)/(v m) for interleaved 1F1B
        with p ranks, v stages on each rank, and m microbatches.
        """
        return self.length / self.work - 1.0 if self.length else 0.0


def make_timeline(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Return the times of all actions of `schedule`, with the durations `costs` (default: 1,
    without recomputation). An action starts when its rank is free and all actions that it needs
    have ended.
    """
    ahead = {
        (action.stage, action.microbatch)
        for row in schedule.rows
        for action in row
        if action.kind is ActionKind.AGAIN
    }
    cost = _Cost(costs or Costs(), schedule.kept | ahead)
    ends: dict[Action, float] = {}
    rows: list[list[Span]] = [[] for _ in schedule.rows]
    progress = True
    # Each pass runs every rank as far as it can go. If no rank moves any more, the rest waits for
    # ever.
    while progress:
        progress = False
        for row, spans in zip(schedule.rows, rows, strict=True):
            while (
                len(spans) < len(row)
                and (start := _start_time(schedule, row[len(spans)], ends)) is not None
            ):
                action = row[len(spans)]
                begin = max(start, spans[-1].end if spans else 0.0)
                spans.append(Span(action, begin, begin + cost(action)))
                ends.setdefault(action, spans[-1].end)
                progress = True
    stuck = {
        rank: row[len(spans)]
        for rank, (row, spans) in enumerate(zip(schedule.rows, rows, strict=True))
        if len(spans) < len(row)
    }
    return Timeline(schedule, tuple(map(tuple, rows)), stuck)


def action_needs(schedule: Schedule, action: Action) -> Iterator[tuple[Action, ...]]:
    """Yield a tuple of actions for each dependency of `action`. One action of each tuple must have
    ended before `action` can start.
    """
    stage, kind, microbatch = action
    if kind is ActionKind.FORWARD:
        if stage > 0:
            yield (Action(stage - 1, ActionKind.FORWARD, microbatch),)
        return
    yield (Action(stage, ActionKind.FORWARD, microbatch),)
    if kind is ActionKind.WEIGHT:
        yield (Action(stage, ActionKind.INPUT, microbatch),)
    if kind in DOWN and stage + 1 < schedule.stages:
        yield (
            Action(stage + 1, ActionKind.BACKWARD, microbatch),
            Action(stage + 1, ActionKind.INPUT, microbatch),
        )


def _start_time(schedule: Schedule, action: Action, ends: Mapping[Action, float]) -> float | None:
    """Return the earliest time at which `action` can start, or None if an action that it needs has
    not run. `ends` has the end times of the actions that have run.
    """
    start = 0.0
    for options in action_needs(schedule, action):
        there = [ends[option] for option in options if option in ends]
        if not there:
            return None
        start = max(start, *there)
    return start


@dataclass(frozen=True)
class _Cost:
    """A function that returns the duration of an action. A backward pass includes recomputation,
    except for the pairs (stage, microbatch) in `there`, whose activations are in memory already.
    """

    costs: Costs
    there: frozenset[tuple[int, int]]

    def __call__(self, action: Action) -> float:
        costs = self.costs
        again = 0.0 if (action.stage, action.microbatch) in self.there else costs.again
        return {
            ActionKind.FORWARD: costs.forward,
            ActionKind.BACKWARD: costs.input + costs.weight + again,
            ActionKind.INPUT: costs.input + again,
            ActionKind.WEIGHT: costs.weight,
            ActionKind.AGAIN: costs.again or costs.forward,
        }[action.kind]


def in_flight(row: Row) -> int:
    """Return the largest number of microbatches whose activations a rank holds at the same time,
    added up over the rank's stages. `row` are the rank's actions.
    """
    now = peak = 0
    for action in row:
        if action.kind is ActionKind.FORWARD:
            now += 1
        elif action.kind in WRITES:
            now -= 1
        peak = max(peak, now)
    return peak
