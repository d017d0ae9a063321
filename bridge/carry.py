"""Carry-over: what a translation could not express, kept in a sidecar beside the file so that the way back restores it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bridge.dialect import Config, Dialect
from bridge.errors import SourceError
from bridge.files import Original

FORMAT = 1


@dataclass(frozen=True)
class Carry:
    """The source as its user wrote it, and what the target meant when it was written.

    `original` is the text that the source was read from, where its dialect can write into it. On the way back a group of
    fields is restored as it was if the target still means the same by it; what was edited in the target since then wins.
    """

    dialect: str
    version: str
    world_size: int | None
    entry: str
    given: Mapping[str, Any]
    meant: Mapping[str, Any]
    digest: str = field(default="", compare=False)
    original: Original | None = field(default=None, compare=False)

    @classmethod
    def of(cls, source: Config, target: Config, meant: Mapping[str, Any]) -> Carry:
        """What `target` cannot say about `source`."""
        return cls(source.dialect.name, source.version, source.world_size, source.entry, dict(source.given), dict(meant))

    def text(self, written: str) -> str:
        """The sidecar of a file with content `written`."""
        record = {
            "stagebridge": FORMAT,
            "digest": digest_of(written),
            "dialect": self.dialect,
            "version": self.version,
            "world_size": self.world_size,
            "entry": self.entry,
            "given": _encoded(dict(self.given)),
            "meant": _encoded(dict(self.meant)),
        }
        if self.original is not None:
            record["original"] = asdict(self.original)
        return json.dumps(record, indent=1, default=str) + "\n"


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


def parse(text: str, where: str) -> Carry:
    """A carry-over from the text of a sidecar; `SourceError` if it is none."""
    try:
        record = json.loads(text)
        if record["stagebridge"] != FORMAT:
            raise SourceError(f"{where}: found carry-over format {record['stagebridge']}, expected {FORMAT}; convert again")
        return Carry(
            record["dialect"],
            record["version"],
            record["world_size"],
            record["entry"],
            _decoded(record["given"]),
            _decoded(record["meant"]),
            record["digest"],
            Original(**record["original"]) if "original" in record else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{where}: not a carry-over file ({error}); delete it, or convert again") from None


def restored(carry: Carry, dialect: Dialect, lowered: Mapping[str, Any], meant: Mapping[str, Any]) -> dict[str, Any]:
    """Given values of `dialect`: every group that means what it meant is put back as written, the others are `lowered`."""
    given: dict[str, Any] = {}
    changed, overruling = edits(carry, meant), overrulers(carry, dialect, meant)
    for rule in dialect.rules:
        edited = not changed.isdisjoint(rule.ours) or (rule.ours and not overruling.isdisjoint(rule.theirs))
        given.update(_part(rule.theirs, lowered if edited else carry.given))
    return given


def edits(carry: Carry, meant: Mapping[str, Any]) -> set[str]:
    """Plan paths that mean something else than when the sidecar was written."""
    return {path for path in {*carry.meant, *meant} if carry.meant.get(path) != meant.get(path)}


def overrulers(carry: Carry, dialect: Dialect, meant: Mapping[str, Any]) -> set[str]:
    """Paths that may overrule an edit if they come back: seen by an edited group as saying what it says."""
    changed = edits(carry, meant)
    rules = (rule for rule in dialect.rules if not changed.isdisjoint(rule.ours))
    return {path for rule in rules for path in rule.sees if path in rule.carries and not changed.isdisjoint(rule.carried(path))}


def _part(paths: tuple[str, ...], values: Mapping[str, Any]) -> dict[str, Any]:
    return {path: values[path] for path in paths if path in values}
