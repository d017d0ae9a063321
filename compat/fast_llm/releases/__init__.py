"""Facts about each Fast-LLM release: its keys, the defaults of the keys, and checks that changed
between releases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, ClassVar

from bridge.plan.section import fields
from bridge.stack.releases import Release as AnyRelease, Releases, table
from bridge.stack.setting_renames import Move, rename_setting
from compat.fast_llm.schema import FastLLM

DATES: Mapping[str, str] = MappingProxyType(table(__name__, "known.json"))
"""Releases with their dates, oldest first: commits 519e9cb2, f4a0cddd, ca3b0008, 8cc55571 and 7d61a1ba."""
RELEASES = Releases("fast_llm", tuple(DATES))
KNOWN: tuple[str, ...] = RELEASES.known
"""Releases in the tables, oldest first. The last is the main branch of 2026-07-20, which still has
the version number 0.4.0.
"""
_ROWS: Sequence[Mapping[str, Any]] = table(__name__, "keys.json")
_DECIDED: Mapping[str, Mapping[str, str]] = table(__name__, "decided.json")
"""Facts that no class of Fast-LLM shows: for a key, the key that earlier releases have instead, and the
key that later releases have instead.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """The history of a key. Releases from `since` up to, but not including, `until` have it.
    Earlier releases have the key `before` instead, and later releases the key `instead`.
    """

    key: str
    since: str = ""
    until: str = ""
    before: str = ""
    instead: str = ""


def _key(path: str) -> Key:
    rows = [row for row in _ROWS if row["key"] == path]  # oldest first
    replacement = (_DECIDED[column].get(path, "") for column in ("before", "instead"))
    return Key(path, rows[0].get("since", ""), rows[-1].get("until", ""), *replacement)


KEYS: Mapping[str, Key] = MappingProxyType({path: _key(path) for path in fields(FastLLM)})
"""The history of each key of the schema."""


RESHAPED = ("training.evaluators", "schedule.micro_batch_splits")
"""Keys whose values have another form than the values of the key that they replace."""


@cache
def moves() -> tuple[Move, ...]:
    """Return the moves of keys that were renamed and whose values stayed the same, oldest first."""
    came = [key for key in KEYS.values() if key.before in KEYS and key.key not in RESHAPED]
    return tuple(
        rename_setting(key.before, key.key, key.since)
        for key in sorted(came, key=lambda key: RELEASES.place(key.since))
    )


@dataclass(frozen=True)
class Release(AnyRelease):
    """One release: its keys, the defaults of the keys, and the checks that only some releases make."""

    among: ClassVar[Releases] = RELEASES

    @cached_property
    def keys(self) -> frozenset[str]:
        """Paths of its keys."""
        return self.names(KEYS)

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        """Defaults of the release by path. Keys without a default are left out."""
        values = {
            row["key"]: row["default"]
            for row in _ROWS
            if "default" in row and self.within(row.get("since", ""), row.get("until", ""))
        }
        return MappingProxyType({path: values[path] for path in KEYS if path in values})

    @property
    def overwrites_buffers(self) -> bool:
        """Whether a ZeRO level replaces numbers of buffers in the config. Since 0.3.0, Fast-LLM
        refuses a config that has both (pull request 211).
        """
        return not self.since("0.3.0")

    @property
    def counts_nodes(self) -> bool:
        """Whether the release requires world_size to be a multiple of local_world_size."""
        return not self.since("0.4.0+20260720")

    @property
    def has_batch(self) -> bool:
        """Whether the batch has a section of its own. Since 0.4.0 its settings are in `schedule`
        and `data`.
        """
        return not self.since("0.4.0")


@cache
def release(version: str) -> Release:
    """Return the facts of release `version`. Raises `VersionError` for an unknown release."""
    return Release(version)
