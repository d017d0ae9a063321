"""Settings of a project: the section `[tool.stagebridge]` of its pyproject.toml, with tables for some of its files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError, nearest
from bridge.limits import COUNT, RANKS


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: Any) -> tuple[str, ...] | None:
    fits = isinstance(value, list) and all(isinstance(one, str) for one in value)
    return tuple(value) if fits else None


def _patterns(value: Any) -> tuple[str, ...] | None:
    texts = _texts([value] if isinstance(value, str) else value)
    # A bracket that is not closed would stand for itself, and the pattern for no file.
    if any("[" in SET.sub("", one) for one in texts or ()):
        return None
    try:
        return tuple(one for one in texts or () if re.compile(_regex(one))) or None
    except re.error:
        return None


def _pairs(value: Any) -> tuple[str, ...] | None:
    if not isinstance(value, dict):
        texts = _texts(value)
        return texts if texts is None or all("=" in one for one in texts) else None
    if not all(isinstance(one, str | int | float | list) for one in value.values()):
        return None
    # As they are typed on the command line.
    return tuple(
        f"{name}={one if isinstance(one, str) else json.dumps(one)}" for name, one in value.items()
    )


def _number(most: int) -> Callable[[Any], int | None]:
    return lambda value: value if type(value) is int and 1 <= value <= most else None


def _switch(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


TEXT, TEXTS, SWITCH = ("a string", _text), ("a list of strings", _texts), ("true or false", _switch)
PAIRS = ("a table of names with values, or a list of texts NAME=VALUE", _pairs)
Kind = tuple[str, Callable[[Any], Any]]
GATE: Mapping[str, Kind] = {
    "select": TEXTS,
    "ignore": TEXTS,
    "fail-on": TEXT,
    "baseline": TEXT,
    "format": TEXT,
    "exclude": TEXTS,
}
"""Keys for the gate, each with what it expects, and a function that returns its value, or None for a wrong one."""
READING: Mapping[str, Kind] = {
    "from": TEXT,
    "from-version": TEXT,
    "world-size": (f"a whole number from 1 to {RANKS}", _number(RANKS)),
    "auto": PAIRS,
    "auto-from": TEXTS,
    "code": PAIRS,
    "env": PAIRS,
    "launch": ("a whole number from 1", _number(COUNT)),
    "allow-path": TEXTS,
    "lenient": SWITCH,
    "nearest": SWITCH,
}
"""Keys for reading a file, named like the options of the command line."""
PATHS = ("auto-from", "allow-path")
PATTERN: Mapping[str, Kind] = {
    "pattern": ("a pattern or a list of patterns, such as configs/64/**", _patterns)
}
TRACE: Mapping[str, Kind] = {"accept": ("a list of texts ID:PLACE", _texts)}
"""Keys of `[tool.stagebridge.trace]`."""
FILES, TRACES = "files", "trace"


@dataclass(frozen=True)
class Table:
    """A table of `[[tool.stagebridge.files]]`: patterns of files, and how these are read."""

    patterns: tuple[str, ...]
    reading: Mapping[str, Any]

    def takes(self, path: str) -> bool:
        """Return whether a pattern fits a path, which is relative to the folder of the pyproject.toml."""
        return any(re.fullmatch(_regex(pattern), path) for pattern in self.patterns)


def _regex(pattern: str) -> str:
    """Return a regular expression for paths: `*` stays within a folder, `**` crosses folders, a
    pattern without a slash fits a name in any folder, and a folder stands for all files below it.
    """
    parts = pattern.removeprefix("./").strip("/").split("/")
    if "/" not in pattern.removeprefix("./").rstrip("/"):
        parts = ["**", *parts]
    *folders, last = (
        "(?:[^/]+/)*" if part == "**" else f"{TOKEN.sub(_token, part)}/" for part in parts
    )
    return (
        "".join(folders) + ("[^/]+" if parts[-1] == "**" else last.removesuffix("/")) + "(?:/.*)?"
    )


SET = re.compile(r"\[!?[^\]]+\]")
TOKEN = re.compile(rf"\*+|\?|{SET.pattern}|.")


def _token(match: re.Match[str]) -> str:
    token = match[0]
    if len(token) > 1 and token.startswith("["):
        body = token[1:-1].replace("\\", "\\\\")
        return f"[^{body[1:]}]" if body.startswith("!") else f"[{body}]"
    return {"*": "[^/]*", "?": "[^/]"}.get(token[0], re.escape(token))


@dataclass(frozen=True)
class Project:
    """The settings of a project, whose pyproject.toml lies in `folder`.

    `reading` says how files are read, by the names of options; of the tables `files`, each whose
    pattern fits adds to it, and a later one wins.
    """

    folder: Path = Path()
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: str | None = None
    baseline: str | None = None
    format: str | None = None
    exclude: tuple[str, ...] = ()
    reading: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Table, ...] = ()
    accept: tuple[str, ...] = ()
    """Findings of a traced training that are meant, each as ID:PLACE."""

    def reading_of(self, path: str | None) -> dict[str, Any]:
        """Return the values of options for reading a file.

        `path` is relative to `folder`; None: a file outside of it, or standard input. Lists of all
        tables are joined; of two values with one name, the last counts.
        """
        values = dict(self.reading)
        for table in self.files:
            if path is not None and table.takes(path):
                for name, value in table.reading.items():
                    items = (*values.get(name, ()), *value) if isinstance(value, tuple) else value
                    values[name] = items
        return values


def project_of(text: str, where: str) -> Project:
    """Return the settings in the pyproject.toml `where`; raises `BridgeError` with every problem."""
    import tomllib

    try:
        tools = tomllib.loads(text).get("tool", {})
    except tomllib.TOMLDecodeError as error:
        raise BridgeError(f"{where}: not TOML ({error})") from None
    if not isinstance(tools, dict):
        raise BridgeError(
            f"{where}: tool: found {tools!r}, expected tables such as [tool.stagebridge]"
        )
    section = tools.get("stagebridge", {})
    place, problems = f"{where}: tool.stagebridge", list[str]()
    if not isinstance(section, dict):
        raise BridgeError(f"{place}: found {section!r}, expected a table")
    folder, tables = Path(where).parent, section.get(FILES, [])
    rest = {name: value for name, value in section.items() if name not in (FILES, TRACES)}
    values = _values(rest, {**GATE, **READING}, place, problems, (FILES, TRACES))
    trace = section.get(TRACES, {})
    if not isinstance(trace, dict):
        problems.append(f"{place}.{TRACES}: found {trace!r}, expected a table")
        trace = {}
    watching = _values(trace, TRACE, f"{place}.{TRACES}", problems)
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        problems.append(
            f"{place}.{FILES}: expected tables, each under [[tool.stagebridge.{FILES}]]"
        )
        tables = []
    files = list(_tables(tables, f"{place}.{FILES}", problems, folder))
    BridgeError.raise_if(problems)
    gate = {name.replace("-", "_"): value for name, value in values.items() if name in GATE}
    reading = _resolve_paths(values, folder)
    return Project(folder, **gate, **watching, reading=reading, files=tuple(files))


def _tables(
    tables: list[dict[str, Any]], place: str, problems: list[str], folder: Path
) -> Iterator[Table]:
    for number, table in enumerate(tables, 1):
        values = _values(table, {**PATTERN, **READING}, f"{place}[{number}]", problems)
        if "pattern" not in table:
            problems.append(f"{place}[{number}]: has no pattern; say which files it is for")
        else:
            yield Table(values.get("pattern", ()), _resolve_paths(values, folder))


def _values(
    table: Mapping[str, Any],
    kinds: Mapping[str, Kind],
    place: str,
    problems: list[str],
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the values by the names of their keys, with dashes; add a message to `problems` for each wrong one."""
    values = dict[str, Any]()
    for name, value in table.items():
        key = name.replace("_", "-")
        if key not in kinds:
            names = ", ".join((*kinds, *more))
            guess = nearest(key, (*kinds, *more))
            problems.append(f"{place}.{name}: unknown key; expected one of {names}{guess}")
            continue
        words, read = kinds[key]
        values[key] = read(value)
        if values[key] is None:
            problems.append(f"{place}.{name}: found {value!r}, expected {words}")
    return values


def _resolve_paths(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values for reading. Paths in them are relative to the folder of the pyproject.toml."""

    def resolve_path(words: str) -> str:
        path = folder / words
        return str(path) if "=" not in words or path.is_file() else words

    return {
        name: tuple(map(resolve_path, value)) if name in PATHS else value
        for name, value in values.items()
        if name in READING
    }
