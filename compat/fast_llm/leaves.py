"""Fast-LLM's values one at a time: what a field takes, null among them or not."""

from __future__ import annotations

from typing import Any

from bridge.leaves import Leaves
from compat.fast_llm.schema import FastLLM

LEAVES = Leaves(FastLLM)
nullable = LEAVES.nullable


def typed(path: str, value: Any) -> Any:
    """`value` as the schema types it, as strictly as Fast-LLM; raises `ValueError` with what was expected."""
    try:
        return LEAVES.typed(path, value)
    except ValueError as error:
        raise ValueError(f"{error}{', or null' if nullable(path) else ''}") from None
