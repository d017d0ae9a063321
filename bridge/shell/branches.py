"""Branches of `if` and `case`.

The branch that is taken is read; if that is not known, all possible branches are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from bridge.shell.expand import GROUPS
from bridge.shell.patterns import Pattern, Unread
from bridge.shell.state import ShellState
from bridge.shell.syntax import Body, Case, CaseItem, If
from bridge.shell.tokens import Word
from bridge.shell.word_pieces import text_if_known


def if_(reader: ShellState, statement: If) -> None:
    """Read the first branch of an `if` whose condition is true.

    If a condition is not known, read all branches that may be taken.
    """
    _branch(reader, statement.branches, statement.start)


def _branch(reader: ShellState, branches: Sequence[tuple[Body | None, Body]], place: int) -> None:
    if not branches:
        reader.scope.status = 0
        return
    condition, body = branches[0]
    truth = True if condition is None else reader.truth(condition)
    if reader.scope.ended:  # the condition itself may call `exit`
        return
    if truth is None and condition is not None:
        last = condition[-1]
        end = last.others[-1][1].end if last.others else last.first.end
        reader.read_branches(
            reader.source.line(place),
            lambda: reader.statements(body),
            lambda: _branch(reader, branches[1:], place),
            asking=reader.source.text[condition[0].first.start : end],
        )
    elif truth:
        reader.statements(body)
    else:
        _branch(reader, branches[1:], place)


def case(reader: ShellState, statement: Case) -> None:
    """Read a `case`, its patterns in order.

    `;&` continues with the next body, `;;&` with the next pattern.
    """
    text = text_if_known(reader.expander.text(statement.value, alone=True))
    reader.check_stops()
    reader.scope.status = 0  # that of a case in which nothing fits
    _items(reader, text, statement.items, statement)


def _items(
    reader: ShellState, text: str | None, items: Sequence[CaseItem], statement: Case
) -> None:
    for index, item in enumerate(items):
        fits = _fits(reader, text, item)
        rest = items[index + 1 :]
        if fits is None:
            reader.read_branches(
                reader.source.line(statement.start),
                partial(_body, reader, text, item, rest, statement),
                partial(_items, reader, text, rest, statement),
                asking=reader.source.text_of(statement.value),
            )
            return
        if fits:
            _body(reader, text, item, rest, statement)
            return


def _body(
    reader: ShellState, text: str | None, item: CaseItem, rest: Sequence[CaseItem], statement: Case
) -> None:
    reader.statements(item.body)
    if reader.scope.ended or not rest:
        return
    if item.sign == ";&":
        _body(reader, text, rest[0], rest[1:], statement)
    elif item.sign == ";;&":
        _items(reader, text, rest, statement)


def _fits(reader: ShellState, text: str | None, item: CaseItem) -> bool | None:
    """Return whether one of the patterns of a `case` item matches; None if that is not known."""
    fold = "nocasematch" in reader.scope.options
    unsure = False
    for word in item.patterns:
        _check_groups(reader, word)
        try:
            pattern = Pattern(reader.expander.chars(reader.expander.text(word, alone=True)), fold)
            # `*` fits whatever the text is. An earlier pattern that may fit makes the item fit in
            # any case, too.
            if text is None:
                unsure |= pattern.nodes != ["*"]
                if pattern.nodes == ["*"]:
                    return True
            elif pattern.matches(text.lower() if fold else text):
                return None if unsure else True
        except Unread:
            unsure = True
    return None if unsure else False


def _check_groups(reader: ShellState, word: Word) -> None:
    """Raise `SourceError` for a pattern like `@(a|b)` unless `extglob` is on.

    The option must be set on an earlier line, because a shell parses a whole line before it runs
    it.
    """
    if not any(
        part.kind == "text" and GROUPS.search(reader.source.text_of(part)) for part in word.parts
    ):
        return
    if not reader.scope.on("extglob") or reader.source.line(word.start) <= reader.grouping:
        raise reader.refuse(
            word.start, "a shell stops here: this pattern needs shopt -s extglob on an earlier line"
        )
