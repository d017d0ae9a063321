"""The input of a reader, keys with the defaults of the family, and the facts about a target that a writer needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NULL = "null"
"""Stands for null, if null means something else than leaving the key out."""

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """Given keys, and the family's defaults for the others."""

    given: Group
    defaults: Group
    named: bool = True
    """Whether the family is known."""

    def find(self, *names: str) -> Any:
        """The value of the first name that is given, else of the first with a default; None for null or no value."""
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
    """The target of a written config: the family's defaults, and whether rotary positions go into `rope_parameters`."""

    defaults: Group
    grouped: bool = False

    def open(self, name: str) -> str | None:
        """The spelling of no value: `NULL` if the family has a default for the key, else None, which leaves the key out."""
        return NULL if self.defaults.get(name) is not None else None
