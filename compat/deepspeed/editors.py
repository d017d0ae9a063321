"""The JSON Schema of a DeepSpeed file, for editors: that of the schema, and "auto" where Hugging Face fills it in."""

from __future__ import annotations

from typing import Any

from compat.deepspeed.auto import RULES
from compat.deepspeed.schema import DeepSpeed

CODE = "code"
"""The code part. No file holds it."""


def schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of a file."""
    whole = DeepSpeed.model_json_schema()
    whole["properties"].pop(CODE, None)
    for path in RULES:
        *sections, key = path.split(".")
        place = whole
        for name in sections:
            place = _within(whole, place["properties"][name])
        leaf = place["properties"][key]
        leaf["anyOf"] = [*leaf["anyOf"], {"const": "auto"}]
    return whole


def _within(whole: dict[str, Any], leaf: dict[str, Any]) -> dict[str, Any]:
    """The section that a property holds."""
    (name,) = (one["$ref"].rpartition("/")[2] for one in leaf["anyOf"] if "$ref" in one)
    found: dict[str, Any] = whole["$defs"][name]
    return found
