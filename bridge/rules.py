"""Rules: one row of a dialect's table says how a group of its fields maps to a group of Plan fields, and what is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, cached_property
from typing import Any

from packaging.version import Version

from bridge.plan import paths

Group = Mapping[str, Any]


class How(StrEnum):
    """How a value came to be."""

    EXACT = "exact"
    DERIVED = "derived"
    APPROXIMATE = "approximate"
    DEFAULTED = "defaulted"
    DROPPED = "dropped"


class Effect(StrEnum):
    """What a change of a field does to the run."""

    NONE = "same numbers"
    ROUNDING = "same up to rounding"
    NUMBERS = "different numbers"
    COST = "memory or speed"


@dataclass(frozen=True)
class Context:
    """What a rule may see besides its own values: the release and the world size (in ranks, None if unknown)."""

    version: str
    world_size: int | None = None

    @cached_property
    def release(self) -> Version:
        """The release as a comparable value."""
        return Version(self.version)

    def since(self, version: str) -> bool:
        """Whether this release is `version` or a later one."""
        return self.release >= Version(version)


Side = Callable[[Group, Context], Group]


def _nothing(values: Group, context: Context) -> Group:
    return {}


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A group of `theirs` paths <-> a group of `ours` paths.

    `read` turns effective values of theirs into ours, `write` ours into the values to write; each sees its own group and
    what `sees` names (paths of either side that other rules claim), leaves out what it has nothing to say about, and may
    raise `BridgeError`.
    `effect` is what losing the group does to the run (a function of its values where that depends), `lossy` what may be
    lost between the two sides, `blurs` tells for values of theirs whether reading them already loses it, `note` is a remark
    for people, `source` the place in the stack's source that the row stands on. `carries` says which of ours a path of theirs
    stands for, where that is not the whole group.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    read: Side
    write: Side
    effect: Effect | Callable[[Group], Effect] = Effect.NUMBERS
    lossy: str = ""
    note: str = ""
    source: str = ""
    sees: tuple[str, ...] = ()
    blurs: Callable[[Group], bool] | None = None
    carries: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def carried(self, theirs: str) -> tuple[str, ...]:
        """Plan paths that a path of theirs stands for."""
        return self.carries.get(theirs, self.ours)

    @cache  # noqa: B019 - tables live as long as the program
    def carriers(self, ours: str) -> tuple[str, ...]:
        """Paths that stand for a Plan path: of this group, and seen ones that are said to."""
        seen = (path for path in self.sees if path in self.carries)
        return tuple(path for path in (*self.theirs, *seen) if ours in self.carried(path))

    def effect_of(self, values: Group) -> Effect:
        """What losing the group does to a run with these values of theirs, whatever else stands among them."""
        return self.effect if isinstance(self.effect, Effect) else self.effect(self.seen(self.theirs, values))

    def seen(self, claimed: tuple[str, ...], values: Group) -> dict[str, Any]:
        """Of `values`, what a side of this rule sees: what it claims, and what the rule may see besides."""
        return {path: values[path] for path in (*claimed, *self.sees) if path in values}


def _paths(paths: str | tuple[str, ...]) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else paths


def rename(theirs: str, ours: str, *, effect: Effect = Effect.NUMBERS, note: str = "", source: str = "") -> Rule:
    """The same value under two names."""

    def read(values: Group, context: Context) -> Group:
        return {ours: values[theirs]} if values.get(theirs) is not None else {}

    def write(values: Group, context: Context) -> Group:
        return {theirs: values[ours]} if values.get(ours) is not None else {}

    return Rule((theirs,), (ours,), read, write, effect, note=note, source=source)


def convert(
    theirs: str | tuple[str, ...],
    ours: str | tuple[str, ...],
    read: Side,
    write: Side,
    *,
    lossy: str = "",
    effect: Effect | Callable[[Group], Effect] = Effect.NUMBERS,
    note: str = "",
    source: str = "",
    sees: tuple[str, ...] = (),
    blurs: Callable[[Group], bool] | None = None,
    carries: Mapping[str, str | tuple[str, ...]] | None = None,
) -> Rule:
    """Two groups and the functions between them; `lossy` says what does not survive."""
    carried = {path: _paths(stands_for) for path, stands_for in (carries or {}).items()}
    return Rule(_paths(theirs), _paths(ours), read, write, effect, lossy, note, source, sees, blurs, carried)


def always(ours: str, value: Any, note: str, effect: Effect = Effect.NUMBERS) -> Rule:
    """A Plan field on which the stack offers no choice: it always does `value`."""
    return Rule((), (ours,), lambda values, context: {ours: value}, _nothing, effect, note=note)


def only_theirs(*theirs: str, note: str, effect: Effect = Effect.NONE, source: str = "") -> Rule:
    """Fields of the stack that no Plan field stands for, and why."""
    return Rule(theirs, (), _nothing, _nothing, effect, note=note, source=source)


def only_ours(*ours: str, note: str, effect: Effect = Effect.NUMBERS) -> Rule:
    """Plan fields that the stack cannot express, and why."""
    return Rule((), ours, _nothing, _nothing, effect, note=note)


def lacks(section: str, note: str, effect: Effect = Effect.NUMBERS) -> Rule:
    """A whole section of Plan that the stack does not have, and why."""
    inside = tuple(path for path in paths() if path == section or path.startswith(section + "."))
    return Rule((), inside, _nothing, _nothing, effect, note=note)
