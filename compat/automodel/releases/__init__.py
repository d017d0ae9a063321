"""What each AutoModel release knows: settings, options of each strategy, and what it fills in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from types import MappingProxyType
from typing import Any, ClassVar

from bridge.releases import Release as AnyRelease
from bridge.releases import Releases

_FACTS: Mapping[str, Any] = json.loads(files(__package__).joinpath("keys.json").read_text("utf-8"))

RELEASES = Releases("automodel", tuple(_FACTS["releases"]))
KNOWN: tuple[str, ...] = RELEASES.known
"""Every release covered, oldest first; the last is the main branch of that day, whose package still says 0.5.0."""
DATES: Mapping[str, str] = MappingProxyType(_FACTS["dates"])
NEW_LAYOUT = "0.3.0"
"""Release in which `autopipeline` and the manager classes became one `distributed` section."""


@dataclass(frozen=True)
class Release(AnyRelease):
    """One release."""

    among: ClassVar[Releases] = RELEASES

    @property
    def nested(self) -> bool:
        """Whether the pipeline is a part of the `distributed` section."""
        return self.since(NEW_LAYOUT)

    def reads(self, path: str) -> bool:
        """Whether it has the setting at `path`."""
        return self.within(since(path), until(path))

    @cached_property
    def strategies(self) -> Mapping[str, frozenset[str]]:
        """Options that each strategy takes."""
        late = {name for name, end in _FACTS["until_megatron"].items() if not self.since(end)}
        own = {name: frozenset(options) for name, options in _FACTS["strategies"].items()}
        return {**own, "megatron_fsdp": own["megatron_fsdp"] | late}

    @cached_property
    def reduce_dtype(self) -> str:
        """Format in which FSDP2 reduces gradients unless told otherwise."""
        found = [value for start, value in _FACTS["reduce_dtype"].items() if self.since(start)]
        return str(found[-1])

    def defaults(self, part: str) -> Mapping[str, Any]:
        """What it fills in: for "pipeline", a strategy, or "" for what always holds."""
        kept: Mapping[str, Any] = _FACTS["defaults"][part]
        return kept


def since(path: str) -> str:
    """First release that has the setting at `path`."""
    return str(_FACTS["since"].get(path, KNOWN[0]))


def until(path: str) -> str:
    """First release that no longer has it; empty: it stays."""
    return str(_FACTS["until"].get(path, ""))


def instead(path: str) -> str:
    """What took its place; empty: nothing."""
    return str(_FACTS["instead"].get(path, ""))


@cache
def release(version: str) -> Release:
    """The release `version`; `VersionError` if it is not covered."""
    return Release(version)
