"""A source: the config that a use case reads, and the options for reading it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

from bridge import limits
from bridge.errors import SourceError

STDIN = "-"
"""The name of standard input."""


class Options(TypedDict, total=False):
    """Options for reading a source, in the words of `Source`."""

    dialect: str | None
    version: str | None
    world_size: int | None
    lenient: bool
    nearest: bool
    auto: str | Sequence[str] | Mapping[str, Any]
    auto_from: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    model: str | os.PathLike[str] | None
    code: str | Sequence[str] | Mapping[str, Any]
    env: str | Sequence[str] | Mapping[str, Any]
    launch: int | None
    allow: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Source:
    """A file to read, and the options for reading it.

    `file` is a path, `git:REV:PATH` for the file of a commit, or `-` for standard input. `dialect` and
    `version` are the stack and its release, which are recognised by default; `auto`, `code` and `env` are
    pairs NAME=VALUE or mappings; `allow` are paths outside the file's folder that it may name. `text` is the
    content of the file, or None before the file is opened, and `title` is what errors call a text without file.

    A `loose` source is one of several with the same options, so options that the stack of its file does not
    have are left out; so are `lent` options, which only the project's settings give.
    """

    file: str
    dialect: str | None = None
    version: str | None = None
    world_size: int | None = None
    lenient: bool = False
    nearest: bool = False
    auto: Sequence[str] | Mapping[str, Any] = ()
    auto_from: Sequence[str] = ()
    model: Path | None = None
    open_auto: bool = False
    code: Sequence[str] | Mapping[str, Any] = ()
    env: Sequence[str] | Mapping[str, str] = ()
    launch: int | None = None
    allow: Sequence[str] = ()
    loose: bool = False
    text: str | None = None
    title: str = "standard input"
    lent: Sequence[str] = ()

    @property
    def file_name(self) -> str:
        """The name of the file; empty for standard input."""
        return "" if self.file == STDIN else self.file

    @property
    def settings_of_options(self) -> dict[str, dict[str, Any]]:
        """Settings that options give, by the argument of `Dialect.read` that takes them."""
        values = _import_option_values()
        settings: dict[str, Any] = {
            "auto": values.parse_pairs(self.auto, "--auto"),
            "code": values.nest_settings(values.parse_pairs(self.code, "--code")),
            "trainer": values.trainer_arguments(
                [one for one in self.auto_from if one not in (*self.launchers, *self.parts)]
            ),
            "model": values.model_sizes(self.model) if self.model else {},
            "open_auto": self.open_auto,
        }
        return {keyword: found for keyword, found in settings.items() if found}

    @cached_property
    def launchers(self) -> tuple[str, ...]:
        """Files of --auto-from that are no arguments, but configs of a program that starts the run."""
        return tuple(filter(_import_option_values().is_launcher, self.auto_from))

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Files of --auto-from that are no arguments, but flags of a program or the config of the stack that it starts."""
        return tuple(filter(_import_option_values().is_part, self.auto_from))

    @property
    def outside(self) -> dict[str, str]:
        """Environment of a launch script, from --env."""
        split = _import_option_values().split_pair
        return (
            dict(self.env)
            if isinstance(self.env, Mapping)
            else dict(split(pair, "--env") for pair in self.env)
        )

    def values(self) -> dict[str, Any]:
        """Return the source as a dictionary, from which another process makes it."""
        found = {name: getattr(self, name) for name in Source.__dataclass_fields__}
        return {**found, "model": self.model and str(self.model)}


def _import_option_values() -> ModuleType:
    # What only prints help reads no values.
    from bridge.api import option_values

    return option_values


Readable = Source | str | os.PathLike[str] | Mapping[str, Any] | Sequence[str]
"""What a use case reads: a file by its name, settings as a mapping, or flags as a list of words."""


def source_of(readable: Readable, options: Options) -> Source:
    """Return what a use case was given as a source with these options. Raises `SourceError` for what is neither
    a file's name, a mapping nor a list of words, and for a number of ranks that no run has.
    """
    values = _fit_options(options)
    if isinstance(readable, Source):
        return replace(readable, **values)
    if isinstance(readable, Mapping):
        return Source(
            STDIN, text=json.dumps(dict(readable), default=str), title="the mapping", **values
        )
    if isinstance(readable, str | os.PathLike):
        return Source(os.fspath(readable), **values)
    if isinstance(readable, Sequence) and all(isinstance(word, str) for word in readable):
        return Source(STDIN, text=shlex.join(readable), title="the flags", **values)
    raise SourceError(
        f"found {readable!r:.60}, expected the name of a file, a mapping of settings or a list of words"
    )


def _fit_options(options: Options) -> dict[str, Any]:
    """Return options in the types of `Source`: one file or pair is a list of one, and names of files are texts."""
    found: dict[str, Any] = dict(options)
    for name in ("auto", "code", "env", "auto_from", "allow"):
        value = found.get(name, ())
        if isinstance(value, str | os.PathLike):
            found[name] = (value,)
    for name in {"auto_from", "allow"} & found.keys():
        found[name] = tuple(map(os.fspath, found[name]))
    if isinstance(found.get("env"), Mapping):
        found["env"] = {str(name): str(value) for name, value in found["env"].items()}
    if found.get("model") is not None:
        found["model"] = Path(found["model"])
    ranks = found.get("world_size")
    if ranks is not None and (type(ranks) is not int or not 1 <= ranks <= limits.RANKS):
        raise SourceError(
            f"world_size: found {ranks!r:.60}, expected a whole number from 1 to {limits.RANKS}"
        )
    return found
