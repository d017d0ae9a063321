"""Dialects that users add. A dialect's declarations are read from the syntax of its source, so that
the search for dialects runs none of the code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DIALECT, SIGNATURE = "DIALECT", "SIGNATURE"
"""Names that the `__init__.py` of a dialect sets: the dialect object, and the settings or flags by
which a file of this dialect is recognised.
"""
LARGEST = 2**20
"""Most bytes of an `__init__.py` that are read."""


@dataclass(frozen=True)
class Plugin:
    """A dialect in a folder of the user. A dialect with an empty signature is used only if the user
    names it.
    """

    name: str
    place: Path
    signature: tuple[str, ...] = ()

    def matches(self, data: Any) -> bool:
        """Return whether parsed `data` has at least one entry of the signature.

        An entry is a dotted setting of a mapping, or a flag in a list of words or in a launch
        command of a script.
        """
        if isinstance(data, Mapping):
            return any(_has(data, mark.split(".")) for mark in self.signature)
        runs = getattr(data, "launches", ())
        words = data if isinstance(data, list) else [word for run in runs for word in run.texts]
        names = {str(word).partition("=")[0] for word in words}
        return not names.isdisjoint(self.signature)


def _has(data: Any, parts: Sequence[str]) -> bool:
    for part in parts:
        if not isinstance(data, Mapping) or part not in data:
            return False
        data = data[part]
    return True


@cache
def find_dialects(
    folders: tuple[str, ...], own_names: tuple[str, ...]
) -> tuple[tuple[Plugin, ...], tuple[str, ...]]:
    """Return the dialects in `folders`, the first one of each name, and a line with the reason for
    each folder that was left out.

    `own_names` are the names of our own dialects.
    """
    plugins: dict[str, Plugin] = {}
    faults: list[str] = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            faults.append(f"{folder}: no such folder; correct STAGEBRIDGE_PATH")
            continue
        for place in sorted(path.parent for path in folder.glob("*/__init__.py")):
            plugin_or_reason = _read(place)
            if isinstance(plugin_or_reason, str):
                faults.append(f"{place}: {plugin_or_reason}; this folder was left out")
            elif place.name in own_names or place.name in plugins:
                faults.append(
                    f"{place}: another dialect has the name {place.name} already; this "
                    "folder was left out"
                )
            else:
                plugins[place.name] = plugin_or_reason
    return tuple(plugins.values()), tuple(faults)


def _read(place: Path) -> Plugin | str:
    """Return the dialect that the folder declares, or the reason why the folder declares none."""
    if not place.name.isidentifier():
        return "the folder's name is not a valid name of a Python module"
    try:
        with open(place / "__init__.py", "rb") as stream:
            tree = ast.parse(stream.read(LARGEST))
    # A file of anybody: null bytes raise ValueError, and deep expressions RecursionError or
    # MemoryError in the parser.
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"the file __init__.py cannot be read ({type(error).__name__})"
    assignments = dict(_top_level_names(tree.body))
    if DIALECT not in assignments:
        return f"the file __init__.py does not set {DIALECT}"
    value = assignments.get(SIGNATURE)
    items = value.elts if isinstance(value, ast.Tuple | ast.List) else []
    texts = (
        item.value
        for item in items
        if isinstance(item, ast.Constant) and isinstance(item.value, str)
    )
    return Plugin(place.name, place, tuple(texts))


def _top_level_names(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield each name that a module sets at its top level, with the syntax of the value."""
    for node in body:
        if isinstance(node, ast.Assign):
            yield from (
                (target.id, node.value) for target in node.targets if isinstance(target, ast.Name)
            )
        elif (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.value is not None
        ):
            yield node.target.id, node.value
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, None) for alias in node.names)
