"""The JSON Schemas of our own outputs as judges: what they do not name is not there."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.report import json_types

jsonschema = pytest.importorskip("jsonschema")


def closed(schema: Any) -> Any:
    """The same schema, by which an object has no key that is not in it: what a program may meet is all there."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(part) for key, part in schema.items()}
    return (
        {**inner, "additionalProperties": False}
        if isinstance(schema.get("properties"), dict)
        else inner
    )


def judge(name: str, part: str | None = None) -> Any:
    """A validator of what a command prints, or of a part of that by its type."""
    schema = json_types.schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    if part:
        schema = {"$ref": f"#/$defs/{part}", "$defs": schema["$defs"]}
    return jsonschema.Draft202012Validator(closed(schema))


def problems(name: str, data: Any, part: str | None = None) -> list[Any]:
    """Where what was printed is not what the schema says."""
    return [
        (problem.json_path, problem.message[:200], problem.context)
        for problem in judge(name, part).iter_errors(data)
    ]
