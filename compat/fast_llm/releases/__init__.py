"""What each Fast-LLM release knows: keys that came and went, defaults, and checks that changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from types import MappingProxyType
from typing import Any, ClassVar

from bridge.config import fields
from bridge.moves import Move, renamed
from bridge.releases import Release as AnyRelease
from bridge.releases import Releases
from compat.fast_llm.schema import FastLLM

_TABLE = json.loads(files(__package__).joinpath("keys.json").read_text("utf-8"))

RELEASES = Releases("fast_llm", tuple(row["version"] for row in _TABLE["releases"]))
KNOWN: tuple[str, ...] = RELEASES.known
"""Releases covered, oldest first; the last is the main branch of 2026-07-20, which still calls itself 0.4.0."""


@dataclass(frozen=True, slots=True)
class Key:
    """History of a key: known from `since` on, gone with `until`; earlier releases have `before`, later ones `instead`."""

    key: str
    since: str = ""
    until: str = ""
    before: str = ""
    instead: str = ""

    def known(self, version: str) -> bool:
        """Whether release `version` has the key."""
        return RELEASES.within(version, self.since, self.until)


_ROWS = {row["key"]: Key(**row) for row in _TABLE["keys"]}
KEYS: Mapping[str, Key] = MappingProxyType({path: _ROWS.get(path, Key(path)) for path in fields(FastLLM)})
"""History of every key of the schema."""


RESHAPED = ("training.evaluators", "schedule.micro_batch_splits")
"""Keys whose values differ from those of the key before them."""


@cache
def moves() -> tuple[Move, ...]:
    """Keys that replace one of the same value, oldest first."""
    came = [key for key in KEYS.values() if key.before in KEYS and key.key not in RESHAPED]
    return tuple(renamed(key.before, key.key, key.since) for key in sorted(came, key=lambda key: RELEASES.place(key.since)))


@dataclass(frozen=True)
class Release(AnyRelease):
    """One release: the keys that it has, their defaults, and what it checks."""

    among: ClassVar[Releases] = RELEASES

    @cached_property
    def keys(self) -> frozenset[str]:
        """Paths that it has."""
        return frozenset(path for path, key in KEYS.items() if key.known(self.version))

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        """What it takes for keys that are not given; keys without a default of their own are not there."""
        known = {path: field.default for path, field in fields(FastLLM).items() if path in self.keys}
        return MappingProxyType({path: value for path, value in known.items() if value is not None})

    @property
    def overwrites_buffers(self) -> bool:
        """Whether a ZeRO level replaces explicit buffer counts, where later releases refuse them (pull request 211)."""
        return not self.since("0.3.0")

    @property
    def counts_nodes(self) -> bool:
        """Whether nodes must be whole: world_size a multiple of local_world_size."""
        return not self.since(KNOWN[-1])

    @property
    def has_batch(self) -> bool:
        """Whether the batch has a section of its own; later it is in `schedule` and `data`."""
        return not self.since("0.4.0")


@cache
def release(version: str) -> Release:
    """The release `version`; `VersionError` if it is not covered."""
    return Release(version)
