"""Names of a stack's own with the native engine behind them, which is loaded when a script first asks for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from bridge.errors import BridgeError


@dataclass(frozen=True)
class Entries:
    """The entries of a stack: its `title`, the package that has them, and what stands `before` a name in messages."""

    title: str
    runtime: str
    before: str = ""

    def load(self, module: str, names: Mapping[str, str], name: str) -> Any:
        """What `module` has under `name`, from the module of the runtime that `names` tells.

        Raises `AttributeError` for any other name, and `BridgeError` if a library is missing.
        """
        if name not in names:
            raise AttributeError(
                f"module {module!r} has no attribute {name!r}; of {self.title}'s own it has {', '.join(names)}"
            )
        for library in ("torch", "transformers"):
            if find_spec(library) is None:
                raise BridgeError(
                    f"{self.before}{name}: {library} is not installed;"
                    " pip install 'stagebridge[engine,huggingface]'"
                )
        return getattr(import_module(f"{self.runtime}.{names[name]}"), name)
