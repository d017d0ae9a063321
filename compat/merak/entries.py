"""Entries: names of Merak's that load the engine when a script first asks for one, so that reading configs needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from bridge.errors import BridgeError


def entry(module: str, names: Mapping[str, str], name: str) -> Any:
    """What `module` has under `name`, from the module of the runtime that `names` tells. Raises `AttributeError` for others."""
    if name not in names:
        known = ", ".join(names)
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}; of Merak's own it has {known}"
        )
    for library in ("torch", "transformers"):
        if find_spec(library) is None:
            raise BridgeError(
                f"Merak.{name}: {library} is not installed; pip install 'stagebridge[engine,huggingface]'"
            )
    return getattr(import_module(f"compat.merak.runtime.{names[name]}"), name)


HOME = "compat.merak"
MODULES: Mapping[str, Mapping[str, str]] = {
    "utils": {},
    "utils.datasets": {"DynamicGenDataset": "generated"},
}
"""Modules of Merak's that are no files here, with what scripts import from them."""


class Names(ModuleType):
    """One of these modules."""

    __path__: tuple[str, ...] = ()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        """What a script asks for."""
        if name.startswith("__"):
            raise AttributeError(name)
        return entry(self.__name__, MODULES[self.__name__.removeprefix(f"{HOME}.")], name)


def listen() -> None:
    """Let Python import the modules of the table."""
    for path in MODULES:
        sys.modules.setdefault(f"{HOME}.{path}", Names(f"{HOME}.{path}"))
