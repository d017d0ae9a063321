"""Programs: a schedule with all messages and reductions, as a rank executes it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from bridge.layout.schedule.action import DOWN, WRITES, Action, Kind, Row, Schedule

MATCH = {Kind.SEND_FORWARD: Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD: Kind.RECEIVE_BACKWARD}
"""The receive that belongs to each kind of send. A message is named by the stage that receives the
message.
"""


@lru_cache(maxsize=1)  # its proof asks for it more than once
def program(schedule: Schedule) -> tuple[Row, ...]:
    """Return every rank's actions with messages and reductions: receives before an action, sends
    after it, and a reduction after the last action that writes gradients.
    """
    return tuple(tuple(_spelled(schedule, row)) for row in schedule.rows)


def trimmed(row: Row, first: int) -> Row:
    """Return `row` of a program without the backward passes of the frozen stages, which are the
    stages before `first`.
    """
    # No gradient is needed below the first stage that trains, so neither is its message.
    forward = (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
    return tuple(action for action in row if action.kind in forward or action.stage >= first)


def _spelled(schedule: Schedule, row: Row) -> Iterator[Action]:
    last = {action.stage: place for place, action in enumerate(row) if action.kind in WRITES}
    for place, action in enumerate(row):
        yield from _received(schedule, action)
        yield action
        yield from _sent(schedule, action)
        if last.get(action.stage) == place:
            yield Action(action.stage, Kind.REDUCE)


def _received(schedule: Schedule, action: Action) -> Iterator[Action]:
    stage, kind, microbatch = action
    if kind is Kind.FORWARD and stage > 0 and _apart(schedule, stage - 1):
        yield Action(stage, Kind.RECEIVE_FORWARD, microbatch)
    if kind in DOWN and stage + 1 < schedule.stages and _apart(schedule, stage):
        yield Action(stage, Kind.RECEIVE_BACKWARD, microbatch)


def _sent(schedule: Schedule, action: Action) -> Iterator[Action]:
    stage, kind, microbatch = action
    if kind is Kind.FORWARD and stage + 1 < schedule.stages and _apart(schedule, stage):
        yield Action(stage + 1, Kind.SEND_FORWARD, microbatch)
    if kind in DOWN and stage > 0 and _apart(schedule, stage - 1):
        yield Action(stage - 1, Kind.SEND_BACKWARD, microbatch)


def _apart(schedule: Schedule, stage: int) -> bool:
    """Whether the stage after `stage` is on another rank."""
    return schedule.homes[stage] != schedule.homes[stage + 1]
