"""Facts about each DeepSpeed release: keys, defaults, bounds, refusals, and the optimizers and schedulers it builds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, ClassVar

from bridge.plan.section import fields, tuples
from bridge.stack.releases import Release as AnyRelease, Releases, table
from bridge.stack.setting_renames import Move, rename_setting
from compat.deepspeed.schema import DeepSpeed

DATES: Mapping[str, str] = MappingProxyType(table(__name__, "known.json"))
"""The date of each release's public tag, oldest release first. A release without a public tag has
an empty date.
"""
RELEASES = Releases("deepspeed", tuple(DATES))
KNOWN: tuple[str, ...] = RELEASES.known
"""All releases in the tables, oldest first."""
DECIDED: Mapping[str, Any] = MappingProxyType(table(__name__, "decided.json"))
"""Facts that `harvest` cannot read from a release's parser, decided by hand: keys that only the
engine reads, arguments that the engine reads itself or ignores, and the replacement of a removed
key or section.
"""
STATES = ("required", "ignored")
FORMS = ("fused", "torch", "cpu", "")
"""Implementations of optimizers, in the order of the engine's preference."""


def _rows(file: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of the file `file` in this folder, and then the rows that were decided by
    hand.
    """
    yield from table(__name__, f"{file}.json")
    yield from DECIDED.get(file, ())


@dataclass(frozen=True, slots=True)
class Period:
    """A span of releases, with a key's default in these releases and with limits such as `>0` that
    the schema does not have. If `default` is None, the key is unset.
    """

    since: str = ""
    until: str = ""
    default: Any = None
    bound: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Key:
    """History of one key: `periods` are the spans of releases that read the key, oldest first.
    Releases from `rejected` on refuse the key. `instead` names the key that replaces this one.
    """

    key: str
    periods: tuple[Period, ...]
    rejected: str = ""
    instead: str = ""

    @property
    def since(self) -> str:
        """The first release that reads the key; empty if the oldest known release reads it."""
        return self.periods[0].since

    @property
    def until(self) -> str:
        """The first release that no longer reads the key; empty if the newest release reads it."""
        return self.periods[-1].until

    def is_read_by(self, version: str) -> bool:
        """Return whether release `version` reads the key."""
        return bool(RELEASES.having(version, self.periods))

    def at(self, version: str) -> Any:
        """Return the default in release `version`; None if the key is unset."""
        return next((period.default for period in RELEASES.having(version, self.periods)), None)

    def bounds(self, version: str) -> tuple[str, ...]:
        """Return the limits on the key in release `version` that the schema does not have."""
        return next((period.bound for period in RELEASES.having(version, self.periods)), ())


@dataclass(frozen=True, slots=True)
class SectionPeriod:
    """One section in the releases from `since` to before `until`. If `refuses` is true, these
    releases refuse unknown keys in the section. If `optional` is true, the section is off unless
    the config contains it.
    """

    section: str
    refuses: bool = False
    optional: bool = False
    instead: str = ""
    since: str = ""
    until: str = ""


@dataclass(frozen=True, slots=True)
class Type:
    """An optimizer or a scheduler: `args` are its optional arguments with their defaults. If `args`
    is None, any argument is allowed. `form` names the implementation (fused, torch, cpu), because
    one type can have several. Arguments in `ignored` have no effect.
    """

    type: str
    form: str = ""
    args: Mapping[str, Any] | None = None
    required: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def _key(path: str, rows: Sequence[Mapping[str, Any]]) -> Key:
    periods = tuple(
        Period(*_window(row), tuples(row.get("default")), tuple(row.get("bound", ())))
        for row in sorted(rows, key=lambda row: _place(row.get("since", "")))
        if not row.get("refused")
    )
    refused_since = next((row["since"] for row in rows if row.get("refused")), "")
    return Key(path, periods, refused_since, DECIDED["instead"].get(path, ""))


def _place(since: str) -> int:
    return RELEASES.place(since) if since else -1


def _window(row: Mapping[str, Any]) -> tuple[str, str]:
    return row.get("since", ""), row.get("until", "")


def _keys() -> Iterator[tuple[str, Key]]:
    """Yield each key with its history. Keys have the order of the schema."""
    rows_by_key: dict[str, list[Mapping[str, Any]]] = {path: [] for path in fields(DeepSpeed)}
    for row in _rows("keys"):
        rows_by_key.setdefault(row["key"], []).append(row)
    yield from ((path, _key(path, rows)) for path, rows in rows_by_key.items() if rows)


KEYS: Mapping[str, Key] = MappingProxyType(dict(_keys()))
_PARTS = tuple(
    SectionPeriod(**row, instead=DECIDED["instead"].get(row["section"], ""))
    for row in _rows("sections")
)
PARTS: Mapping[str, SectionPeriod] = MappingProxyType({part.section: part for part in _PARTS})
ALIASES: Mapping[str, str] = MappingProxyType(
    {row["alias"]: row["key"] for row in _rows("aliases")}
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
            path: value
            for path, value in self._defaults_by_path.items()
            if optional_section(path) is None
        }
        # A missing offload section means the device "none", and many checks ask for the device.
        devices = {
            path: value
            for path, value in self._defaults_by_path.items()
            if path.endswith(".device")
        }
        return MappingProxyType({**always, **devices})

    @cached_property
    def _defaults_by_path(self) -> Mapping[str, Any]:
        defaults = {row.key: row.at(self.version) for row in self.having(KEYS.values())}
        return {path: value for path, value in defaults.items() if value is not None}

    def section_defaults(self, section: str) -> Mapping[str, Any]:
        """Return the defaults of the keys in an optional section. These defaults apply only if the
        config contains the section.
        """
        return {
            path: value
            for path, value in self._defaults_by_path.items()
            if path.startswith(section + ".")
        }

    @cached_property
    def bounds(self) -> Mapping[str, tuple[str, ...]]:
        """Return the limits of this release that the schema does not have, by path."""
        limits = {path: KEYS[path].bounds(self.version) for path in KEYS}
        return {path: bounds for path, bounds in limits.items() if bounds}

    @cached_property
    def keys_to_refuse(self) -> frozenset[str]:
        """Return the paths of keys that the release refuses whatever their value is."""
        return frozenset(
            path for path, row in KEYS.items() if row.rejected and self.since(row.rejected)
        )

    def refuses(self, section: str) -> bool:
        """Return whether the release refuses unknown keys in `section`. Otherwise it ignores them."""
        return any(part.section == section and part.refuses for part in self.having(_PARTS))

    def forms(self, kind: str, name: str) -> tuple[Type, ...]:
        """Return the implementations of the optimizer or scheduler `name` in this release; empty if
        the release has none. The case of the name matters, except for DeepSpeed's own optimizers
        (engine.py, `_configure_basic_optimizer`).
        """
        own = kind == "optimizers" and name.lower() in self._lower_case_types
        own_name = name.lower() if own else name
        return tuple(row for row in self._types.get(kind, ()) if row.type == own_name)

    def arguments(self, kind: str, name: str) -> frozenset[str] | None:
        """Return the arguments that at least one implementation of the optimizer or scheduler
        `name` takes. Return None if the release's tables do not list the arguments, as for a type
        that the user wrote.
        """
        forms = self.forms(kind, name)
        argument_lists = [form.args for form in forms if form.args is not None]
        if not forms or len(argument_lists) < len(forms):
            return None
        more = (argument for form in forms for argument in (*form.required, *form.ignored))
        return frozenset(
            ("max_grad_norm", *more, *(argument for args in argument_lists for argument in args))
        )

    @cached_property
    def _lower_case_types(self) -> frozenset[str]:
        return frozenset(row.type for row in self._types["optimizers"] if row.type.islower())

    @cached_property
    def _types(self) -> Mapping[str, tuple[Type, ...]]:
        return _types_by_kind(row for row in _rows("types") if self.within(*_window(row)))

    @cached_property
    def types(self) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the release's optimizers, under the key `optimizers`, and of its
        schedulers, under the key `schedulers`.
        """
        return {
            # A type may have several implementations.
            kind: tuple(dict.fromkeys(row.type for row in rows))
            for kind, rows in self._types.items()
        }


@cache
def moves() -> tuple[Move, ...]:
    """Return the renames of keys from one release to the next, oldest first."""
    # A key that a release rejects is no rename: the release says itself what to do.
    renames = [
        row for row in KEYS.values() if row.instead in KEYS and row.until and not row.rejected
    ]
    return tuple(
        rename_setting(row.key, row.instead, row.until)
        for row in sorted(renames, key=lambda row: RELEASES.place(row.until))
    )


def optional_section(path: str) -> str | None:
    """Return the path of the optional section that contains the key `path`; None if the key is in
    no optional section.
    """
    return _optional().get(path)


@cache
def _optional() -> Mapping[str, str]:
    sections = [part.section for part in PARTS.values() if part.optional]
    return {
        path: section for path in KEYS for section in sections if path.startswith(section + ".")
    }


def _types_by_kind(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, tuple[Type, ...]]:
    """Return the optimizers and schedulers that the rows describe, by kind. A row without a name
    describes a type. A row with a name describes an argument of a type.
    """
    types_by_kind: dict[str, list[Type]] = {}
    rows_by_type: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        rows_by_type.setdefault((row["kind"], row["type"], row.get("form", "")), []).append(row)
    for (kind, name, form), mine in rows_by_type.items():
        argument_rows = [row for row in mine if "name" in row]
        states = {
            state: tuple(row["name"] for row in argument_rows if row.get(state)) for state in STATES
        }
        args = {
            row["name"]: tuples(row.get("default"))
            for row in argument_rows
            if not any(map(row.get, STATES))
        }
        types_by_kind.setdefault(kind, []).append(
            Type(name, form, args if args else None, **states)
        )
    # Types that take any argument are torch's, and come last.
    return {
        kind: tuple(
            sorted(types, key=lambda type: (type.args is None, type.type, FORMS.index(type.form)))
        )
        for kind, types in types_by_kind.items()
    }


@cache
def _all_types() -> Mapping[str, tuple[Type, ...]]:
    return _types_by_kind(_rows("types"))


def all_types(kind: str) -> tuple[Type, ...]:
    """Return all optimizers (`kind` is `optimizers`) or all schedulers (`schedulers`), each with the
    arguments that it has in any release.
    """
    return _all_types()[kind]


@cache
def release(version: str) -> Release:
    """Return the facts of release `version`. Raises `VersionError` for an unknown release."""
    return Release(version)


def defaults(version: str) -> Mapping[str, Any]:
    """Return the defaults of release `version`, by path."""
    return release(version).defaults
