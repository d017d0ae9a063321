"""Facts about each DeepSpeed release: keys, defaults, bounds, refusals, and the optimizers and schedulers it builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, ClassVar

from bridge.config import tuples
from bridge.moves import Move, renamed
from bridge.releases import Release as AnyRelease
from bridge.releases import Releases, table

History = tuple[tuple[str, Any], ...]
"""Pairs of a release and a value, oldest release first. The value applies from this release on."""


_KEYS = table(__name__, "keys.json")

RELEASES = Releases("deepspeed", tuple(_KEYS["releases"]))
KNOWN: tuple[str, ...] = RELEASES.known
"""All releases in the tables, oldest first."""


@dataclass(frozen=True, slots=True)
class Key:
    """History of one key. Releases from `since` up to, but not including, `until` read the key, and
    releases from `rejected` on refuse it. The key `instead` replaces it.

    `default` is the default by release; without one the key is unset. `bound` has, by release,
    limits such as `>0` that the schema does not have.
    """

    key: str
    since: str = ""
    until: str = ""
    rejected: str = ""
    default: History = ()
    bound: History = ()
    instead: str = ""

    def known(self, version: str) -> bool:
        """Return whether release `version` reads the key."""
        return RELEASES.within(version, self.since, self.until)

    def at(self, version: str) -> Any:
        """Return the default in release `version`; None if the key is unset by default."""
        return next(
            (value for start, value in reversed(self.default) if RELEASES.since(version, start)),
            None,
        )

    def bounds(self, version: str) -> tuple[str, ...]:
        """Return the limits that apply in release `version`."""
        return tuple(bound for start, bound in self.bound if RELEASES.since(version, start))


@dataclass(frozen=True, slots=True)
class Part:
    """History of one section. Releases from `refuses` on refuse unknown keys in the section. If
    `optional` is true, the section is off unless the config has it.
    """

    section: str
    refuses: str | None = None
    optional: bool = False
    instead: str = ""


@dataclass(frozen=True, slots=True)
class Type:
    """An optimizer or a scheduler with its arguments and their defaults.

    If `args` is None, any argument is allowed. `form` names the implementation (fused, torch, cpu),
    because one type can have several. Arguments in `ignored` have no effect.
    """

    type: str
    form: str = ""
    since: str = ""
    until: str = ""
    args: Mapping[str, Any] | None = None
    required: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def _frozen(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tuples(value) if name in ("default", "bound", "required", "ignored") else value
        for name, value in row.items()
    }


def _key(row: Mapping[str, Any]) -> Key:
    # A key that a release rejects is no longer read, and has no `until` of its own.
    return Key(**{"until": row.get("rejected", ""), **_frozen(row)})


KEYS: Mapping[str, Key] = MappingProxyType({row["key"]: _key(row) for row in _KEYS["keys"]})
PARTS: Mapping[str, Part] = MappingProxyType(
    {row["section"]: Part(**row) for row in _KEYS["sections"]}
)
ALIASES: Mapping[str, str] = MappingProxyType(
    {row["alias"]: row["key"] for row in _KEYS["aliases"]}
)
"""Alternative names of keys that DeepSpeed accepts, each with the canonical path."""


def key(path: str) -> Key | None:
    """Return the history of the key at `path`, or None if no release has it."""
    return KEYS.get(path)


@dataclass(frozen=True)
class Release(AnyRelease):
    """One release: the keys that it reads, and its defaults."""

    among: ClassVar[Releases] = RELEASES

    @cached_property
    def keys(self) -> frozenset[str]:
        """Paths that it reads."""
        return self.names(KEYS)

    @cached_property
    def defaults(self) -> MappingProxyType[str, Any]:
        """Return the defaults of keys outside optional sections."""
        always = {
            path: value for path, value in self._filled.items() if optional_section(path) is None
        }
        # A missing offload section means the device "none", and many checks ask for the device.
        devices = {path: value for path, value in self._filled.items() if path.endswith(".device")}
        return MappingProxyType({**always, **devices})

    @cached_property
    def _filled(self) -> Mapping[str, Any]:
        filled = {row.key: row.at(self.version) for row in self.having(KEYS.values())}
        return {path: value for path, value in filled.items() if value is not None}

    def section_defaults(self, section: str) -> Mapping[str, Any]:
        """Return the defaults within an optional section, which apply if the config has the
        section.
        """
        return {
            path: value for path, value in self._filled.items() if path.startswith(section + ".")
        }

    @cached_property
    def bounds(self) -> Mapping[str, tuple[str, ...]]:
        """Return the limits by path that this release has in addition to the schema's limits."""
        found = {path: KEYS[path].bounds(self.version) for path in KEYS}
        return {path: bounds for path, bounds in found.items() if bounds}

    @cached_property
    def rejected(self) -> frozenset[str]:
        """Return the paths that the release refuses, with any value."""
        return frozenset(
            path for path, row in KEYS.items() if row.rejected and self.since(row.rejected)
        )

    def refuses(self, section: str) -> bool:
        """Return whether the release refuses an unknown key in `section`. If not, it ignores the
        key.
        """
        part = PARTS.get(section)
        return part is not None and part.refuses is not None and self.since(part.refuses)

    def forms(self, kind: str, name: str) -> tuple[Type, ...]:
        """Return the implementations of the optimizer or scheduler `name` in this release; empty if
        the release has none.
        """
        return self.having(_named(kind, name))

    @cached_property
    def types(self) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the release's optimizers (`kind` is `optimizers`) or schedulers
        (`schedulers`).
        """
        return {
            # A type with several implementations has a row for each.
            kind: tuple(dict.fromkeys(row.type for row in self.having(rows)))
            for kind, rows in _types().items()
        }


@cache
def moves() -> tuple[Move, ...]:
    """Return the moves of renamed keys, oldest first."""
    # A key that a release rejects is no rename: the release says itself what to do.
    gone = [row for row in KEYS.values() if row.instead in KEYS and row.until and not row.rejected]
    return tuple(
        renamed(row.key, row.instead, row.until)
        for row in sorted(gone, key=lambda row: RELEASES.place(row.until))
    )


def optional_section(path: str) -> str | None:
    """Return the path of the optional section that contains `path`, or None if no optional section
    does.
    """
    return _optional().get(path)


@cache
def _optional() -> Mapping[str, str]:
    sections = [part.section for part in PARTS.values() if part.optional]
    return {
        path: section for path in KEYS for section in sections if path.startswith(section + ".")
    }


@cache
def _types() -> Mapping[str, tuple[Type, ...]]:
    return {
        kind: tuple(Type(**_frozen(row)) for row in rows)
        for kind, rows in table(__name__, "types.json").items()
    }


def all_types(kind: str) -> tuple[Type, ...]:
    """Return all optimizers (`kind` is `optimizers`) or all schedulers (`schedulers`) of all
    releases.
    """
    return _types()[kind]


@cache
def _named(kind: str, name: str) -> tuple[Type, ...]:
    """Return the rows among `types` for `name`. The case of the name matters, except for
    DeepSpeed's own optimizers (engine.py, `_configure_basic_optimizer`).
    """
    rows = _types()[kind]
    lower = tuple(
        row
        for row in rows
        if kind == "optimizers" and row.type.islower() and row.type == name.lower()
    )
    return lower or tuple(row for row in rows if row.type == name)


@cache
def release(version: str) -> Release:
    """Return the facts of release `version`. Raises `VersionError` for an unknown release."""
    return Release(version)


def defaults(version: str) -> Mapping[str, Any]:
    """Return the defaults of release `version`, by path."""
    return release(version).defaults


def known(version: str) -> frozenset[str]:
    """Return the paths that release `version` reads."""
    return release(version).keys
