"""Classes and functions that a stack's users import, implemented by the native engine. The engine
is loaded when a script first asks for a class or function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from bridge.errors import BridgeError
from bridge.stack.extras import install_command


@dataclass(frozen=True)
class Entries:
    """The classes and functions that a stack's users import. `title` is the title of the stack,
    `runtime` is the package that implements the classes and functions, and `before` is a prefix for
    names in messages.
    """

    title: str
    runtime: str
    before: str = ""

    def load(self, module: str, names: Mapping[str, str], name: str) -> Any:
        """Return the object `name` of `module`, loaded from the runtime's module `names[name]`.

        Raises `AttributeError` if `names` lacks `name`, and `BridgeError` if a library is missing.
        """
        if name not in names:
            raise AttributeError(
                f"module {module!r} has no attribute {name!r};"
                f" stagebridge provides these names of {self.title}: {', '.join(names)}"
            )
        for library in ("torch", "transformers"):
            if find_spec(library) is None:
                raise BridgeError(
                    f"{self.before}{name}: {library} is not installed;"
                    f" {install_command('engine,huggingface')}"
                )
        return getattr(import_module(f"{self.runtime}.{names[name]}"), name)
