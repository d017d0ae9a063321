"""Checks: what a stack refuses, stops at, ignores or gets wrong, one row for each statement of its source."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from bridge.findings import Finding, Origin
from bridge.releases import Releases
from bridge.rules import Context, Effect

Condition = Callable[[Any], object]
WORDS = 5
"""Words of a message that its rule is named by."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a check looks at: effective values by path, what was given, the release and the world size in ranks."""

    values: Mapping[str, Any]
    given: Mapping[str, Any]
    context: Context

    def __getitem__(self, path: str) -> Any:
        return self.values.get(path)

    def wrote(self, *paths: str) -> bool:
        """Whether one of `paths`, or a key below it, was given."""
        return any(key == path or key.startswith(path + ".") for path in paths for key in self.given)


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """One statement of a stack, in the releases [since, until).

    `path` is the setting that it is about, `when` tells from what it sees whether it holds, `message`, a format string over
    the values, what is wrong and what to do, `effect` what that does to the run, and `place` where the stack's source says so.
    It says nothing without the values that it `needs`. Behind one that is `last` nothing can be told any more.
    """

    path: str
    when: Condition
    message: str
    effect: Effect
    place: str
    since: str = ""
    until: str = ""
    needs: tuple[str, ...] = ()
    last: bool = False
    name: str = ""

    @property
    def rule(self) -> str:
        """The id of the rule, which never changes: a row whose words change keeps its `name`."""
        words = re.findall(r"[a-z0-9_]+", re.sub(r"\{.*?\}", "", self.message).lower())
        return f"{self.path}/{self.name or '-'.join(words[:WORDS])}"

    @property
    def window(self) -> str:
        """The releases that it holds for, in words; empty: all."""
        ends = (("since", self.since), ("before", self.until))
        return ", ".join(f"{word} {end}" for word, end in ends if end)

    def says(self, values: Mapping[str, Any]) -> str:
        """The message over the values; what is not there shows as None."""
        return self.message.format_map(_Shown(values)) if "{" in self.message else self.message


@dataclass(frozen=True, slots=True)
class Term:
    """A condition on one setting, in words."""

    path: str
    holds: Callable[[Any], object]
    words: str

    def __call__(self, seen: Any) -> bool:
        return bool(self.holds(seen[self.path]))


def on(path: str) -> Term:
    """It is true, or has any value that counts for true."""
    return Term(path, bool, path)


def set_(path: str) -> Term:
    """It has a value."""
    return Term(path, lambda value: value is not None, f"{path} {{{path}}}")


def equals(path: str, wanted: Any) -> Term:
    """It has that value."""
    return Term(path, lambda value: value == wanted, f"{path} {wanted}")


def above(path: str, bound: float) -> Term:
    """It is above a number."""
    return Term(path, lambda value: value > bound, f"{path} {{{path}}}")


def _term(term: Term | str) -> Term:
    return on(term) if isinstance(term, str) else term


def excludes(first: Term | str, other: Term | str, place: str, advice: str = "keep one of them", **window: Any) -> Check:
    """`first` does not go with `other`."""
    one, beside = _term(first), _term(other)
    found = one.words.removeprefix(one.path)
    message = f"found{found} with {beside.words}; {advice}"
    return Check(one.path, lambda seen: one(seen) and beside(seen), message, Effect.STOPS, place, **window)


def needs(first: Term | str, other: Term | str, place: str, advice: str, **window: Any) -> Check:
    """`first` does not go without `other`."""
    one, beside = _term(first), _term(other)
    found = one.words.removeprefix(one.path)
    without = beside.path if beside.holds is bool or "{" in beside.words else beside.words
    message = f"found{found} without {without}; {advice}"
    return Check(one.path, lambda seen: one(seen) and not beside(seen), message, Effect.STOPS, place, **window)


def multiple_of(path: str, divisor: str, place: str, **window: Any) -> Check:
    """`path` is a multiple of `divisor`, where both are known."""
    message = f"found {{{path}}}; expected a multiple of {divisor} ({{{divisor}}})"
    return Check(
        path, lambda seen: seen[path] % seen[divisor] != 0, message, Effect.STOPS, place, needs=(path, divisor), **window
    )


def positive(path: str, place: str, **window: Any) -> Check:
    """`path` is above 0, where it is known."""
    message = f"found {{{path}}}; expected a positive number"
    return Check(path, lambda seen: seen[path] <= 0, message, Effect.STOPS, place, needs=(path,), **window)


def one_of(path: str, allowed: tuple[Any, ...], place: str, **window: Any) -> Check:
    """`path` has one of the values that are allowed."""
    words = [str(value) for value in allowed if value is not None]
    listed = " or ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]
    return Check(
        path, lambda seen: seen[path] not in allowed, f"found {{{path}}}; expected {listed}", Effect.STOPS, place, **window
    )


class _Shown(dict[str, Any]):
    def __missing__(self, name: str) -> None:
        return None


class Checks:
    """The checks of one stack that are made at one time, in the order of its source."""

    def __init__(self, releases: Releases, *rows: Check) -> None:
        self.releases, self.rows = releases, rows

    def __iter__(self) -> Iterator[Check]:
        return iter(self.rows)

    @cache  # noqa: B019 - tables live as long as the program
    def at(self, version: str) -> tuple[Check, ...]:
        """Those that a release makes."""
        return tuple(row for row in self.rows if self.releases.within(version, row.since, row.until))

    def holding(self, seen: Seen) -> Iterator[Check]:
        """Those that hold for what is seen."""
        rows = (row for row in self.at(seen.context.version) if not row.needs or None not in map(seen.__getitem__, row.needs))
        return (row for row in rows if row.when(seen))

    def refused(self, seen: Seen) -> Iterator[str]:
        """What is refused, a line for each row that holds."""
        return (f"{row.path}: {row.says(seen.values)}" for row in self.holding(seen))

    def remarks(self, seen: Seen, origins: Mapping[str, Origin]) -> Iterator[Finding]:
        """A finding for each row that holds."""
        for row in self.holding(seen):
            yield remark(row.path, row.says(seen.values), row.effect, seen, origins, row.rule)


Remark = tuple[str, str, Effect]
"""A path, what to say of it, and its effect."""


def told(found: Iterable[Remark], seen: Seen, origins: Mapping[str, Origin]) -> Iterator[Finding]:
    """A finding for each remark that no row stands for, because it is about any number of settings."""
    for path, message, effect in found:
        yield remark(path, message, effect, seen, origins)


def remark(path: str, message: str, effect: Effect, seen: Seen, origins: Mapping[str, Origin], rule: str = "") -> Finding:
    """A finding on `path`."""
    return Finding(path, message, effect, seen.wrote(path), origin=origins.get(path), rule=rule)
