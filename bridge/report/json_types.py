"""The JSON outputs of commands as types: the rows of json_types.json, from which JSON Schemas and the stub
for a type checker are made. A type checker compares the code with these types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import reduce
from importlib.resources import files
from operator import or_
from typing import Any, Literal, NotRequired  # noqa: F401 - rows name it

from typing_extensions import TypedDict

from bridge.report.exit_codes import Exit  # noqa: F401
from bridge.stack.rules import Effect, How  # noqa: F401

Verdict = Literal["same", "in part", "differs", "not run"]
Number = float | Literal["nan", "inf", "-inf"] | None
"""A number. A number that is not finite is text, and a number that is not known is None."""


def read_rows() -> dict[str, Any]:
    """Return json_types.json: `types`, each with its name, the type that it extends, its docstring and its
    fields, and `outputs`, the types of each command's output.
    """
    rows: dict[str, Any] = json.loads(
        files("bridge.report").joinpath("json_types.json").read_text("utf-8")
    )
    return rows


def _build_types(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return the types by name. The functional form of `TypedDict` extends no type, so a type gets the fields
    of the type that it extends.
    """
    fields: dict[str, dict[str, str]] = {"": {}}
    built: dict[str, Any] = {}
    for row in rows["types"]:
        name = row["name"]
        fields[name] = fields[row.get("base", "")] | row["fields"]
        built[name] = TypedDict(name, fields[name])  # type: ignore[misc]
        built[name].__doc__ = row["doc"]
    return built


_ROWS = read_rows()
globals().update(_build_types(_ROWS))
OUTPUTS: Mapping[str, Any] = {
    name: reduce(or_, map(globals().__getitem__, types)) for name, types in _ROWS["outputs"].items()
}
"""The output of each command with `--json`; `train` prints one such object on each line. `baseline`
is the file of `--write-baseline`.
"""


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema (2020-12) of an output. Raises `KeyError` for an unknown name."""
    from pydantic import TypeAdapter

    body = TypeAdapter(OUTPUTS[name]).json_schema(mode="serialization")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"stagebridge {name}",
        **body,
    }
