"""The input of a command: FILE, the options for reading it, and what the command makes of findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.api.source import Source
from bridge.errors import BridgeError, nearest
from bridge.stack.effects import Effect


@dataclass(frozen=True)
class Job(Source):
    """The file of a command, as a source.

    `typed` are the options that the command line gives, by field. With `json` the command prints an object,
    and `fail_on` names the least effect that changes its exit code.
    """

    json: bool = False
    fail_on: str | None = None
    typed: Mapping[str, Any] = field(default_factory=dict)

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
    def threshold(self) -> Effect:
        """The least effect of a finding that changes the exit code."""
        return Effect.NUMBERS if self.fail_on is None else effect_named(self.fail_on)


@contextmanager
def answer(job: Job) -> Iterator[None]:
    """Context in which a command does its work; with --json an error is printed as an object too."""
    from bridge.cli.terminal import note
    from bridge.stack import registry  # not for what only prints help

    try:
        # A wrong --fail-on is said before anything is read or written.
        _ = job.threshold
        for fault in registry.faults():
            note(f"note: {fault}")
        yield
    except BridgeError as error:
        error.as_object = job.json
        raise


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
