"""Branches of `if` and `case`.

The branch that is taken is read; if that is not known, all possible branches are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bridge.shell.expand import GROUPS
from bridge.shell.patterns import Pattern, Unread
from bridge.shell.state import ShellState
from bridge.shell.tokens import Token
from bridge.shell.word_pieces import text_if_known

if TYPE_CHECKING:
    from tree_sitter import Node


def if_(reader: ShellState, node: Node) -> None:
    """Read the first branch of an `if` whose condition is true.

    If a condition is not known, read all branches that may be taken.
    """
    _branch(reader, list(_clauses(node)), node)


def _branch(
    reader: ShellState, clauses: Sequence[tuple[Sequence[Node] | None, Sequence[Node]]], node: Node
) -> None:
    if not clauses:
        reader.scope.status = 0
        return
    condition, body = clauses[0]
    truth = True if condition is None else reader.truth(condition)
    if reader.scope.ended:  # the condition itself may call `exit`
        return
    if truth is None:
        line = reader.source.line(node.start_byte)
        asking = (
            reader.source.text[condition[0].start_byte : condition[-1].end_byte]
            if condition
            else ""
        )
        reader.read_branches(
            line,
            lambda: reader.statements(body),
            lambda: _branch(reader, clauses[1:], node),
            asking=asking,
        )
    elif truth:
        reader.statements(body)
    else:
        _branch(reader, clauses[1:], node)


def case(reader: ShellState, node: Node) -> None:
    """Read a `case`, its patterns in order.

    `;&` continues with the next body, `;;&` with the next pattern.
    """
    value = node.child_by_field_name("value")
    token = (
        reader.source.tokens_of(value.start_byte, value.end_byte)[0] if value is not None else None
    )
    if token is None or token.word is None:
        raise reader.refuse(node.start_byte, 'this form of "case" is not supported')
    text = text_if_known(reader.expander.text(token.word, alone=True))
    reader.check_stops()
    reader.scope.status = 0  # that of a case in which nothing fits
    _items(reader, text, [child for child in node.children if child.type == "case_item"], node)


def _items(reader: ShellState, text: str | None, items: Sequence[Node], node: Node) -> None:
    for index, item in enumerate(items):
        fits = _fits(reader, text, item)
        rest = items[index + 1 :]
        if fits is None:
            _read_item_branches(reader, text, items[index:], node)
            return
        if fits:
            _body(reader, text, item, rest, node)
            return


def _read_item_branches(
    reader: ShellState, text: str | None, items: Sequence[Node], node: Node
) -> None:
    item, rest = items[0], items[1:]
    line = reader.source.line(node.start_byte)
    value = node.child_by_field_name("value")
    asking = reader.source.text[value.start_byte : value.end_byte] if value is not None else ""
    reader.read_branches(
        line,
        lambda: _body(reader, text, item, rest, node),
        lambda: _items(reader, text, rest, node),
        asking=asking,
    )


def _body(
    reader: ShellState, text: str | None, item: Node, rest: Sequence[Node], node: Node
) -> None:
    close = next((index for index, child in enumerate(item.children) if child.type == ")"), 0)
    reader.statements(item.children[close + 1 :])
    sign = item.children[-1].type
    if reader.scope.ended or not rest:
        return
    if sign == ";&":
        _body(reader, text, rest[0], rest[1:], node)
    elif sign == ";;&":
        _items(reader, text, rest, node)


def _fits(reader: ShellState, text: str | None, item: Node) -> bool | None:
    """Return whether one of the patterns of a `case` item matches; None if that is not known."""
    close = next((child.end_byte for child in item.children if child.type == ")"), item.end_byte)
    fold = "nocasematch" in reader.scope.options
    unsure = False
    for token in reader.source.tokens_of(item.start_byte, close):
        if token.word is None:
            continue
        _check_groups(reader, token)
        try:
            pattern = Pattern(
                reader.expander.chars(reader.expander.text(token.word, alone=True)), fold
            )
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


def _check_groups(reader: ShellState, token: Token) -> None:
    """Raise `SourceError` for a pattern like `@(a|b)` unless `extglob` is on.

    The option must be set on an earlier line, because a shell parses a whole line before it runs
    it.
    """
    parts = token.word.parts if token.word else ()
    if not any(
        part.kind == "text" and GROUPS.search(reader.source.text_of(part)) for part in parts
    ):
        return
    if not reader.scope.on("extglob") or reader.source.line(token.start) <= reader.grouping:
        raise reader.refuse(
            token.start,
            "a shell stops here: this pattern needs shopt -s extglob on an earlier line",
        )


def _clauses(node: Node) -> Iterator[tuple[Sequence[Node] | None, Sequence[Node]]]:
    """Yield the condition and body of each branch of an `if`, in order; the condition of `else` is None."""
    own = [
        child for child in node.children if child.type not in ("elif_clause", "else_clause", "fi")
    ]
    yield _halves(own)
    for clause in node.children:
        if clause.type == "elif_clause":
            yield _halves(clause.children)
        elif clause.type == "else_clause":
            yield None, clause.children[1:]


def _halves(nodes: Sequence[Node]) -> tuple[Sequence[Node], Sequence[Node]]:
    place = next((index for index, child in enumerate(nodes) if child.type == "then"), len(nodes))
    return nodes[1:place], nodes[place + 1 :]
