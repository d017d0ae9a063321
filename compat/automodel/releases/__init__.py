"""Facts about each AutoModel release: settings, options of each strategy, and defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, ClassVar

from bridge.stack.releases import Release as AnyRelease, Releases, table

DATES: Mapping[str, str] = MappingProxyType(table(__name__, "known.json"))
"""Every supported release with its date, oldest first. 0.5.0.post20260822 is the main branch on
that date.
"""
RELEASES = Releases("automodel", tuple(DATES))
KNOWN: tuple[str, ...] = RELEASES.known
NEW_LAYOUT = "0.3.0"
"""Release in which `autopipeline` and the manager classes became one `distributed` section."""
_DECIDED: Mapping[str, Any] = table(__name__, "keys.json")
"""Facts that no class of AutoModel shows: the releases of settings that belong to no class, and
defaults that recipes fill in.
"""
_SIZES = (
    "dp_size",
    "dp_replicate_size",
    "tp_size",
    "pp_size",
    "cp_size",
    "ep_size",
    "activation_checkpointing",
)
"""Settings of the `distributed` section that are no options of a strategy."""


@dataclass(frozen=True, slots=True)
class Row:
    """One argument of a class of AutoModel. The argument exists from release `since` until before
    release `until`.
    """

    section: str
    name: str
    strategy: str = ""
    type: str = ""
    default: Any = None
    since: str = ""
    until: str = ""

    @property
    def path(self) -> str:
        """The setting."""
        return f"{self.section}.{self.name}"


@cache
def _rows() -> Mapping[str, tuple[Row, ...]]:
    """Return the rows of each setting, by path."""
    rows = [Row(**row) for row in table(__name__, "classes.json")]
    return {
        path: tuple(row for row in rows if row.path == path)
        for path in dict.fromkeys(row.path for row in rows)
    }


@dataclass(frozen=True)
class Release(AnyRelease):
    """One release."""

    among: ClassVar[Releases] = RELEASES

    @property
    def nests_pipeline(self) -> bool:
        """Whether the pipeline is a part of the `distributed` section."""
        return self.since(NEW_LAYOUT)

    @cached_property
    def _rows(self) -> tuple[Row, ...]:
        return self.having(row for rows in _rows().values() for row in rows)

    def reads(self, path: str) -> bool:
        """Whether the release has the setting at `path`."""
        # A setting may go and come back, so the rows decide.
        # Settings without a class have one window.
        rows = _rows().get(path)
        return bool(self.having(rows)) if rows else self.within(since(path), until(path))

    @cached_property
    def strategies(self) -> Mapping[str, frozenset[str]]:
        """Options of each strategy."""
        options_by_strategy = {row.strategy: set[str]() for row in self._rows if row.strategy}
        for row in self._rows:
            if row.strategy and row.name not in _SIZES:
                options_by_strategy[row.strategy].add(row.name.partition(".")[0])
        return {name: frozenset(options) for name, options in options_by_strategy.items()}

    @cached_property
    def policy(self) -> Mapping[str, Any]:
        """Number formats that FSDP2 uses if there is no mixed-precision policy."""
        return {
            row.path: row.default
            for row in self._rows
            if row.path.startswith("distributed.mp_policy.")
        }

    def defaults(self, part: str) -> Mapping[str, Any]:
        """Return defaults by path. `part` is "pipeline" for defaults of the pipeline, the name of a
        strategy for defaults of its options, and "" for defaults of every recipe.
        """
        return dict(self._defaults_of_part(part))

    def _defaults_of_part(self, part: str) -> Iterator[tuple[str, Any]]:
        for path in _DECIDED["filled"][part]:
            rows = self.having(_rows().get(path, ()))
            row = next((row for row in rows if row.strategy in ("", part)), None)
            value = row.default if row else None
            # A class whose default is None leaves the value to the recipe's code.
            yield path, _DECIDED["usual"].get(path) if value is None else value


def since(path: str) -> str:
    """Return the first release that has the setting at `path`."""
    rows = _rows().get(path)
    if not rows:
        return str(_DECIDED["since"].get(path, KNOWN[0]))
    return min((row.since or KNOWN[0] for row in rows), key=RELEASES.place)


def until(path: str) -> str:
    """Return the first release without the setting at `path`; empty if the newest release has the
    setting.
    """
    rows = _rows().get(path)
    if not rows:
        return str(_DECIDED["until"].get(path, ""))
    return (
        ""
        if any(not row.until for row in rows)
        else max((row.until for row in rows), key=RELEASES.place)
    )


def instead(path: str) -> str:
    """Return the setting that replaces the setting at `path` in newer releases; empty if there is
    none.
    """
    return str(_DECIDED["instead"].get(path, ""))


@cache
def release(version: str) -> Release:
    """Return the release `version`. Raises `VersionError` if the release is not supported."""
    return Release(version)
