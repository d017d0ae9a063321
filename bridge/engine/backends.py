"""Finds the engines of the stacks, and what builds the model and data of their configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from bridge.stack.registry import OWN, PACKAGE, import_attribute, names

if TYPE_CHECKING:
    from bridge.engine.interface import Backend


@cache
def backends(*dialects: str | None) -> Mapping[str, Backend]:
    """Return engines by dialect: the engine of each dialect of our own, and of each dialect in
    `dialects`, that has a module `runtime.backend`.
    """
    engines = {}
    for name in names():
        runtime = f"{PACKAGE}.{name}.runtime"
        # Looking for a module imports its parents, so dialects that nobody named are not even
        # looked into.
        if (
            (name in OWN or name in dialects)
            and find_spec(runtime)
            and find_spec(f"{runtime}.backend")
        ):
            engines[name] = import_attribute(name, ".runtime.backend", "BACKEND")
    return engines


def opener(name: str) -> Callable[..., Any]:
    """Return the function that builds model and data for a config of the dialect `name`:
    `open_recipe(config, world, ...)`.
    """
    function: Callable[..., Any] = import_attribute(name, ".runtime.recipe", "open_recipe")
    return function
