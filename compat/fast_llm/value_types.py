"""Types of single Fast-LLM fields: the values that each field accepts, and whether it accepts null."""

from __future__ import annotations

from typing import Any

from bridge.plan.values import Leaves
from compat.fast_llm.schema import FastLLM

LEAVES = Leaves(FastLLM)
nullable = LEAVES.nullable


def as_typed(path: str, value: Any) -> Any:
    """Convert `value` to the type of the schema, with checks as strict as Fast-LLM's. Raises
    `ValueError` with the expected type.
    """
    try:
        return LEAVES.as_typed(path, value)
    except ValueError as error:
        raise ValueError(f"{error}{', or null' if nullable(path) else ''}") from None
