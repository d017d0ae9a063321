"""Loops. Iterations are read one by one while the condition is known.

Otherwise everything that the loop may change becomes unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from bridge.shell import arithmetic, variables
from bridge.shell.patterns import Unread
from bridge.shell.scope import Scope, Value, several
from bridge.shell.state import MOST_STEPS, ShellState
from bridge.shell.tokens import Token
from bridge.shell.word_pieces import Pieces, Unknown

if TYPE_CHECKING:
    from tree_sitter import Node


TURNS = 12
"""Largest number of iterations that are read for a loop of unknown length.

Reading ends earlier once an iteration changes nothing.
"""
Asks = Callable[[], bool | None]
"""A function that tells whether a loop continues; None if that is not known."""


def for_(reader: ShellState, node: Node) -> None:
    """Read `for NAME in words` or `for ((...))`."""
    tokens = reader.source.tokens_of(node.start_byte, node.end_byte)
    if tokens[1].kind == "counted":
        _read_counting_loop(reader, node, tokens[1])
        return
    name = reader.source.text_of(tokens[1])
    words = _words_of_loop(reader, node, tokens)
    reader.check_stops()
    body = _body_of(reader, node)
    reader.scope.status = 0  # that of a loop over no words
    asks = node.children[0].type == "select"
    if asks or any(several(word) for word in words):
        place, line = (
            reader.source.place(tokens[1].start, tokens[1].end),
            reader.source.line(node.start_byte),
        )
        why = "a loop gives the variable several values"
        several_values = Unknown(
            f"${name}", place, line, "a person chooses the value" if asks else why
        )
        _unsure(
            reader, node, lambda: _bind_variable(reader, name, Value(((several_values,),)), body)
        )
        return
    reader.exits.append([])
    for word in words:
        _assign_loop(reader, name, Value((word,)))
        _turn(reader, body)
        if reader.scope.ended:
            break
        _step(reader, node)
    _finish(reader, node)


def _step(reader: ShellState, node: Node) -> None:
    reader.steps += 1
    if reader.steps > MOST_STEPS:
        raise reader.refuse(
            node.start_byte,
            f"found more than {MOST_STEPS:,} steps in a loop; is this the right file?",
        )


def _assign_loop(reader: ShellState, name: str, value: Value) -> None:
    """Assign the value of an iteration to the loop variable.

    If the loop variable is a reference (nameref), the reference gets a new target.
    """
    if "n" in reader.scope.marks.get(name, ()):
        reader.scope.variables[name] = value
    else:
        variables.assign(reader, name, None, value, False)


def _bind_variable(reader: ShellState, name: str, value: Value, body: Sequence[Node]) -> bool:
    _assign_loop(reader, name, value)
    reader.loops += 1
    reader.statements(body)
    reader.loops -= 1
    return True


def _words_of_loop(reader: ShellState, node: Node, tokens: Sequence[Token]) -> list[Pieces]:
    if len(tokens) < 3 or tokens[2].text != "in":
        return list(reader.scope.positional_arguments)
    body = node.child_by_field_name("body")
    end = body.start_byte if body is not None else node.end_byte
    words = (token.word for token in tokens[3:] if token.start < end and token.word is not None)
    return [expansion for word in words for expansion in reader.expander.words(word)]


def _body_of(reader: ShellState, node: Node) -> Sequence[Node]:
    body = node.child_by_field_name("body")
    return body.children if body is not None else ()


def _read_counting_loop(reader: ShellState, node: Node, token: Token) -> None:
    """Read `for ((first; test; next))`."""
    text, start, end = reader.source.text, token.start + 2, token.end - 2
    cuts = [start - 1, *(place for place in range(start, end) if text[place] == ";"), end]
    parts = [(low + 1, high) for low, high in pairwise(cuts)]
    if len(parts) != 3:
        raise reader.refuse(node.start_byte, "expected three parts in for ((...))")
    first, test, step = parts
    body = _body_of(reader, node)

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
    _while(reader, node, goes_on, body, lambda: evaluate_part(step))
    if failures and not reader.scope.ended:
        reader.scope.status = 1


def _evaluate_span(reader: ShellState, span: tuple[int, int]) -> int | None:
    """Return the value of an arithmetic expression; None if it is not known."""
    try:
        return reader.evaluate_condition(*span)
    except Unread:
        return None


def while_(reader: ShellState, node: Node) -> None:
    """Read `while` and `until`."""
    until = node.children[0].type == "until"
    condition = node.children[
        1 : next(index for index, child in enumerate(node.children) if child.type == "do_group")
    ]

    def goes_on() -> bool | None:
        truth = reader.truth(condition)
        return None if truth is None else truth is not until

    _while(reader, node, goes_on, _body_of(reader, node), lambda: None)


def _while(
    reader: ShellState, node: Node, goes_on: Asks, body: Sequence[Node], step: Callable[[], object]
) -> None:
    reader.exits.append([])
    mark = len(reader.leaving)
    status: int | None = 0
    while True:
        truth = goes_on()
        if reader.scope.ended:
            break
        if truth is None:
            _unsure(reader, node, lambda: _once_more(reader, body, step, goes_on))
            break
        if not truth:
            reader.scope.status = status
            break
        # Copies are expensive, so only loops that a path may have left are compared.
        before = reader.scope.copy() if reader.exits[-1] or len(reader.leaving) > mark else None
        _turn(reader, body)
        status = reader.scope.status
        if reader.over:
            break
        step()
        _step(reader, node)
        # An iteration that changes nothing is followed by equal ones: the loop ends only where one of them may leave it.
        if before is not None and reader.scope.settles(before):
            reader.scope.ended = "over"
            break
    _finish(reader, node)


def _once_more(
    reader: ShellState, body: Sequence[Node], step: Callable[[], object], goes_on: Asks
) -> bool:
    reader.loops += 1
    reader.statements(body)
    reader.loops -= 1
    if not reader.scope.ended:
        step()
        goes_on()
    return True


def _turn(reader: ShellState, body: Sequence[Node]) -> None:
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


def _finish(reader: ShellState, node: Node) -> None:
    """Set the state after a loop: the merged states of the loop's normal end and of each `break`."""
    exits = reader.exits.pop()
    if reader.scope.ended and reader.scope.ended != "over":
        return
    here = [] if reader.scope.ended else [reader.scope.copy()]
    if here or exits:
        line = next((scope.parted for scope in exits if scope.parted), 0) if not here else 0
        reader.scope.take([*here, *exits], line or reader.source.line(node.start_byte))
    else:
        reader.scope.become(reader.leaving.pop())


def _unsure(reader: ShellState, node: Node, turn: Callable[[], bool]) -> None:
    """Read a loop with an unknown number of iterations, possibly none.

    All variables that the loop changes become unknown.
    """
    line = reader.source.line(node.start_byte)
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
        _step(reader, node)
    raise reader.refuse(
        node.start_byte, f"the variables of this loop still change after {TURNS} iterations"
    )
