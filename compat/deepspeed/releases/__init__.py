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
"""Values by the first release that had them, oldest release first."""


_KEYS = table(__name__, "keys.json")

RELEASES = Releases("deepspeed", tuple(_KEYS["releases"]))
KNOWN: tuple[str, ...] = RELEASES.known
"""Every release covered, oldest first."""


@dataclass(frozen=True, slots=True)
class Key:
    """History of one key: read in the releases [since, until), an error from `rejected` on.

    The key `instead` replaces it. In a release without a `default` the key is unset by default.
    `bound` has, by release, limits that the schema does not have, such as `>0`.
    """

    key: str
    since: str = ""
    until: str = ""
    rejected: str = ""
    default: History = ()
    bound: History = ()
    instead: str = ""

    def known(self, version: str) -> bool:
        """Whether release `version` reads the key."""
        return RELEASES.within(version, self.since, self.until)

    def at(self, version: str) -> Any:
        """The default at release `version`; None if it is unset by default."""
        return next(
            (value for start, value in reversed(self.default) if RELEASES.since(version, start)),
            None,
        )

    def bounds(self, version: str) -> tuple[str, ...]:
        """Limits that apply at release `version`."""
        return tuple(bound for start, bound in self.bound if RELEASES.since(version, start))


@dataclass(frozen=True, slots=True)
class Part:
    """History of one section. Unknown keys in it are an error from release `refuses` on. An
    `optional` section is off unless it is given.
    """

    section: str
    refuses: str | None = None
    optional: bool = False
    instead: str = ""


@dataclass(frozen=True, slots=True)
class Type:
    """An optimizer or a scheduler with its arguments and their defaults. If `args` is None, any
    argument is allowed.

    `form` names the implementation (fused, torch, cpu), since one name can have several. `ignored`
    arguments have no effect.
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
"""Second spellings that DeepSpeed accepts, each with the canonical path."""


def key(path: str) -> Key | None:
    """History of the key at `path`, or None if no release covered has it."""
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
        """Defaults of keys that are not set, without those of optional sections."""
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
        """Defaults within an optional section that is present."""
        return {
            path: value for path, value in self._filled.items() if path.startswith(section + ".")
        }

    @cached_property
    def bounds(self) -> Mapping[str, tuple[str, ...]]:
        """Limits beyond the schema's, by path."""
        found = {path: KEYS[path].bounds(self.version) for path in KEYS}
        return {path: bounds for path, bounds in found.items() if bounds}

    @cached_property
    def rejected(self) -> frozenset[str]:
        """Paths that the release refuses by name, whatever their value."""
        return frozenset(
            path for path, row in KEYS.items() if row.rejected and self.since(row.rejected)
        )

    def refuses(self, section: str) -> bool:
        """Whether the release refuses an unknown key in `section`; otherwise it ignores the key."""
        part = PARTS.get(section)
        return part is not None and part.refuses is not None and self.since(part.refuses)

    def forms(self, kind: str, name: str) -> tuple[Type, ...]:
        """Implementations of `name` among the release's `optimizers` or `schedulers`; empty if
        there is none.
        """
        return self.having(_named(kind, name))

    @cached_property
    def types(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the release's `optimizers` and `schedulers`."""
        return {
            # A type with several implementations has a row for each.
            kind: tuple(dict.fromkeys(row.type for row in self.having(rows)))
            for kind, rows in _types().items()
        }


@cache
def moves() -> tuple[Move, ...]:
    """Renamed keys, oldest first."""
    # A key that a release rejects is no rename: the release says itself what to do.
    gone = [row for row in KEYS.values() if row.instead in KEYS and row.until and not row.rejected]
    return tuple(
        renamed(row.key, row.instead, row.until)
        for row in sorted(gone, key=lambda row: RELEASES.place(row.until))
    )


def optional_section(path: str) -> str | None:
    """The optional section that `path` lies in, or None."""
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
    """Every row of `optimizers` or `schedulers`, of any release."""
    return _types()[kind]


@cache
def _named(kind: str, name: str) -> tuple[Type, ...]:
    """Rows for `name`, which has to match exactly, except for DeepSpeed's own optimizers, which
    match in any case (engine.py, `_configure_basic_optimizer`).
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
    """The release `version`; `VersionError` if it is not covered."""
    return Release(version)


def defaults(version: str) -> Mapping[str, Any]:
    """Defaults of release `version`, by path."""
    return release(version).defaults


def known(version: str) -> frozenset[str]:
    """Paths that release `version` reads."""
    return release(version).keys
