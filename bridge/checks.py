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

    def says(self, values: Mapping[str, Any]) -> str:
        """The message over the values; what is not there shows as None."""
        return self.message.format_map(_Shown(values)) if "{" in self.message else self.message


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
        return (row for row in self.at(seen.context.version) if row.when(seen))

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
