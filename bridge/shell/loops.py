"""Loops. Iterations are read one by one while the condition is known.

Otherwise everything that the loop may change becomes unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from bridge.shell import arithmetic, variables
from bridge.shell.patterns import Unread
from bridge.shell.scope import Scope, Value, several
from bridge.shell.state import MOST_STEPS, ShellState
from bridge.shell.syntax import Body, For, While
from bridge.shell.word_pieces import Unknown

TURNS = 12
"""Largest number of iterations that are read for a loop of unknown length.

Reading ends earlier once an iteration changes nothing.
"""
Asks = Callable[[], bool | None]
"""A function that tells whether a loop continues; None if that is not known."""


def for_(reader: ShellState, loop: For) -> None:
    """Read `for NAME in words` or `for ((...))`."""
    if loop.counter is not None or loop.name is None:
        _read_counting_loop(reader, loop)
        return
    name, body = reader.source.text_of(loop.name), loop.body
    words = (
        list(reader.scope.positional_arguments)
        if loop.words is None
        else [expansion for word in loop.words for expansion in reader.expander.words(word)]
    )
    reader.check_stops()
    reader.scope.status = 0  # that of a loop over no words
    if loop.asks or any(several(word) for word in words):
        place = reader.source.place(loop.name.start, loop.name.end)
        why = (
            "a person chooses the value"
            if loop.asks
            else "a loop gives the variable several values"
        )
        value = Value(((Unknown(f"${name}", place, reader.source.line(loop.start), why),),))
        _unsure(reader, loop.start, lambda: _bind_variable(reader, name, value, body))
        return
    reader.exits.append([])
    for word in words:
        _assign_loop(reader, name, Value((word,)))
        _turn(reader, body)
        if reader.scope.ended:
            break
        _step(reader, loop.start)
    _finish(reader, loop.start)


def _step(reader: ShellState, place: int) -> None:
    reader.steps += 1
    if reader.steps > MOST_STEPS:
        raise reader.refuse(
            place, f"found more than {MOST_STEPS:,} steps in a loop; is this the right file?"
        )


def _assign_loop(reader: ShellState, name: str, value: Value) -> None:
    """Assign the value of an iteration to the loop variable.

    If the loop variable is a reference (nameref), the reference gets a new target.
    """
    if "n" in reader.scope.marks.get(name, ()):
        reader.scope.variables[name] = value
    else:
        variables.assign(reader, name, None, value, False)


def _bind_variable(reader: ShellState, name: str, value: Value, body: Body) -> bool:
    _assign_loop(reader, name, value)
    reader.loops += 1
    reader.statements(body)
    reader.loops -= 1
    return True


def _read_counting_loop(reader: ShellState, loop: For) -> None:
    """Read `for ((first; test; next))`."""
    assert loop.counter is not None
    text, start, end = reader.source.text, loop.counter.start + 2, loop.counter.end - 2
    cuts = [start - 1, *(place for place in range(start, end) if text[place] == ";"), end]
    parts = [(low + 1, high) for low, high in pairwise(cuts)]
    if len(parts) != 3:
        raise reader.refuse(loop.start, "expected three parts in for ((...))")
    first, test, step = parts

    # An error in one of the parts ends the loop, with status 1.
    failures = list[int]()

    def evaluate_part(span: tuple[int, int]) -> int | None:
        try:
            return 0 if failures else _evaluate_span(reader, span)
        except arithmetic.Unset:
            raise
        except arithmetic.Wrong:
            failures.append(1)
            return 0

    def goes_on() -> bool | None:
        if text[slice(*test)].strip() == "" and not failures:
            return True
        result = evaluate_part(test)
        return None if result is None else bool(result)

    evaluate_part(first)
    reader.check_stops()
    _while(reader, loop, goes_on, lambda: evaluate_part(step))
    if failures and not reader.scope.ended:
        reader.scope.status = 1


def _evaluate_span(reader: ShellState, span: tuple[int, int]) -> int | None:
    """Return the value of an arithmetic expression; None if it is not known."""
    try:
        return reader.evaluate_condition(*span)
    except Unread:
        return None


def while_(reader: ShellState, loop: While) -> None:
    """Read `while` and `until`."""

    def goes_on() -> bool | None:
        truth = reader.truth(loop.condition)
        return None if truth is None else truth is not loop.until

    _while(reader, loop, goes_on, lambda: None)


def _while(
    reader: ShellState, loop: For | While, goes_on: Asks, step: Callable[[], object]
) -> None:
    reader.exits.append([])
    mark = len(reader.leaving)
    status: int | None = 0
    while True:
        truth = goes_on()
        if reader.scope.ended:
            break
        if truth is None:
            _unsure(reader, loop.start, lambda: _once_more(reader, loop.body, step, goes_on))
            break
        if not truth:
            reader.scope.status = status
            break
        # Copies are expensive, so only loops that a path may have left are compared.
        before = reader.scope.copy() if reader.exits[-1] or len(reader.leaving) > mark else None
        _turn(reader, loop.body)
        status = reader.scope.status
        if reader.over:
            break
        step()
        _step(reader, loop.start)
        # An iteration that changes nothing is followed by equal ones: the loop ends only where one of them may leave it.
        if before is not None and reader.scope.settles(before):
            reader.scope.ended = "over"
            break
    _finish(reader, loop.start)


def _once_more(reader: ShellState, body: Body, step: Callable[[], object], goes_on: Asks) -> bool:
    reader.loops += 1
    reader.statements(body)
    reader.loops -= 1
    if not reader.scope.ended:
        step()
        goes_on()
    return True


def _turn(reader: ShellState, body: Body) -> None:
    """Read the body of a loop once. `continue` ends the iteration, `break` the loop."""
    mark = len(reader.leaving)
    reader.loops += 1
    reader.statements(body)
    reader.loops -= 1
    scopes = [*reader.leaving[mark:], reader.scope.copy()]
    del reader.leaving[mark:]
    here: list[Scope] = []
    for scope in scopes:
        _collect_exits(reader, scope, here, reader.exits[-1])
    if here:
        reader.scope.take(here, reader.branch)
    else:
        reader.scope.ended = "over"


def _collect_exits(reader: ShellState, scope: Scope, here: list[Scope], exits: list[Scope]) -> None:
    # `break 2` leaves this loop and counts as `break` in the loop around it.
    if scope.ended in ("break", "continue") and scope.levels > 1:
        scope.levels -= 1
        reader.leaving.append(scope)
    elif scope.ended in ("break", "continue"):
        (here if scope.ended == "continue" else exits).append(scope)
        scope.ended = ""
    elif scope.ended:
        reader.leaving.append(scope)
    else:
        here.append(scope)


def _finish(reader: ShellState, place: int) -> None:
    """Set the state after a loop: the merged states of the loop's normal end and of each `break`."""
    exits = reader.exits.pop()
    if reader.scope.ended and reader.scope.ended != "over":
        return
    here = [] if reader.scope.ended else [reader.scope.copy()]
    if here or exits:
        line = next((scope.parted for scope in exits if scope.parted), 0) if not here else 0
        reader.scope.take([*here, *exits], line or reader.source.line(place))
    else:
        reader.scope.become(reader.leaving.pop())


def _unsure(reader: ShellState, place: int, turn: Callable[[], bool]) -> None:
    """Read a loop with an unknown number of iterations, possibly none.

    All variables that the loop changes become unknown.
    """
    line = reader.source.line(place)
    mark = len(reader.leaving)

    def once() -> None:
        turn()
        reader.merge_exits(mark, ("break", "continue"))

    # Each pass merges one more iteration into the state. When a pass changes nothing, no number of
    # iterations would.
    for _ in range(TURNS):
        before, commands = reader.scope.copy(), len(reader.commands)
        reader.read_branches(line, once, lambda: None)
        if reader.scope.settles(before):
            reader.scope.status = None
            return
        # The commands of this pass may have wrong values; the next pass starts from the merged state and finds them again.
        del reader.commands[commands:]
        _step(reader, place)
    raise reader.refuse(place, f"the variables of this loop still change after {TURNS} iterations")
