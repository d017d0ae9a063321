"""Reads YAML files, mappings and dotted overrides into typed values by path, and writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

from bridge import limits
from bridge.errors import ConfigError, SourceError, nearest
from bridge.files import Document, check_nested, find, folder_of, load, load_words, load_yaml
from bridge.files.shown import show_value
from bridge.plan.section import Values, fields, nest
from bridge.stack.dialect import Reading, Written, flags_of
from bridge.stack.findings import Finding, Origin, twice, unknown
from bridge.stack.rules import Effect
from compat.fast_llm import signatures
from compat.fast_llm.effective import GRADS, LEVEL, WEIGHTS, buffers_of_level
from compat.fast_llm.releases import KEYS, RELEASES, Release
from compat.fast_llm.schema import FastLLM
from compat.fast_llm.value_types import as_typed, nullable

ENTRY = "file"
INSIDE = ("multi_stage", "distributed", "base_model")
"""Names of sections of `model` that a file may also have at its top level."""
OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
NAME = re.compile(r"\w[\w-]*")
RUNNABLE = re.compile(r"train(\s+\w+)?$")
"""Pattern of a first line without a setting, such as `train gpt`, in a file that contains a command
line.
"""
VALUED = ("-c", "--config", "--verbose", "--config_auth_token_file")
SWITCHES = ("-v", "--validate", "--trust-remote-code", "--trust-all-remote-code")
Tree = dict[str, Any]


@cache
def _tree(release: Release) -> Tree:
    """Return the keys of `release` as nested mappings."""
    return nest({path: path for path in fields(FastLLM) if path in release.keys})


# Sources


@dataclass
class _Source:
    """A source: its nested data, its document, its overrides, and the names of sections of `model`
    that it has at the top level.
    """

    data: dict[str, Any]
    document: Document | None = None
    overrides: dict[str, str] = field(default_factory=dict)
    strings: dict[str, str] = field(default_factory=dict)
    alone: tuple[str, ...] = ()

    def path_in_source(self, path: str) -> str:
        """Return a path as the user wrote it in the source."""
        # A section that stands alone at the top was moved into `model`; messages name it as the
        # user wrote it.
        inner = path.removeprefix("model.")
        return inner if inner != path and inner.partition(".")[0] in self.alone else path

    def origin(self, path: str) -> Origin | None:
        """Return the origin of `path`: its line in the source."""
        source_path = self.path_in_source(path)
        override = next(
            (
                text
                for name, text in self.overrides.items()
                if f"{source_path}.".startswith(f"{name}.")
            ),
            "",
        )
        if override:
            return Origin(None, override)
        line = self.document.line(*source_path.split(".")) if self.document else None
        return (
            Origin(line, source_path if source_path != path else "")
            if line or source_path != path
            else None
        )


def read(source: Any, release: Release, lenient: bool = False) -> Reading:
    """Read a path, text, mapping, `Written`, or the words of a command line. Raises one error with
    every problem.

    The words are `key.key=value` overrides. They replace values of the file that `--config` names.
    """
    content = _place_sections(_load_source(source))
    reader = _ConfigReader(release, lenient, content)
    # Before the values: a key that stands twice explains a value that the user does not expect.
    reader.findings += twice(content.document)
    reader.section(content.data, "", _tree(release))
    reader.dump()
    return Reading(Values(reader.given), ENTRY, reader.origins, tuple(reader.findings)).unless(
        reader.problems
    )


def _load_source(source: Any) -> _Source:
    if isinstance(source, Written):
        source = source.text
    if isinstance(source, Mapping):
        return _mapping(source)
    if (words := flags_of(source)) is not None:
        return _command(words)
    if isinstance(source, str):
        lines = (line.strip() for line in source.splitlines())
        first = next((line for line in lines if line and not line.startswith("#")), "")
        # YAML has a colon behind a name; `name=value` and `train gpt` are words of a command line.
        if OVERRIDE.match(first) or RUNNABLE.match(first):
            return _command(load_words(source).data, _find_file)
    if not isinstance(source, str | Path | Document):
        raise SourceError(
            f"fast_llm: found {show_value(source)}; expected a path, text, a mapping or a list of overrides"
        )
    document = load(source)
    if isinstance(document.data, list):
        if wrong := [word for word in document.data if not isinstance(word, str)]:
            raise SourceError(
                f"{document.name}: found {show_value(wrong[0])} in a list; expected a mapping, or the words of a command line"
            )
        return _command(document.data, partial(_find_file, folder=folder_of(document)))
    return _Source(document.data, document, strings=_strings(document))


def _mapping(source: Mapping[Any, Any]) -> _Source:
    """Read a mapping, whose keys may be dotted paths, and nest it."""
    check_nested(source, "mapping")
    content = _Source({})
    for key, value in source.items():
        if not isinstance(key, str):
            raise SourceError(f"fast_llm: found the key {show_value(key)}; expected a name")
        _put(content, key, deepcopy(value))
    return content


def _command(words: Sequence[str], place: Callable[[str], str | Path] = str) -> _Source:
    """Read a command line: the names of the program and the model, then options and overrides.
    Source: engine/config_utils/runnable.py.

    `place` returns the path of the file that `--config` names. As in Fast-LLM, overrides are
    applied after the file, wherever they appear.
    """
    rest = list(dropwhile(NAME.fullmatch, words))
    source, overrides, problems = _Source({}), list[str](), list[str]()
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in VALUED:
            if not equals:
                value = rest.pop(0) if rest else ""
            # Only the first two name the config; the others are options of the program.
            source = _base_source(place(value)) if name in VALUED[:2] else source
        elif OVERRIDE.match(word):
            overrides.append(word)
        elif word not in SWITCHES:
            problems.append(
                f"{show_value(word)}: expected an override such as model.multi_stage.zero_stage=2"
            )
    ConfigError.raise_if(problems)
    for word in overrides:
        _override(source, *word.split("=", 1))
    return source


def _find_file(name: str, folder: Path | None = None) -> str | Path:
    """Return the path of a file that a source names. Raises `OutsideError` for a file outside the
    source's folder.
    """
    return find(name, folder) or name


def _base_source(path: str | Path) -> _Source:
    document = load(path)
    if not isinstance(document.data, dict):
        raise SourceError(
            f"{path}: found {show_value(document.data)}; expected a mapping of settings"
        )
    return _Source(dict(document.data), document, strings=_strings(document))


def _strings(document: Document) -> dict[str, str]:
    return {".".join(map(str, key)): text for key, text in document.strings.items()}


def _override(source: _Source, name: str, text: str) -> None:
    document = load_yaml(text) if text.strip() else None
    # An override replaces the whole value at its name, so notes on texts below that name are void.
    source.strings = {
        path: text for path, text in source.strings.items() if not f"{path}.".startswith(f"{name}.")
    }
    if document is not None and () in document.strings:
        source.strings[name] = document.strings[()]
    _put(source, name, document.data if document else None)
    source.overrides[name] = f"{name}={text}"


def _put(source: _Source, name: str, value: Any) -> None:
    *parents, leaf = name.split(".")
    if len(parents) > limits.DEPTH:
        raise SourceError(
            f"{show_value(name)}: found a name of more than {limits.DEPTH} parts; no config is nested that deep"
        )
    place = source.data
    for parent in parents:
        # Copied on the way down: the data may belong to the caller.
        inner = place.get(parent)
        place[parent] = inner = dict(inner) if isinstance(inner, Mapping) else {}
        place = inner
    place[leaf] = value


def _place_sections(source: _Source) -> _Source:
    """Move sections of `model` that are at the top level into `model`."""
    alone = [name for name in INSIDE if name in source.data]
    if not alone:
        return source
    model = source.data.get("model", {})
    if not isinstance(model, Mapping) or any(name in model for name in alone):
        raise ConfigError(
            f"{alone[0]}: found at the top level and in model; keep only the section in model"
        )
    rest = {name: value for name, value in source.data.items() if name not in alone}
    source.data = {**rest, "model": {**model, **{name: source.data[name] for name in alone}}}
    source.alone = tuple(alone)
    return source


# Reading


@dataclass
class _ConfigReader:
    """Reads nested data by the keys of a release. Collects values, origins, findings and problems."""

    release: Release
    lenient: bool
    source: _Source
    given: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def section(self, data: Mapping[str, Any], path: str, tree: Tree) -> None:
        """Read the mapping `data`, which is the section at `path`."""
        for name, value in data.items():
            inner = f"{path}.{name}" if path else str(name)
            entry = tree.get(name) if isinstance(name, str) else None
            # A null type chooses no class, in every section.
            if name == "type" and value is None:
                continue
            if entry is None:
                self.unknown(inner, path)
            elif isinstance(entry, str):
                self.leaf(inner, value)
            elif isinstance(value, Mapping):
                self.section(value, inner, entry)
            else:
                self.problem(
                    inner,
                    f"found {show_value(value)}; expected a mapping; drop the key for the defaults",
                )

    def leaf(self, path: str, value: Any) -> None:
        """Read one value."""
        if (spelling := self.source.strings.get(self.source.path_in_source(path))) is not None:
            message = (
                f"Fast-LLM's loader reads {spelling} as text; "
                f"a number needs a point and a signed exponent; write {number(value)}"
            )
            self.findings.append(
                Finding(path, message, Effect.NONE, origin=self.source.origin(path))
            )
        try:
            result = None if value is None and nullable(path) else as_typed(path, value)
        except ValueError as error:
            self.problem(path, str(error))
            return
        # A null that is the default says nothing. For buffer counts it does: Fast-LLM refuses a
        # given null beside a level.
        if (
            result is None
            and fields(FastLLM)[path].default is None
            and path not in (WEIGHTS, GRADS)
        ):
            return
        if isinstance(result, Mapping):
            self.check_section(path, result)
        self.given[path] = result
        if origin := self.source.origin(path):
            self.origins[path] = origin

    def check_section(self, section: str, data: Mapping[str, Any]) -> None:
        """Check a section against the config classes of the release. A refusal is a problem, or a
        finding if reading is lenient.
        """
        problems = list(signatures.problems(data, section, self.release.version))
        if problems and (
            other := signatures.of_another_release(data, section, self.release.version)
        ):
            message = (
                f"has the layout of Fast-LLM {other}, but this is {self.release.version}, which "
                f"refuses it: {problems[0][1]}"
            )
            self.findings.append(
                Finding(
                    problems[0][0],
                    message,
                    Effect.STOPS,
                    given=True,
                    origin=self.source.origin(section),
                )
            )
            return
        for path, message in problems:
            if self.lenient:
                self.findings.append(
                    Finding(
                        path,
                        message,
                        Effect.NUMBERS,
                        given=True,
                        origin=self.source.origin(path),
                        unknown=True,
                    )
                )
            else:
                self.problem(path, message)

    def unknown(self, path: str, parent: str) -> None:
        """Report a field that the release does not have: as a problem, or as a finding if reading
        is lenient.
        """
        message = (
            _elsewhere(path, self.release)
            or f"unknown field{_nearest(path, parent, self.release, len(self.problems))}"
        )
        if self.lenient:
            self.findings.append(unknown(path, message, origin=self.source.origin(path)))
        else:
            self.problem(path, message)

    def dump(self) -> None:
        """Drop numbers of buffers that equal those of the ZeRO level.

        Fast-LLM writes both the level and the numbers into a dump of all fields, and then refuses
        to read the dump.
        """
        sets = buffers_of_level(self.given.get(LEVEL))
        counts = {path: self.given[path] for path in (GRADS, WEIGHTS) if path in self.given}
        # Only a dump has both counts. A single one was written by a person, and Fast-LLM's refusal
        # is the right answer to it.
        agrees = all(counts.get(path) == count for path, count in sets.items())
        if sets and len(counts) == 2 and agrees and not self.release.overwrites_buffers:
            for path in sets:
                del self.given[path]
                message = (
                    f"left out, because zero_stage {self.given[LEVEL]} sets this number; Fast-LLM writes "
                    "the number and zero_stage into a dump, but refuses a file with both"
                )
                self.findings.append(
                    Finding(path, message, Effect.NONE, origin=self.origins.pop(path, None))
                )
        for path in (GRADS, WEIGHTS):
            if path in self.given and self.given[path] is None and path not in sets:
                del self.given[path]

    def problem(self, path: str, message: str) -> None:
        """Report an error at `path` as a problem."""
        origin = self.source.origin(path)
        line = f"line {origin.line}: " if origin and origin.line else ""
        self.problems.append(f"{line}{self.source.path_in_source(path)}: {message}")


def _elsewhere(path: str, release: Release) -> str:
    """Return a message about a field or section that only other releases have; empty if no release
    has it.
    """
    rows = [row for key, row in KEYS.items() if key == path or key.startswith(path + ".")]
    if not rows:
        return ""
    if all(release.since(row.since) for row in rows):
        instead = next((row.instead for row in rows if row.instead), "")
        last = RELEASES.last(rows[0].until)
        return (
            f"removed after Fast-LLM {last}, but this is {release.version}; "
            f"{f'use {instead}' if instead else 'drop it'}"
        )
    before = next((row.before for row in rows if row.before), "")
    return (
        f"new in Fast-LLM {rows[0].since}, but this is {release.version}; "
        f"{f'use {before}' if before else 'drop it'}"
    )


def _nearest(path: str, parent: str, release: Release, before: int) -> str:
    level: Any = _tree(release)
    for name in filter(None, parent.split(".")):
        level = level[name]
    return nearest(path.rpartition(".")[2], level, before)


# Writing

PLAIN = re.compile(r"[A-Za-z_/][\w./-]*")
WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")


def text(settings: Mapping[str, Any]) -> str:
    """Return YAML that Fast-LLM's loader reads as the same values. An empty config becomes an empty
    mapping.
    """
    order = {path: place for place, path in enumerate(fields(FastLLM))}
    tree = nest({path: settings[path] for path in sorted(settings, key=order.__getitem__)})
    return "\n".join(_block(tree, "")) + "\n" if tree else "{}\n"


def _block(data: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{scalar(name)}:", *_block(value, indent + "  ")]
        else:
            lines.append(f"{indent}{scalar(name)}: {flow(value)}")
    return lines


FILE, OVERRIDES = "config.yaml", "overrides.args"
"""Default names of the files."""


def overrides(settings: Mapping[str, Any]) -> str:
    """Return the words after `fast-llm` on a command line: the command, then one `key.key=value` on
    each line, quoted for a shell.
    """
    from shlex import quote

    words = [quote(f"{path}={flow(value)}") for path, value in settings.items()]
    return "\n".join(["train" if "type" in settings else "train gpt", *words]) + "\n"


def flow(value: Any) -> str:
    """Return the value as YAML on one line."""
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{scalar(name)}: {flow(inner)}" for name, inner in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    return scalar(value)


def scalar(value: Any) -> str:
    """Return a string, number, boolean or null, spelled so that YAML 1.1 reads the same value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return number(value)
    if not isinstance(value, str):
        return str(value)
    if PLAIN.fullmatch(value) and value.lower() not in WORDS:
        return value
    # Double quotes, because only they have escapes for characters that do not print.
    pieces = []
    for character in value:
        if character in '"\\':
            pieces.append("\\" + character)
        else:
            pieces.append(character if character.isprintable() else f"\\U{ord(character):08x}")
    return f'"{"".join(pieces)}"'


def number(value: float) -> str:
    """Return the spelling of a float that every YAML reader reads as a float: with a decimal point,
    and a sign in the exponent.
    """
    digits, e, exponent = repr(float(value)).partition("e")
    return digits if not e else f"{digits if '.' in digits else digits + '.0'}e{exponent}"
