"""Values that no run can use: bounds that a stack's own parser does not check, as data beside its
releases.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from bridge.config import shown
from bridge.findings import Finding, Origin
from bridge.rules import Effect


@cache
def _table(package: str) -> tuple[tuple[str, str, float], ...]:
    """Rows of a package's `bounds.json`: the bound in words, its path and its number; no rows if
    there is no such file.
    """
    rows: Mapping[str, list[str]] = {}
    if (spec := find_spec(package)) is not None and spec.submodule_search_locations:
        file = files(package).joinpath("bounds.json")
        rows = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    # The words are also what the message prints ("at least 0"), so the number is their last word
    # and stands in no second column.
    return tuple(
        (words, path, float(words.rpartition(" ")[2]))
        for words, paths in rows.items()
        for path in paths
    )


def beyond(
    given: Mapping[str, Any], package: str, origins: Mapping[str, Origin]
) -> Iterator[Finding]:
    """A finding for each given number beyond a bound of `package`, even if the stack's parser
    accepts that number.
    """
    for words, path, limit in _table(package):
        value = _at(given, path)
        # A bool is an int in Python, but a switch has no bounds.
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        is_beyond = value < limit if words.startswith("at least") else value > limit
        if is_beyond:
            message = f"found {shown(value)}, which no run can use; expected {words}"
            yield Finding(
                path.replace(".*", ""), message, Effect.NUMBERS, True, origin=origins.get(path)
            )


def _at(given: Mapping[str, Any], path: str) -> Any:
    """The value at a path, also inside a section that the schema takes as one free mapping."""
    if path in given:
        return given[path]
    section, _, name = path.rpartition(".")
    free = given.get(section)
    return free.get(name) if isinstance(free, Mapping) else None
