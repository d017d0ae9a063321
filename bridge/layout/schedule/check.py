"""Finds out without running a schedule whether it would run to its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from bridge.layout.schedule.action import COMPUTE, DOWN, WRITES, Action, ActionKind, Row, Schedule
from bridge.layout.schedule.program import MATCH, program_rows
from bridge.layout.schedule.timeline import action_needs

SENT = {receive: send for send, receive in MATCH.items()}
"""A table from each kind of receive to the kind of send that it waits for."""
SHOWN = 8
"""Maximum number of problems of one kind that are listed, because one gap in a schedule causes many
problems.
"""


def prove_schedule(schedule: Schedule, rows: Sequence[Row] | None = None) -> tuple[str, ...]:
    """Return the problems of `schedule`. The result is empty if the schedule runs to its end.
    `rows` are the program to check in place of the program that belongs to the schedule.

    In a correct schedule each stage is on one rank, each microbatch passes each stage once forward
    and once backward, each message is sent once and received once, each gradient is reduced once
    after the last action that adds to it, and no rank waits for ever.
    """
    rows = program_rows(schedule) if rows is None else rows
    # Later checks assume that earlier ones found nothing, so only the first sort of problems is listed.
    for check in (
        _find_misplaced,
        _check_counts,
        _check_recompute,
        _check_messages,
        _check_reductions,
        _find_deadlock,
    ):
        problems = tuple(check(schedule, rows))
        if problems:
            return problems[:SHOWN] + (
                (f"and {len(problems) - SHOWN} more problems of this kind",)
                if len(problems) > SHOWN
                else ()
            )
    return ()


def _find_misplaced(schedule: Schedule, rows: Sequence[Row]) -> Iterator[str]:
    if not rows or not schedule.homes or schedule.microbatches == 0:
        yield "the schedule has no actions; write the actions of each rank"
    for rank in sorted(set(range(len(rows))) - set(schedule.homes)):
        yield f"rank {rank} has no stage; place a stage on this rank, or use fewer ranks"
    for rank, row in enumerate(rows):
        for action in row:
            if action.kind not in COMPUTE:
                continue
            if not 0 <= action.stage < schedule.stages:
                yield (
                    f"rank {rank}: {action} belongs to a stage that does not exist"
                    f" ({schedule.stages} stages); number stages from 0"
                )
            elif schedule.homes[action.stage] != rank:
                home = schedule.homes[action.stage]
                yield (
                    f"rank {rank}: {action} belongs to stage {action.stage}, which is on rank {home};"
                    " move the action to that rank"
                )


def _check_counts(schedule: Schedule, rows: Sequence[Row]) -> Iterator[str]:
    counts = Counter(action for row in rows for action in row)
    for stage, home in enumerate(schedule.homes):
        for microbatch in range(schedule.microbatches):
            forward = counts[Action(stage, ActionKind.FORWARD, microbatch)]
            if forward != 1:
                yield f"rank {home}: {stage}F{microbatch} occurs {forward} times, expected once; {_microbatch_advice(forward)}"
            kinds = (ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT)
            backward = tuple(counts[Action(stage, kind, microbatch)] for kind in kinds)
            if backward not in ((1, 0, 0), (0, 1, 1)):
                occurrences = [
                    f"{number} {kind}"
                    for number, kind in zip(backward, kinds, strict=True)
                    if number
                ]
                yield (
                    f"rank {home}: backward of microbatch {microbatch} on stage {stage} occurs as"
                    f" {', '.join(occurrences) or 'nothing'}, expected one B, or its halves, one I and one W;"
                    f" {_microbatch_advice(sum(backward))}"
                )


def _microbatch_advice(number: int) -> str:
    return "remove the surplus" if number > 1 else "add it"


def _check_recompute(schedule: Schedule, rows: Sequence[Row]) -> Iterator[str]:
    for rank, row in enumerate(rows):
        # The first place of each action: going backwards, earlier ones overwrite later ones.
        place = {action: index for index, action in reversed(list(enumerate(row)))}
        for action, number in Counter(
            action for action in row if action.kind is ActionKind.AGAIN
        ).items():
            stage, _, microbatch = action
            ends = [
                place[backward]
                for kind in DOWN
                if (backward := Action(stage, kind, microbatch)) in place
            ]
            if number > 1:
                yield f"rank {rank}: {action} occurs {number} times, expected once; remove the surplus"
            if not place[Action(stage, ActionKind.FORWARD, microbatch)] < place[action] < min(ends):
                yield (
                    f"rank {rank}: {action} is not between forward and backward of microbatch {microbatch}; "
                    "move it there"
                )
            if (stage, microbatch) in schedule.kept:
                yield f"rank {rank}: {action} recomputes activations that are kept in memory; remove the action"


def _check_messages(schedule: Schedule, rows: Sequence[Row]) -> Iterator[str]:
    sends = Counter(action for row in rows for action in row if action.kind in MATCH)
    receives = Counter(action for row in rows for action in row if action.kind in SENT)
    messages = Counter(
        action for row in program_rows(schedule) for action in row if action.kind in MATCH
    )
    for message in sorted({*sends, *messages}):
        answer = Action(message.stage, MATCH[message.kind], message.microbatch)
        if sends[message] != 1 or receives.pop(answer, 0) != 1 or message not in messages:
            yield (
                f"message {message}: sent {sends[message]} times, expected one send"
                f" and one receive; {_microbatch_advice(sends[message])}"
            )
    for answer in sorted(receives):
        yield f"{answer} receives a message that no rank sends; remove this receive"


def _check_reductions(schedule: Schedule, rows: Sequence[Row]) -> Iterator[str]:
    for rank, row in enumerate(rows):
        counts = Counter(action.stage for action in row if action.kind is ActionKind.REDUCE)
        for stage in schedule.local(rank):
            if counts[stage] != 1:
                yield f"rank {rank}: gradients of stage {stage} are reduced {counts[stage]} times in a step, expected once"
        stages: set[int] = set()
        for action in row:
            if action.kind is ActionKind.REDUCE:
                stages.add(action.stage)
            elif action.kind in WRITES and action.stage in stages:
                yield (
                    f"rank {rank}: {action} adds to gradients of stage {action.stage} after these "
                    "gradients were reduced; reduce them later"
                )


def _find_deadlock(schedule: Schedule, rows: Sequence[Row]) -> Iterator[str]:
    """Simulate the program `rows`. Yield a problem for each rank that waits for ever, with the
    action that can never start.
    """
    places, runs = [0] * len(rows), [set[Action]() for _ in rows]
    sends: set[Action] = set()
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            # A send never waits for its receiver: messages are sent without blocking.
            while places[rank] < len(row) and not _first_missing(
                schedule, row[places[rank]], runs[rank], sends
            ):
                action = row[places[rank]]
                (sends if action.kind in MATCH else runs[rank]).add(action)
                places[rank] += 1
                progress = True
    for rank, row in enumerate(rows):
        if places[rank] < len(row):
            action = row[places[rank]]
            missing = _first_missing(schedule, action, runs[rank], sends)
            yield (
                f"rank {rank} waits for ever at {action}, which needs {missing}; place {missing} "
                f"before {action}"
            )


def _first_missing(
    schedule: Schedule, action: Action, runs: set[Action], sends: set[Action]
) -> str:
    """Return the name of the first action that has to run before `action` and has not run yet, or
    "" if `action` can run. `runs` are the actions that this rank has run, `sends` the messages of
    all ranks.
    """
    stage, kind, microbatch = action
    if kind in COMPUTE:
        for options in action_needs(schedule, action):
            if missing := _none_of(_actions_on_rank(schedule, stage, options), runs):
                return missing
    elif kind in SENT:
        return _none_of((Action(stage, SENT[kind], microbatch),), sends)
    elif kind is ActionKind.SEND_FORWARD:
        return _none_of((Action(stage - 1, ActionKind.FORWARD, microbatch),), runs)
    elif kind is ActionKind.SEND_BACKWARD:
        return _none_of(tuple(Action(stage + 1, option, microbatch) for option in DOWN), runs)
    return ""


def _actions_on_rank(
    schedule: Schedule, stage: int, options: tuple[Action, ...]
) -> tuple[Action, ...]:
    """Return `options` if these actions run on the rank of `stage`. If they run on another rank,
    return the action that receives their message on the rank of `stage`. A dependency is met if one
    of the returned actions has run.
    """
    other = options[0].stage
    if schedule.homes[other] == schedule.homes[stage]:
        return options
    kind = ActionKind.RECEIVE_FORWARD if other < stage else ActionKind.RECEIVE_BACKWARD
    return (Action(stage, kind, options[0].microbatch),)


def _none_of(options: tuple[Action, ...], runs: set[Action]) -> str:
    return str(options[0]) if runs.isdisjoint(options) else ""
