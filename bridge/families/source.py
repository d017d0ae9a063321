"""The input of readers (keys with the family's defaults), and the facts that writers need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NULL = "null"
"""Value that stands for null if null and a missing key have different meanings."""

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """Given keys, and the family's defaults for the others."""

    given: Group
    defaults: Group
    named: bool = True
    """Whether the family is known."""

    def find(self, *names: str) -> Any:
        """The value of the first given name, else of the first name with a default.

        None for null, and if no name has a value.
        """
        for values in (self.given, self.defaults):
            for name in names:
                if name in values:
                    return None if values[name] == NULL else values[name]
        return None

    def has(self, name: str) -> bool:
        """Whether the key is given, even as null."""
        return name in self.given


@dataclass(frozen=True)
class Target:
    """The target of a written config: the family's defaults, and whether rotary positions go into `rope_parameters`."""

    defaults: Group
    grouped: bool = False

    def open(self, name: str) -> str | None:
        """The spelling of no value: `NULL` if the family has a default for the key, else None, which leaves the key out."""
        return NULL if self.defaults.get(name) is not None else None
