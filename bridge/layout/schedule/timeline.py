"""Timelines: start and end of each action of a schedule by its costs, the bubble, and activations in flight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from bridge.layout.schedule.action import DOWN, WRITES, Action, Kind, Row, Schedule


@dataclass(frozen=True, slots=True)
class Costs:
    """Durations of the actions on one microbatch in one stage. `again` is the duration of
    recomputation (0: none).
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
    """Spans of each rank's actions. `stuck` has, for each rank that waits for ever, the action at which it waits."""

    schedule: Schedule
    rows: tuple[tuple[Span, ...], ...]
    stuck: Mapping[int, Action]

    @cached_property
    def length(self) -> float:
        """The time at which the last rank is done."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @cached_property
    def work(self) -> float:
        """Busy time of the busiest rank."""
        return max(sum(span.end - span.start for span in row) for row in self.rows)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time that is idle: (p-1)/(m+p-1) for 1F1B with p ranks and m
        microbatches.
        """
        busy = sum(span.end - span.start for row in self.rows for span in row)
        return 1.0 - busy / (self.length * len(self.rows)) if self.length else 0.0

    @property
    def overhead(self) -> float:
        """Idle time divided by busy time: (p-1)/(v m) for interleaved 1F1B with v stages on each of
        p ranks.
        """
        return self.length / self.work - 1.0 if self.length else 0.0


def timeline(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Simulate `schedule`. An action starts when its rank is free and all actions that it needs
    have run.
    """
    ahead = {
        (action.stage, action.microbatch)
        for row in schedule.rows
        for action in row
        if action.kind is Kind.AGAIN
    }
    cost = _Cost(costs or Costs(), schedule.kept | ahead)
    ends: dict[Action, float] = {}
    rows: list[list[Span]] = [[] for _ in schedule.rows]
    moved = True
    # Each pass runs every rank as far as it can go. If no rank moves any more, the rest waits for
    # ever.
    while moved:
        moved = False
        for row, spans in zip(schedule.rows, rows, strict=True):
            while (
                len(spans) < len(row)
                and (start := _start(schedule, row[len(spans)], ends)) is not None
            ):
                action = row[len(spans)]
                begin = max(start, spans[-1].end if spans else 0.0)
                spans.append(Span(action, begin, begin + cost(action)))
                ends.setdefault(action, spans[-1].end)
                moved = True
    stuck = {
        rank: row[len(spans)]
        for rank, (row, spans) in enumerate(zip(schedule.rows, rows, strict=True))
        if len(spans) < len(row)
    }
    return Timeline(schedule, tuple(map(tuple, rows)), stuck)


def needs(schedule: Schedule, action: Action) -> Iterator[tuple[Action, ...]]:
    """Yield the dependencies of `action`. Each dependency is a tuple of actions, of which one must
    have run before.
    """
    stage, kind, microbatch = action
    if kind is Kind.FORWARD:
        if stage > 0:
            yield (Action(stage - 1, Kind.FORWARD, microbatch),)
        return
    yield (Action(stage, Kind.FORWARD, microbatch),)
    if kind is Kind.WEIGHT:
        yield (Action(stage, Kind.INPUT, microbatch),)
    if kind in DOWN and stage + 1 < schedule.stages:
        yield (
            Action(stage + 1, Kind.BACKWARD, microbatch),
            Action(stage + 1, Kind.INPUT, microbatch),
        )


def _start(schedule: Schedule, action: Action, ends: Mapping[Action, float]) -> float | None:
    """Return the time at which all dependencies of `action` have run, or None if one has not run.
    """
    found = 0.0
    for options in needs(schedule, action):
        there = [ends[option] for option in options if option in ends]
        if not there:
            return None
        found = max(found, *there)
    return found


@dataclass(frozen=True)
class _Cost:
    """Return the duration of an action. Backward includes recomputation, unless the activations
    were kept or recomputed before.
    """

    costs: Costs
    there: frozenset[tuple[int, int]]

    def __call__(self, action: Action) -> float:
        costs = self.costs
        again = 0.0 if (action.stage, action.microbatch) in self.there else costs.again
        return {
            Kind.FORWARD: costs.forward,
            Kind.BACKWARD: costs.input + costs.weight + again,
            Kind.INPUT: costs.input + again,
            Kind.WEIGHT: costs.weight,
            Kind.AGAIN: costs.again or costs.forward,
        }[action.kind]


def in_flight(row: Row) -> int:
    """Return the largest number of forward passes on a rank that wait for the end of their
    backward at one time, its stages added up.
    """
    now = peak = 0
    for action in row:
        if action.kind is Kind.FORWARD:
            now += 1
        elif action.kind in WRITES:
            now -= 1
        peak = max(peak, now)
    return peak
