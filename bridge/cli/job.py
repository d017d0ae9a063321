"""The input of a command: FILE and the options for reading it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from bridge.cli.pairs import split_pair
from bridge.errors import BridgeError, nearest
from bridge.stack.effects import Effect


@dataclass(frozen=True)
class Job:
    """The file to read, and the options for reading it.

    A `loose` job is one of several jobs with the same options, so options that the stack of its file
    does not have are left out.
    `text` is the content of the file, or None before the file is opened. `typed` are the options that
    the command line gives, by field; `lent` are fields that only the project's settings give, which
    are left out as well if the stack does not have them.
    """

    file: str
    dialect: str | None = None
    version: str | None = None
    world_size: int | None = None
    lenient: bool = False
    nearest: bool = False
    json: bool = False
    auto: Sequence[str] = ()
    auto_from: Sequence[str] = ()
    model: Path | None = None
    open_auto: bool = False
    code: Sequence[str] = ()
    env: Sequence[str] = ()
    launch: int | None = None
    fail_on: str | None = None
    allow: Sequence[str] = ()
    loose: bool = False
    text: str | None = None
    typed: Mapping[str, Any] = field(default_factory=dict)
    lent: Sequence[str] = ()

    def of(self, file: str, settings: Mapping[str, Any]) -> Job:
        """Return the job for a file for which the project has `settings`, by the names of options.

        The command line wins. Lists are joined, with those of the command line last, so that of two
        values with one name they win too.
        """
        fields = {
            FIELDS.get(option, option.replace("-", "_")): value
            for option, value in settings.items()
        }
        lists = {
            name: (*value, *self.typed.get(name, ())) if isinstance(value, tuple) else value
            for name, value in fields.items()
            if isinstance(value, tuple) or name not in self.typed
        }
        before = {name: Job.__dataclass_fields__[name].default for name in self.lent}
        lent = tuple(name for name in lists if name not in self.typed)
        return replace(self, file=file, lent=lent, **{**before, **self.typed, **lists})

    @property
    def file_name(self) -> str:
        """The name of the file; empty for standard input."""
        return "" if self.file == "-" else self.file

    @property
    def settings_of_options(self) -> dict[str, dict[str, Any]]:
        """Settings that options give, by the argument of `Dialect.read` that takes them."""
        option_values = _import_option_values()
        settings: dict[str, Any] = {
            "auto": option_values.parse_pairs(self.auto, "--auto"),
            "code": option_values.nest_settings(option_values.parse_pairs(self.code, "--code")),
            "trainer": option_values.trainer_arguments(
                [one for one in self.auto_from if one not in (*self.launchers, *self.parts)]
            ),
            "model": option_values.model_sizes(self.model) if self.model else {},
            "open_auto": self.open_auto,
        }
        return {keyword: values for keyword, values in settings.items() if values}

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
        return dict(split_pair(pair, "--env") for pair in self.env)

    @property
    def threshold(self) -> Effect:
        """The least effect of a finding that changes the exit code."""
        return Effect.NUMBERS if self.fail_on is None else effect_named(self.fail_on)


def _import_option_values() -> ModuleType:
    # What only prints help reads no values.
    from bridge.cli import option_values

    return option_values


def effect_named(words: str, option: str = "--fail-on") -> Effect:
    """Return the effect that `words` name in full or in part, such as `different numbers`, `memory` or `stops`."""
    name = words.lower().replace("-", " ").replace("_", " ").strip()
    effects = [effect for effect in Effect if name == effect] or [
        effect for effect in Effect if name and name in effect
    ]
    if len(effects) != 1:
        raise BridgeError(
            f"{option}: found {words!r}, expected one of {', '.join(Effect)}{nearest(name, tuple(Effect))}"
        )
    return effects[0]


FIELDS = {"from": "dialect", "from-version": "version", "allow-path": "allow"}
"""Fields of a `Job`, by the name of the option that sets them, where the two names differ."""
OPTIONS = {"trainer": "auto-from"}
"""Names of options, by the argument of `Dialect.read` that they set, where the two names differ."""


@dataclass(frozen=True)
class Sizes:
    """The options for sizes. `model` is the preset, file or folder that states the model's sizes.

    `given` are the sizes from the command line by field name, and `micro` is the microbatch size.
    """

    model: str
    given: Mapping[str, int | bool | None]
    micro: int | None


@dataclass(frozen=True)
class Picture:
    """The file for a picture of the bytes of each rank, and the memory of a device in GiB.

    Each is None if it was not given.
    """

    path: Path | None = None
    memory: float | None = None

    @property
    def bytes(self) -> int | None:
        """The memory of a device in bytes; None if it was not given."""
        return None if self.memory is None else int(self.memory * 2**30)
