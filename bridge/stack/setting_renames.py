"""Moves: settings that a stack renamed or replaced in a release. Each move can be applied in both
directions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Words = Mapping[str, Any]
"""Given values by path."""
Reword = Callable[[Words], Words]
"""Function that turns settings of one release into settings of another. It takes all given values,
and returns new settings that mean the same. An empty result means that no new setting means the
same.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A renaming: since release `since`, settings at the `new` paths replace settings at the `old`
    paths.

    `forward` turns old settings into new ones, and `back` turns new settings into old ones. `note`
    says what newer releases do with the old settings. `source` names the place in the stack's
    source.
    """

    since: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    forward: Reword
    back: Reword
    note: str = ""
    source: str = ""

    def apply_to(self, settings: Words, forward: bool) -> dict[str, Any]:
        """Return `settings` with old settings replaced by new ones, or new settings by old ones if
        `forward` is false. Return `settings` unchanged if there is nothing to replace.
        """
        here, put = (self.old, self.forward) if forward else (self.new, self.back)
        # The first path is the one that must be given; others only add to it.
        changes = put(settings) if here[0] in settings else {}
        if not changes:
            return dict(settings)
        rest = {path: value for path, value in settings.items() if path not in here}
        return {**rest, **changes}


def rename_setting(old: str, new: str, since: str, note: str = "", source: str = "") -> Move:
    """Return a move for a setting that keeps its value under another name."""
    return Move(
        since,
        (old,),
        (new,),
        lambda settings: {new: settings[old]},
        lambda settings: {old: settings[new]},
        note,
        source,
    )


def switch_to_value(
    old: str, new: str, value: Any, since: str, note: str = "", source: str = ""
) -> Move:
    """Return a move for a switch that became one value of another setting."""

    def forward(settings: Words) -> Words:
        return {new: value} if settings[old] is True else {}

    def back(settings: Words) -> Words:
        return {old: True} if settings[new] == value else {}

    return Move(since, (old,), (new,), forward, back, note, source)
