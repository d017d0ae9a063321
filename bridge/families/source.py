"""The keys of a model's config with the defaults of its family behind them, and what a writer knows of its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NULL = "null"
"""Stands for a key that is given as null where leaving it out would mean something else."""

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """Keys as given, and what the family takes where they are not."""

    given: Group
    defaults: Group
    named: bool = True
    """Whether the family is known."""

    def find(self, *names: str) -> Any:
        """The value of the first name that is given, else of the first with a default; None: null, or nothing."""
        for values in (self.given, self.defaults):
            for name in names:
                if name in values:
                    return None if values[name] == NULL else values[name]
        return None

    def has(self, name: str) -> bool:
        """Whether the key is given, null or not."""
        return name in self.given


@dataclass(frozen=True)
class Target:
    """What a config is written for: the family's defaults, and whether rotary positions stand in `rope_parameters`."""

    defaults: Group
    grouped: bool = False

    def open(self, name: str) -> str | None:
        """How to say that a key has no value: null where leaving it out would give it one."""
        return NULL if self.defaults.get(name) is not None else None
