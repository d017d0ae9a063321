"""Releases of a stack, in order, and windows of releases. A window begins with `since`, ends before
`until`, and has no bound on a side that is empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import Any, ClassVar, Protocol, TypeVar

from packaging.version import InvalidVersion, Version

from bridge import limits
from bridge.errors import VersionError, nearest


class Windowed(Protocol):
    """A row of a table that applies to the releases in [since, until). An empty `since` or `until`
    is no bound.
    """

    @property
    def since(self) -> str:
        """The first release to which the row applies."""

    @property
    def until(self) -> str:
        """The first release to which the row no longer applies."""


Row = TypeVar("Row", bound=Windowed)


def table(package: str, file: str) -> Any:
    """The facts in a JSON file of `package`."""
    return json.loads(files(package).joinpath(file).read_text("utf-8"))


@dataclass(frozen=True)
class Releases:
    """The known releases of `stack`, oldest first."""

    stack: str
    known: tuple[str, ...]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {version: place for place, version in enumerate(self.known)}

    def place(self, version: str) -> int:
        """Return the index of `version` among the known releases. Raises `VersionError`, with the
        nearest known releases, if it is not known.
        """
        if version not in self._places:
            raise VersionError(f"{self.stack}: {unknown_release(version, self.known)}")
        return self._places[version]

    def since(self, version: str, start: str) -> bool:
        """Return whether `version` is `start` or a later release. The result is true for an empty
        `start`.
        """
        return not start or self.place(version) >= self.place(start)

    def within(self, version: str, since: str = "", until: str = "") -> bool:
        """Return whether `version` is in [since, until). An empty `since` or `until` is no bound."""
        return self.since(version, since) and not (until and self.since(version, until))

    def having(self, version: str, rows: Iterable[Row]) -> tuple[Row, ...]:
        """Return the rows that apply to `version`, in their order."""
        return tuple(row for row in rows if self.within(version, row.since, row.until))

    def near(self, version: str) -> str:
        """The newest known release that is not after `version`, or the oldest known release if all
        are after `version`.

        Raises `VersionError` if `version` is not a version.
        """
        if version in self._places:
            return version
        try:
            target = Version(version)
        except InvalidVersion:
            raise VersionError(f"{self.stack}: {unknown_release(version, self.known)}") from None
        return next(
            (name for name in reversed(self.known) if Version(name) <= target), self.known[0]
        )

    @cached_property
    def newest(self) -> str:
        """The newest release that is not a prerelease. If there are only prereleases, this is the
        newest prerelease.
        """
        return next(
            (name for name in reversed(self.known) if not Version(name).is_prerelease),
            self.known[-1],
        )

    def last(self, until: str) -> str:
        """Return the last release before `until`, or the newest known release if `until` is empty."""
        return self.known[self.place(until) - 1] if until else self.known[-1]


@dataclass(frozen=True)
class Release:
    """One of the known releases of a stack. Raises `VersionError` if the release is not known."""

    version: str
    among: ClassVar[Releases]

    def __post_init__(self) -> None:
        self.among.place(self.version)

    def since(self, start: str) -> bool:
        """Whether this release is `start` or a later one."""
        return self.among.since(self.version, start)

    def within(self, since: str = "", until: str = "") -> bool:
        """Return whether this release is in [since, until). An empty `since` or `until` is no
        bound.
        """
        return self.among.within(self.version, since, until)

    def having(self, rows: Iterable[Row]) -> tuple[Row, ...]:
        """Return the rows that apply to this release, in their order."""
        return self.among.having(self.version, rows)

    def names(self, rows: Mapping[str, Windowed]) -> frozenset[str]:
        """Return the names of the rows that apply to this release."""
        return frozenset(name for name, row in rows.items() if self.within(row.since, row.until))


def unknown_release(version: str, releases: Sequence[str]) -> str:
    """Return the message for a release that is not in `releases`, with the nearest of these."""
    name = version if len(version) <= limits.NAME else f"{version[: limits.NAME]}…"
    return f"unknown release {name}; {_neighbours(name, releases)}"


def _neighbours(version: str, releases: Sequence[str]) -> str:
    try:
        target = Version(version)
    except InvalidVersion:
        return f"known are {releases[0]} to {releases[-1]}{nearest(version, releases)}"
    older = [name for name in releases if Version(name) < target][-1:]
    near = older + [name for name in releases if Version(name) >= target][:1]
    return f"the nearest known {'are' if len(near) > 1 else 'is'} {' and '.join(near)}"
