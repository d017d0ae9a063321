"""Arguments of the functions that read and write keys: `Source` has the config's keys and the
family's defaults, and `Target` has facts about the config to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NULL = "null"
"""Value that stands for an explicit null, where null and a missing key have different meanings."""

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """The keys of a config, and the family's defaults for keys that the config does not have."""

    given: Group
    defaults: Group
    named: bool = True
    """Whether the family of the config is known."""

    def find(self, *names: str) -> Any:
        """Return the value of the first of these keys that the config has. If it has none of them,
        return the first default among them.

        Return None if the value is null, or if no key has a value or a default.
        """
        for values in (self.given, self.defaults):
            for name in names:
                if name in values:
                    return None if values[name] == NULL else values[name]
        return None

    def has(self, name: str) -> bool:
        """Return whether the config has the key, even with the value null."""
        return name in self.given


@dataclass(frozen=True)
class Target:
    """Facts about the config to write: the family's defaults, and whether rotary positions are
    written as `rope_parameters`.
    """

    defaults: Group
    grouped: bool = False

    def open(self, name: str) -> str | None:
        """Return the value to write for the key `name` that the plan leaves open: `NULL` if the
        family has a default for the key, else None, so that the key is left out.
        """
        return NULL if self.defaults.get(name) is not None else None
