"""Facts about each Fast-LLM release: its keys, their defaults, and checks that changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, ClassVar

from bridge.config import fields
from bridge.moves import Move, renamed
from bridge.releases import Release as AnyRelease
from bridge.releases import Releases, table
from compat.fast_llm.schema import FastLLM

_TABLE = table(__name__, "keys.json")

RELEASES = Releases("fast_llm", tuple(row["version"] for row in _TABLE["releases"]))
KNOWN: tuple[str, ...] = RELEASES.known
"""Covered releases, oldest first.

The last is the main branch of 2026-07-20, which still has the version 0.4.0.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """The history of a key that releases [since, until) have.

    Earlier releases have the key `before` in its place, later releases `instead`.
    """

    key: str
    since: str = ""
    until: str = ""
    before: str = ""
    instead: str = ""

    def known(self, version: str) -> bool:
        """Whether release `version` has the key."""
        return RELEASES.within(version, self.since, self.until)


_ROWS = {row["key"]: Key(**row) for row in _TABLE["keys"]}
KEYS: Mapping[str, Key] = MappingProxyType(
    {path: _ROWS.get(path, Key(path)) for path in fields(FastLLM)}
)
"""The history of each key of the schema."""


RESHAPED = ("training.evaluators", "schedule.micro_batch_splits")
"""Names of keys whose values differ in form from those of the key that they replace."""


@cache
def moves() -> tuple[Move, ...]:
    """Renamed keys whose values stayed the same, oldest first."""
    came = [key for key in KEYS.values() if key.before in KEYS and key.key not in RESHAPED]
    return tuple(
        renamed(key.before, key.key, key.since)
        for key in sorted(came, key=lambda key: RELEASES.place(key.since))
    )


@dataclass(frozen=True)
class Release(AnyRelease):
    """One release: its keys, their defaults, and checks that not all releases make."""

    among: ClassVar[Releases] = RELEASES

    @cached_property
    def keys(self) -> frozenset[str]:
        """Paths of its keys."""
        return self.names(KEYS)

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        """Defaults by path; keys without a default are left out."""
        known = {
            path: field.default for path, field in fields(FastLLM).items() if path in self.keys
        }
        return MappingProxyType({path: value for path, value in known.items() if value is not None})

    @property
    def overwrites_buffers(self) -> bool:
        """Whether a ZeRO level overwrites given numbers of buffers.

        Since 0.3.0, Fast-LLM refuses the two settings together (pull request 211).
        """
        return not self.since("0.3.0")

    @property
    def counts_nodes(self) -> bool:
        """Whether world_size must be a multiple of local_world_size."""
        return not self.since(KNOWN[-1])

    @property
    def has_batch(self) -> bool:
        """Whether the batch has a section of its own; since 0.4.0 its settings are in `schedule` and `data`."""
        return not self.since("0.4.0")


@cache
def release(version: str) -> Release:
    """The facts of a release. Raises `VersionError` if it is not covered."""
    return Release(version)
