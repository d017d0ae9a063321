"""Lets scripts import modules of Merak for which this package has no files. The engine is loaded when a
script first uses a name of such a module, so that reading configs needs no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from bridge.stack.drop_in import Entries

entry = Entries("Merak", "compat.merak.runtime", "Merak.").load

HOME = "compat.merak"
MODULES: Mapping[str, Mapping[str, str]] = {
    "utils": {},
    "utils.datasets": {"DynamicGenDataset": "generated"},
}
"""Modules of Merak that have no files in this package, with the names that scripts import from
them.
"""


class Names(ModuleType):
    """One of these modules."""

    __path__: tuple[str, ...] = ()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        """Return the object behind `name`. The engine is loaded when a script first uses it."""
        if name.startswith("__"):
            raise AttributeError(name)
        return entry(self.__name__, MODULES[self.__name__.removeprefix(f"{HOME}.")], name)


def listen() -> None:
    """Register the modules of the table, so that Python can import them."""
    for path in MODULES:
        sys.modules.setdefault(f"{HOME}.{path}", Names(f"{HOME}.{path}"))
