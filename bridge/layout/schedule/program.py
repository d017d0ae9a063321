"""Programs: the actions of a schedule with all messages and reductions, as a rank executes them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from bridge.layout.schedule.action import DOWN, WRITES, Action, Kind, Row, Schedule

MATCH = {Kind.SEND_FORWARD: Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD: Kind.RECEIVE_BACKWARD}
"""For each kind of send, the kind of receive that belongs to it. The stage of a send or receive is
the stage to which the message goes.
"""


@lru_cache(maxsize=1)  # its proof asks for it more than once
def program(schedule: Schedule) -> tuple[Row, ...]:
    """Return the actions of every rank with messages and reductions. Receives come before the
    action that needs the message, sends after the action that computes the message, and a reduction
    after the last action that adds to the stage's gradients.
    """
    return tuple(tuple(_spelled(schedule, row)) for row in schedule.rows)


def trimmed(row: Row, first: int) -> Row:
    """Return `row`, one rank's actions of a program, without the backward actions of stages before
    `first`. These stages are frozen, so nothing needs their gradients.
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
    """Whether stage `stage` + 1 is on another rank than `stage`."""
    return schedule.homes[stage] != schedule.homes[stage + 1]
