"""Programs: the actions of a schedule with all messages and reductions, as a rank executes them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from bridge.layout.schedule.action import DOWN, WRITES, Action, ActionKind, Row, Schedule

MATCH = {
    ActionKind.SEND_FORWARD: ActionKind.RECEIVE_FORWARD,
    ActionKind.SEND_BACKWARD: ActionKind.RECEIVE_BACKWARD,
}
"""For each kind of send, the kind of receive that belongs to it. The stage of a send or receive is
the stage to which the message goes.
"""


@lru_cache(maxsize=1)  # its proof asks for it more than once
def program_rows(schedule: Schedule) -> tuple[Row, ...]:
    """Return the actions of every rank with messages and reductions. Receives come before the
    action that needs the message, sends after the action that computes the message, and a reduction
    after the last action that adds to the stage's gradients.
    """
    return tuple(tuple(_spell_out_messages(schedule, row)) for row in schedule.rows)


def trim_backward(row: Row, first: int) -> Row:
    """Return `row`, one rank's actions of a program, without the backward actions of stages before
    `first`. These stages are frozen, so nothing needs their gradients.
    """
    # No gradient is needed below the first stage that trains, so neither is its message.
    forward = (ActionKind.FORWARD, ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD)
    return tuple(action for action in row if action.kind in forward or action.stage >= first)


def _spell_out_messages(schedule: Schedule, row: Row) -> Iterator[Action]:
    last = {action.stage: place for place, action in enumerate(row) if action.kind in WRITES}
    for place, action in enumerate(row):
        yield from _receives_before(schedule, action)
        yield action
        yield from _sends_after(schedule, action)
        if last.get(action.stage) == place:
            yield Action(action.stage, ActionKind.REDUCE)


def _receives_before(schedule: Schedule, action: Action) -> Iterator[Action]:
    stage, kind, microbatch = action
    if kind is ActionKind.FORWARD and stage > 0 and _are_apart(schedule, stage - 1):
        yield Action(stage, ActionKind.RECEIVE_FORWARD, microbatch)
    if kind in DOWN and stage + 1 < schedule.stages and _are_apart(schedule, stage):
        yield Action(stage, ActionKind.RECEIVE_BACKWARD, microbatch)


def _sends_after(schedule: Schedule, action: Action) -> Iterator[Action]:
    stage, kind, microbatch = action
    if kind is ActionKind.FORWARD and stage + 1 < schedule.stages and _are_apart(schedule, stage):
        yield Action(stage + 1, ActionKind.SEND_FORWARD, microbatch)
    if kind in DOWN and stage > 0 and _are_apart(schedule, stage - 1):
        yield Action(stage - 1, ActionKind.SEND_BACKWARD, microbatch)


def _are_apart(schedule: Schedule, stage: int) -> bool:
    """Whether stage `stage` + 1 is on another rank than `stage`."""
    return schedule.homes[stage] != schedule.homes[stage + 1]
