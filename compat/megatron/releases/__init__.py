"""Facts about each Megatron-LM release, as package data: command-line flags and fields of config classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import inf
from types import MappingProxyType
from typing import Any

from bridge.errors import ConfigError
from bridge.stack.releases import Releases, table


@cache
def _table(file: str) -> Any:
    # Parsed once: flags.json holds the flags of all releases.
    return table(__name__, file)


DATES: Mapping[str, str] = MappingProxyType(_table("known.json"))
"""The date of each covered release's tag, oldest first; empty if the tag is not public."""
RELEASES = Releases("Megatron", tuple(DATES))
KNOWN: tuple[str, ...] = RELEASES.known
"""The covered releases, oldest first."""
MAIN = "0.20.0.dev20260822"
"""Name of the main branch's state on the way to 0.20."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One argument of a release's parser.

    `action` is `store`, `true`, `false`, `switch` (`--x` and `--no-x`) or `help`. For `store`, `type` is
    `text`, `int`, `float`, `bool` (any text but the empty one is true), `integers` (`1,2`), `name` (of an enum
    member), `layers` (a number, or a list like `([0]*3+[1])*2`) or `layers_spaced` (the same, blanks allowed);
    `nargs` is None, a number, `*` or `+`. `default` is the value of `dest` if no flag sets it. `excludes` names the flags
    that may not be given together with this one.
    """

    options: tuple[str, ...]
    dest: str
    action: str
    type: str = "text"
    nargs: int | str | None = None
    choices: tuple[Any, ...] = ()
    default: Any = None
    excludes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Field:
    """One field that a config class declares itself.

    A `default` that is not a literal is the text of its expression. `init` is false for a field
    that the class derives itself and that cannot be passed.
    """

    name: str
    type: str
    default: Any = None
    init: bool = True


@cache
def flags(version: str) -> Mapping[str, Flag]:
    """Return the flags of a release by option string. Raises `VersionError` for an unknown release."""
    rows = (_flag(row) for row in _rows("flags.json", version))
    return MappingProxyType({option: flag for flag in rows for option in flag.options})


@cache
def defaults(version: str) -> MappingProxyType[str, Any]:
    """Return the defaults of a release's parser by destination. To copy them, call the `copy`
    method, which takes a tenth of the time of `dict(...)`.
    """
    # --help has no value in the parsed arguments.
    return MappingProxyType(
        {flag.dest: flag.default for flag in flags(version).values() if flag.action != "help"}
    )


@cache
def fields(version: str, class_name: str) -> Mapping[str, Field]:
    """Return the fields that a config class of a release declares itself; inherited fields are left
    out.
    """
    rows = [row for row in _rows("classes.json", version) if row["class"] == class_name]
    if not rows:
        names = sorted({row["class"] for row in _rows("classes.json", version)})
        raise ConfigError(
            f"{class_name}: no such class in Megatron {version}; known are {', '.join(names)}"
        )
    return MappingProxyType({row["name"]: _field(row) for row in rows})


def field_names(*class_names: str) -> frozenset[str]:
    """Return the names of the fields that these config classes declare in any release."""
    rows = _table("classes.json")
    return frozenset(row["name"] for row in rows if row["class"] in class_names)


@cache
def spans(option: str) -> tuple[tuple[str, str], ...]:
    """Return the first and the last release of each period in which a flag exists. Empty if no
    release has the flag.
    """
    having = {place for place, version in enumerate(KNOWN) if option in flags(version)}
    # A flag may go and come again, so there can be several runs. Each has one start and one end.
    starts = sorted(place for place in having if place - 1 not in having)
    ends = sorted(place for place in having if place + 1 not in having)
    return tuple((KNOWN[start], KNOWN[end]) for start, end in zip(starts, ends, strict=True))


def _rows(file: str, version: str) -> Iterator[dict[str, Any]]:
    RELEASES.place(version)  # raises for a release that is not known
    return (
        row
        for row in _table(file)
        if RELEASES.within(version, row.get("since", ""), row.get("until", ""))
    )


def _flag(row: Mapping[str, Any]) -> Flag:
    return Flag(
        options=tuple(row["options"]),
        dest=row["dest"],
        action=row["action"],
        type=row.get("type", "text"),
        nargs=row.get("nargs"),
        choices=tuple(row.get("choices", ())),
        default=row.get("default"),
        excludes=tuple(row.get("excludes", ())),
    )


def _field(row: Mapping[str, Any]) -> Field:
    # JSON has no infinity, so the file has the text of the expression.
    default = inf if row["default"] == "float('inf')" else row["default"]
    return Field(row["name"], row["type"], default, row.get("init", True))
