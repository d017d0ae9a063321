"""Matches regular expressions in bounded time: all possible ends of a match are tracked at once, without backtracking."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import inf, prod

from bridge.shell.patterns import (
    Node,
    One,
    PatternGroup,
    PatternPlace,
    Positions,
    Unread,
    match_sequence,
)

TRIES = 10**7
"""Largest number of paths through a text that Python's own matcher may try."""
NODES = 5_000
"""Largest number of parts of an expression after its repetitions are expanded."""
ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
TIMES = re.compile(r"(?P<sign>[*+?])|\{(?P<least>\d+)(?P<more>,?)(?P<most>\d*)\}")
EMPTY = ("^", r"\Z", r"\b", r"\B")
SPAN = re.compile(".*", re.DOTALL)


def endless(pattern: re.Pattern[str], length: int, starts: int = 1) -> bool:
    """Return whether backtracking may take too long in a text of `length` characters."""
    return bool(_ways(_parse_pattern(pattern), length + 1) * (length + 1) ** starts > TRIES)


def _ways(nodes: Sequence[Node], places: int) -> float:
    """Return an upper bound for the number of ways in which `nodes` match a text."""
    return prod(_ways_of(node, places) for node in nodes if isinstance(node, PatternGroup))


def _ways_of(group: PatternGroup, places: int) -> float:
    # A repetition of a plain part ends at one of `places`. One with choices or groups inside may
    # try all their combinations.
    ways = sum(_ways(choice, places) for choice in group.choices)
    if group.kind == "?":
        return ways + 1  # and the way without it
    if group.kind == "@":
        return ways
    return (
        places
        if ways == 1 and not any(isinstance(node, PatternGroup) for node in group.choices[0])
        else inf
    )


def has_match(pattern: re.Pattern[str], text: str) -> bool:
    """Return whether a part of `text` matches."""
    return bool(
        ends(pattern, text, range(len(text) + 1))
        if endless(pattern, len(text))
        else pattern.search(text)
    )


def fits(pattern: re.Pattern[str], text: str) -> bool:
    """Return whether all of `text` matches."""
    return (
        len(text) in ends(pattern, text, (0,))
        if endless(pattern, len(text))
        else bool(pattern.fullmatch(text))
    )


def first(pattern: re.Pattern[str], text: str, start: int, groups: bool) -> re.Match[str] | None:
    """Return the leftmost longest match from `start` on: its groups or, without `groups`, only its span."""
    places = range(start, len(text) + 1)
    if not ends(pattern, text, places):
        return None
    # Whether some start up to a place leads to a match changes from no to yes once: at the leftmost
    # start.
    begin = start + bisect_left(
        places, True, key=lambda place: bool(ends(pattern, text, range(start, place + 1)))
    )
    end = max(ends(pattern, text, (begin,)))
    if not groups:
        return SPAN.match(text, begin, end)
    if endless(pattern, end - begin, 0):
        raise Unread("the groups of this expression take too long to find")
    return pattern.fullmatch(text, begin, end)


def ends(pattern: re.Pattern[str], text: str, starts: Iterable[int]) -> Positions:
    """Return the possible ends of a match that begins at one of `starts`."""
    return match_sequence(_parse_pattern(pattern), text, set(starts))


@lru_cache(256)
def _parse_pattern(pattern: re.Pattern[str]) -> tuple[Node, ...]:
    return _choices(pattern, 0)[0]


def _choices(pattern: re.Pattern[str], place: int) -> tuple[tuple[Node, ...], int, int]:
    """Return the alternatives of a group, the offset at which the group ends, and the number of its parts."""
    text, choices, size = pattern.pattern, [list[Node]()], 1
    while place < len(text) and text[place] != ")":
        if text[place] == "|":
            choices.append([])
            place += 1
            continue
        node, place, parts = _atom(pattern, place)
        again, place = _times(node, text, place)
        choices[-1] += again
        size += parts * len(again)
        if size > NODES:
            raise Unread("this expression is too large")
    return (
        (PatternGroup("@", tuple(choices)),) if len(choices) > 1 else tuple(choices[0]),
        place,
        size,
    )


def _atom(pattern: re.Pattern[str], place: int) -> tuple[Node, int, int]:
    if pattern.pattern[place] == "(":
        inside, end, size = _choices(pattern, place + 1)
        return PatternGroup("@", (inside,)), end + 1, size
    match = ATOM.match(pattern.pattern, place)
    if match is None:
        raise Unread("the pattern is no valid regular expression")
    alone = re.compile(match[0], pattern.flags & (re.DOTALL | re.ASCII | re.IGNORECASE))
    empty = PatternPlace(lambda text, at: bool(alone.match(text, at)))
    return empty if match[0] in EMPTY else One(lambda char: bool(alone.match(char))), match.end(), 1


def _times(node: Node, text: str, place: int) -> tuple[list[Node], int]:
    """Return a part with its repetition applied, and the offset after the repetition."""
    match = TIMES.match(text, place)
    if match is None:
        return [node], place
    choices = node.choices if isinstance(node, PatternGroup) and node.kind == "@" else ((node,),)
    if match["sign"]:
        return [PatternGroup(match["sign"], choices)], match.end()
    least, most = int(match["least"]), int(match["most"] or match["least"])
    if max(least, most) > NODES:
        raise Unread("this expression is too large")
    # `{2,}` is two and a star, `{2,4}` two and twice an option.
    open_ = bool(match["more"]) and not match["most"]
    rest: list[Node] = (
        [PatternGroup("*", choices)] if open_ else [PatternGroup("?", choices)] * (most - least)
    )
    return [node] * least + rest, match.end()
