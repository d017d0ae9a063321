"""Bounds beyond which no run can use a value, as data for each stack. The stack's own parser does
not check these bounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from bridge.files.shown import show_value
from bridge.stack.findings import Finding, Origin
from bridge.stack.rules import Effect


@cache
def _table(package: str) -> tuple[tuple[str, str, float], ...]:
    """Return the rows of a package's `bounds.json`, each with the bound in words, the path and the
    bound as a number. Return no rows if there is no such file.
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
    settings: Mapping[str, Any], package: str, origins: Mapping[str, Origin]
) -> Iterator[Finding]:
    """Yield a finding for each given number beyond a bound of `package`, even if the stack's parser
    accepts this number.
    """
    for words, path, limit in _table(package):
        value = _at(settings, path)
        # A bool is an int in Python, but a switch has no bounds.
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        is_beyond = value < limit if words.startswith("at least") else value > limit
        if is_beyond:
            message = f"found {show_value(value)}, which no run can use; expected {words}"
            yield Finding(
                path.replace(".*", ""), message, Effect.NUMBERS, True, origin=origins.get(path)
            )


def _at(settings: Mapping[str, Any], path: str) -> Any:
    """Return the value of `settings` at a path. The value may also be inside a section that the schema
    takes as one free mapping.
    """
    if path in settings:
        return settings[path]
    section, _, name = path.rpartition(".")
    free = settings.get(section)
    return free.get(name) if isinstance(free, Mapping) else None
