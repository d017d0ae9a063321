"""Carry-over: what a translation could not express, kept in a sidecar beside the file so that the way back restores it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from bridge import limits
from bridge.config import Count, Section, shown, validate
from bridge.dialect import Config, Dialect
from bridge.errors import ConfigError, SourceError
from bridge.files import Original, check_nested
from bridge.secrets import Secrets, left

FORMAT = 1
AGAIN = "delete it, or convert again"


@dataclass(frozen=True)
class Carry:
    """The source as its user wrote it, and what the target meant when it was written.

    `original` is the text that the source was read from, where its dialect can write into it. On the way back a group of
    fields is restored as it was if the target still means the same by it; what was edited in the target since then wins.

    `secrets` never get into a sidecar: marks stand there for them, and `source` is the file that has them. None: there is no such
    file, and the sidecar is the only place that holds what was given. `files` are the digests of what else was written, by name.
    """

    dialect: str
    version: str
    world_size: int | None
    entry: str
    given: Mapping[str, Any]
    meant: Mapping[str, Any]
    digest: str = field(default="", compare=False)
    original: Original | None = field(default=None, compare=False)
    secrets: Secrets | None = field(default=None, compare=False, repr=False)
    source: str = field(default="", compare=False)
    files: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, source: Config, target: Config, meant: Mapping[str, Any]) -> Carry:
        """What `target` cannot say about `source`."""
        return cls(source.dialect.name, source.version, source.world_size, source.entry, dict(source.given), dict(meant))

    def text(self, written: str, files: Mapping[str, str] | None = None) -> str:
        """The sidecar of a file with content `written`; `files` are the texts of what else is written with it, by name."""
        record = {
            "stagebridge": FORMAT,
            "digest": digest_of(written),
            "dialect": self.dialect,
            "version": self.version,
            "world_size": self.world_size,
            "entry": self.entry,
            "given": _encoded(self._without(dict(self.given))),
            "meant": _encoded(self._without(dict(self.meant))),
        }
        if self.original is not None:
            text = self.original.text if self.secrets is None else self.secrets.hide(self.original.text)
            record["original"] = asdict(replace(self.original, text=text, outside=self._without(dict(self.original.outside))))
        if left(record):
            record["source"] = self.source
        if files:
            record["files"] = {name: digest_of(text) for name, text in files.items()}
        return json.dumps(record, indent=1, default=str) + "\n"

    def _without(self, values: dict[str, Any]) -> Any:
        return values if self.secrets is None else self.secrets.within(values)


TUPLE = "tuple"


def _encoded(value: Any) -> Any:
    """JSON has no tuples, and a value must come back as it was."""
    if isinstance(value, Mapping):
        return {key: _encoded(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return {TUPLE: [_encoded(inner) for inner in value]}
    return [_encoded(inner) for inner in value] if isinstance(value, list) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {TUPLE}:
        return tuple(map(_decoded, value[TUPLE]))
    if isinstance(value, dict):
        return {key: _decoded(inner) for key, inner in value.items()}
    return [_decoded(inner) for inner in value] if isinstance(value, list) else value


def digest_of(text: str) -> str:
    """SHA-256 of a file's content."""
    return hashlib.sha256(text.encode()).hexdigest()


def beside(path: Path) -> Path:
    """Where the carry-over of the file at `path` lies."""
    return path.with_name(path.name + ".carry.json")


def find(path: Path) -> Carry | None:
    """The carry-over beside the file at `path`, or None; `SourceError` if it is damaged."""
    from bridge.files import read_text

    place = beside(path)
    return parse(read_text(place), str(place)) if place.exists() else None


class _Text(Section):
    """The text of a source as it stands in a sidecar."""

    text: str
    suffix: str = ""
    outside: dict[str, str] = Field({})
    chosen: Count | None = None


class _Record(Section):
    """What a sidecar holds."""

    stagebridge: Literal[1]
    digest: str
    dialect: str
    version: str
    world_size: Count | None
    entry: str
    given: dict[str, Any]
    meant: dict[str, Any]
    original: _Text | None = None
    source: str = ""
    files: dict[str, str] = Field({})


def parse(text: str, where: str) -> Carry:
    """A carry-over from the text of a sidecar; `SourceError` if it is none."""
    try:
        record = validate(_Record, _mapping(text, where))
        given, meant = (_settings(part, values) for part, values in (("given", record.given), ("meant", record.meant)))
    except (ValueError, TypeError, RecursionError) as error:
        raise SourceError(f"{where}: not a carry-over file ({error}); {AGAIN}") from None
    except ConfigError as error:
        raise SourceError(*(f"{where}: not a carry-over file ({problem}); {AGAIN}" for problem in error.problems)) from None
    original = Original(**record.original.model_dump()) if record.original else None
    return Carry(
        record.dialect,
        record.version,
        record.world_size,
        record.entry,
        given,
        meant,
        record.digest,
        original,
        source=record.source,
        files=record.files,
    )


def _settings(part: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a sidecar; what is written for a tuple or the like stands for no settings."""
    found = _decoded(values)
    if not isinstance(found, dict):
        raise ValueError(f"{part}: found {shown(found)}, expected a mapping of settings")
    return found


def _mapping(text: str, where: str) -> dict[str, Any]:
    if len(text) > limits.SIDECAR:
        raise SourceError(f"{where}: found more than {limits.SIDECAR >> 20} MiB, expected a carry-over file; {AGAIN}")
    data = json.loads(text)
    check_nested(data, where, 4 * limits.VALUES)
    if not isinstance(data, dict):
        raise ValueError(f"found {shown(data)}, expected a mapping")
    return data


def revealed(carry: Carry, secrets: Secrets) -> Carry:
    """`carry` with those of `secrets` that it has marks for; a setting whose secret is not known stays away."""
    original = carry.original
    if original is not None:
        outside = {name: secrets.shown(value) for name, value in original.outside.items()}
        original = replace(original, text=secrets.shown(original.text), outside=outside)
    given = {path: value for path, value in secrets.shown(dict(carry.given)).items() if not left(value)}
    return replace(carry, given=given, meant=secrets.shown(dict(carry.meant)), original=original, secrets=secrets)


def marks(carry: Carry) -> tuple[str, ...]:
    """The marks in `carry` that stand for secrets."""
    kept = [dict(carry.given), *([carry.original.text, dict(carry.original.outside)] if carry.original else [])]
    return tuple(left(kept))


def edits(carry: Carry, meant: Mapping[str, Any]) -> set[str]:
    """Plan paths that mean something else than when the sidecar was written."""
    return {path for path in {*carry.meant, *meant} if carry.meant.get(path) != meant.get(path)}


def overrulers(carry: Carry, dialect: Dialect, meant: Mapping[str, Any]) -> set[str]:
    """Paths that may overrule an edit if they come back: seen by an edited group as saying what it says."""
    changed = edits(carry, meant)
    rules = (rule for rule in dialect.rules if not changed.isdisjoint(rule.ours))
    return {path for rule in rules for path in rule.sees if path in rule.carries and not changed.isdisjoint(rule.carried(path))}
