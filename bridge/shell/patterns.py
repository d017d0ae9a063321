"""Shell patterns, matched as a shell does: globs with quoted parts, classes and groups."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bridge.shell.word_pieces import Piece, Unknown

LONGEST = 2_000
CLASSES: Mapping[str, Callable[[str], bool]] = {
    "alpha": str.isalpha,
    "digit": lambda char: char in "0123456789",
    "alnum": str.isalnum,
    "upper": str.isupper,
    "lower": str.islower,
    "space": lambda char: char in " \t\n\v\f\r",
    "blank": lambda char: char in " \t",
    "punct": lambda char: (
        char.isascii() and char.isprintable() and not char.isalnum() and char != " "
    ),
    "xdigit": lambda char: char in "0123456789abcdefABCDEF",
    "word": lambda char: char.isalnum() or char == "_",
    "cntrl": lambda char: char < " " or char == "\x7f",
    "print": str.isprintable,
    "graph": lambda char: char.isprintable() and char != " ",
}
Char = tuple[str, bool]
"""A character of a pattern, and whether it may have a special meaning."""
Positions = set[int]


class Unread(ValueError):
    """Raised for a pattern, expression or value whose meaning is not known."""


def simple(text: str) -> str:
    """Return `text` if all locales treat its characters alike; else raise `Unread`."""
    if not text.isascii():
        raise Unread("the length of text beyond ASCII depends on the locale")
    return text


def active(pieces: Iterable[Piece]) -> list[Char]:
    """Return the characters of a pattern. Quoted characters have no special meaning."""
    chars: list[Char] = []
    for piece in pieces:
        if isinstance(piece, Unknown):
            raise Unread(piece.why)
        chars += [(char, not piece.quoted) for char in piece.text]
    return chars


@dataclass(frozen=True)
class PatternGroup:
    """A group of alternatives, such as `@(a|b)`."""

    kind: str
    choices: tuple[Sequence[Node], ...]


@dataclass(frozen=True)
class One:
    """A test of one character."""

    fits: Callable[[str], bool]


@dataclass(frozen=True)
class PatternPlace:
    """A test of a position between characters."""

    fits: Callable[[str, int], bool]


STAR = "*"
Node = PatternGroup | One | PatternPlace | str


class Pattern:
    """A glob, matched without backtracking."""

    def __init__(self, chars: Sequence[Char], fold: bool = False) -> None:
        """Set up a pattern. With `fold`, letter case is ignored."""
        self.chars, self.fold, self.counts = chars, fold, False
        self.nodes = self._sequence(0, False)[0]

    def matches(self, text: str) -> bool:
        """Return whether the whole of `text` matches."""
        return len(text) in self.ends(text, 0)

    def ends(self, text: str, start: int) -> Positions:
        """Return the possible ends of a match that begins at `start`."""
        if self.counts:
            simple(text)
        if len(text) > LONGEST:
            raise Unread(
                f"matching a pattern with a text of more than {LONGEST:,} characters is not "
                "supported"
            )
        return match_sequence(self.nodes, text.lower() if self.fold else text, {start})

    def _sequence(self, position: int, inside: bool) -> tuple[list[Node], int]:
        nodes: list[Node] = []
        while position < len(self.chars):
            char, special = self.chars[position]
            if inside and special and char in "|)":
                break
            # All that follows the sign of an open group is literal. Whether that also holds behind
            # `*` is not certain.
            if not inside and self._open(position):
                if nodes and nodes[-1] == STAR:
                    raise Unread("a group that follows * and is never closed is not supported")
                return [*nodes, *(self._same(char) for char, _ in self.chars[position:])], len(
                    self.chars
                )
            node, position = self._node(position)
            nodes.append(node)
        return nodes, position

    def _open(self, position: int) -> bool:
        """Return whether a group begins at `position` and is never closed.

        All further characters are then literal.
        """
        char, special = self.chars[position]
        begins = (
            special and char in "?*+@!" and self.chars[position + 1 : position + 2] == [("(", True)]
        )
        if not begins:
            return False
        try:
            self._group(position)
        except EOFError:
            return True
        return False

    def _node(self, position: int) -> tuple[Node, int]:
        char, special = self.chars[position]
        after = self.chars[position + 1] if position + 1 < len(self.chars) else ("", False)
        if special and char in "?*+@!" and after == ("(", True):
            return self._group(position)
        if special and char == "*":
            return STAR, position + 1
        if special and char == "?":
            self.counts = True
            return One(lambda _: True), position + 1
        if special and char == "[":
            bracket = self._bracket(position + 1)
            if bracket:
                return bracket
        if special and char == "\\":
            if not after[0]:
                raise Unread("a backslash at the end of a pattern is not supported")
            return self._same(after[0]), position + 2
        return self._same(char), position + 1

    def _same(self, char: str) -> One:
        target = char.lower() if self.fold else char
        return One(lambda other: other == target)

    def _group(self, position: int) -> tuple[Node, int]:
        kind, choices = self.chars[position][0], []
        position += 1
        while position < len(self.chars) and self.chars[position][0] in "(|":
            nodes, position = self._sequence(position + 1, True)
            choices.append(nodes)
        if position >= len(self.chars):
            raise EOFError
        return PatternGroup(kind, tuple(choices)), position + 1

    def _bracket(self, start: int) -> tuple[Node, int] | None:
        """Return the test for `[...]`, and the end of the bracket; None if the bracket is never closed."""
        position, tests = start, list[Callable[[str], bool]]()
        negation = position < len(self.chars) and self.chars[position] in (("!", True), ("^", True))
        position += negation
        first = position
        while position < len(self.chars):
            # A `]` in first place is a member, and does not close.
            if self.chars[position] == ("]", True) and position > first:
                self.counts = True
                return One(
                    lambda char: any(test(char) for test in tests) is not negation
                ), position + 1
            test, position = self._member(position)
            tests.append(test)
        return None

    def _member(self, position: int) -> tuple[Callable[[str], bool], int]:
        rest = "".join(
            char if special else "\0" for char, special in self.chars[position : position + 12]
        )
        char_class = re.match(r"\[:(\w+):\]", rest)
        if char_class:
            if char_class[1] not in CLASSES:
                raise Unread(f"[:{char_class[1]}:] is no class of characters")
            return CLASSES[char_class[1]], position + char_class.end()
        if re.match(r"\[[.=]", rest):
            raise Unread("collating symbols are not supported")
        position, low = self._literal(position)
        after = self.chars[position + 1 : position + 2]
        if self.chars[position : position + 1] == [("-", True)] and after not in (
            [],
            [("]", True)],
        ):
            position, high = self._literal(position + 1)
            return (lambda char: low <= char <= high), position
        return (lambda char: char == low), position

    def _literal(self, position: int) -> tuple[int, str]:
        if self.chars[position] == ("\\", True) and position + 1 < len(self.chars):
            position += 1
        char = self.chars[position][0]
        return position + 1, char.lower() if self.fold else char


def match_sequence(nodes: Sequence[Node], text: str, starts: Positions) -> Positions:
    """Return the possible ends of matches of the sequence `nodes` that begin at one of `starts`."""
    for node in nodes:
        if not starts:
            break
        if isinstance(node, One):
            starts = {place + 1 for place in starts if place < len(text) and node.fits(text[place])}
        elif isinstance(node, PatternPlace):
            starts = {place for place in starts if node.fits(text, place)}
        elif isinstance(node, PatternGroup):
            starts = _group_ends(node, text, starts)
        else:  # a star reaches every place behind the first start
            starts = set(range(min(starts), len(text) + 1))
    return starts


def _group_ends(group: PatternGroup, text: str, starts: Positions) -> Positions:
    if group.kind == "!":
        # `!(...)` matches whatever none of its choices does, so that each start has ends of its
        # own.
        ends: Positions = set()
        for start in starts:
            ends |= set(range(start, len(text) + 1)) - _once(group, text, {start})
        return ends
    once = _once(group, text, starts)
    if group.kind in "?@":
        return once | (starts if group.kind == "?" else set())
    # Repeated until no new end is reached. Each place is tried once, so that the time is bounded by
    # the text.
    all_ends, new = set(once), once
    while new:
        new = _once(group, text, new) - all_ends
        all_ends |= new
    return all_ends | (starts if group.kind == "*" else set())


def _once(group: PatternGroup, text: str, starts: Positions) -> Positions:
    return set().union(*(match_sequence(choice, text, starts) for choice in group.choices))
