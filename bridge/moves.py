"""Moves: settings that a stack says in other words since a release, as rows that work in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Words = Mapping[str, Any]
"""Given values by path."""
Reword = Callable[[Words], Words]
"""From all given values to the ones that say it in the other words; empty: these values have none."""


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """From release `since` on, what `old` paths said is said by `new` paths.

    `forward` and `back` put one into the words of the other; `note` says what the stack makes of the old words since then,
    `source` names the place in the stack's source that the row stands on.
    """

    since: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    forward: Reword
    back: Reword
    note: str = ""
    source: str = ""

    def applied(self, given: Words, forward: bool) -> dict[str, Any]:
        """`given` in the newer words (or the older ones), unchanged if it says nothing of the kind."""
        here, put = (self.old, self.forward) if forward else (self.new, self.back)
        said = put(given) if here[0] in given else {}
        return {**{path: value for path, value in given.items() if path not in here}, **said} if said else dict(given)


def renamed(old: str, new: str, since: str, note: str = "", source: str = "") -> Move:
    """The same value under another name."""
    return Move(since, (old,), (new,), lambda given: {new: given[old]}, lambda given: {old: given[new]}, note, source)


def switched(old: str, new: str, value: Any, since: str, note: str = "", source: str = "") -> Move:
    """A switch that became one value of another setting."""

    def forward(given: Words) -> Words:
        return {new: value} if given[old] is True else {}

    def back(given: Words) -> Words:
        return {old: True} if given[new] == value else {}

    return Move(since, (old,), (new,), forward, back, note, source)
