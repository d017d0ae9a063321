"""The stacks: one folder each, found by being there, here or in a folder that STAGEBRIDGE_PATH names."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from bridge.dialect import Dialect
from bridge.errors import BridgeError, nearest

if TYPE_CHECKING:
    from bridge.backend import Backend
    from bridge.translation import Result


PATH = "STAGEBRIDGE_PATH"
"""Environment variable with folders that hold further dialects, separated as in PATH."""

__path__ = [*__path__, *(folder for folder in os.environ.get(PATH, "").split(os.pathsep) if folder)]


def names() -> tuple[str, ...]:
    """Names of all dialects, in alphabetical order."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg))


@cache
def load(name: str) -> Dialect:
    """The dialect in folder `name`; `BridgeError` with the nearest name if there is none."""
    if name not in names():
        raise BridgeError(f"{name}: unknown dialect; known are {', '.join(names())}{nearest(name, names())}")
    dialect: Dialect = import_module(f"compat.{name}").DIALECT
    return dialect


@cache
def backends() -> Mapping[str, Backend]:
    """The engines of those dialects that have a module `backend`, by dialect."""
    found = [name for name in names() if find_spec(f"compat.{name}.backend")]
    return {name: import_module(f"compat.{name}.backend").BACKEND for name in found}


def translate(
    source: Any,
    theirs: str,
    to: str,
    *,
    from_version: str | None = None,
    to_version: str | None = None,
    world_size: int | None = None,
    lenient: bool = False,
) -> Result:
    """Read `source` in dialect `theirs` and translate it to dialect `to`; `BridgeError` with every problem."""
    from bridge.translation import translate

    config = load(theirs).read(source, from_version, world_size, lenient)
    return translate(config, load(to), to_version, world_size)
