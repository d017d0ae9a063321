"""Recognises configs and command lines of Fast-LLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

SETTING = re.compile(r"(model|training|schedule|batch|optimizer|data|run)\.[\w.]+=")


def score(data: Any) -> int:
    """Return a score for how surely `data` is a Fast-LLM config: high for sections of a model,
    lower for only parallel sizes or overrides, else 0.
    """
    if isinstance(data, list):
        return 3 * any(isinstance(word, str) and SETTING.match(word) is not None for word in data)
    if not isinstance(data, Mapping):
        return 0
    model = data.get("model")
    parts = [part for part in (model, data) if isinstance(part, Mapping)]
    sections = sum(name in part for part in parts for name in ("multi_stage", "base_model"))
    # Other stacks have sections called `model` and `distributed` too, so the names inside them
    # count more.
    return 4 * sections + 3 * _sizes(model) + 3 * _sizes(data)


def _sizes(data: Any) -> bool:
    """Return whether `data` has a `distributed` section with keys that only Fast-LLM has."""
    ranks = data.get("distributed") if isinstance(data, Mapping) else None
    names = (
        "tensor_parallel",
        "pipeline_parallel",
        "sequence_data_parallel",
        "compute_dtype",
        "training_dtype",
    )
    return isinstance(ranks, Mapping) and any(name in ranks for name in names)
