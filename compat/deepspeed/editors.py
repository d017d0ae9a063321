"""The JSON Schema of a DeepSpeed file, for editors. The schema also allows "auto" for keys that
Hugging Face fills in.
"""

from __future__ import annotations

from typing import Any

from compat.deepspeed.auto import RULES
from compat.deepspeed.schema import DeepSpeed

CODE = "code"
"""Name of the schema's section for the training script's settings. The JSON Schema leaves the
section out, because no file of DeepSpeed contains it.
"""


def schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a DeepSpeed config file."""
    whole = DeepSpeed.model_json_schema()
    whole["properties"].pop(CODE, None)
    for path in RULES:
        *sections, key = path.split(".")
        place = whole
        for name in sections:
            # pydantic keeps each section once below $defs, and a
            # property that may be null refers to it in an anyOf.
            choices = place["properties"][name]["anyOf"]
            (section,) = (
                choice["$ref"].rpartition("/")[2] for choice in choices if "$ref" in choice
            )
            place = whole["$defs"][section]
        leaf = place["properties"][key]
        leaf["anyOf"] = [*leaf["anyOf"], {"const": "auto"}]
    return whole
