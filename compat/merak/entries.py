"""Entries: names of Merak's that load the engine when a script first asks for one, so that reading configs needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from bridge.errors import BridgeError


def entry(module: str, names: Mapping[str, str], name: str) -> Any:
    """What `module` has under `name`, from the module of the runtime that `names` tells. Raises `AttributeError` for others."""
    if name not in names:
        known = ", ".join(names)
        raise AttributeError(f"module {module!r} has no attribute {name!r}; of Merak's own it has {known}")
    for library in ("torch", "transformers"):
        if find_spec(library) is None:
            raise BridgeError(f"Merak.{name}: {library} is not installed; pip install 'stagebridge[engine,huggingface]'")
    return getattr(import_module(f"compat.merak.runtime.{names[name]}"), name)
