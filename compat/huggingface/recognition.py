"""Recognises configs of models in the Hugging Face format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MARKS = (
    "architectures",
    "transformers_version",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "n_embd",
    "n_layer",
)


def score(data: Any) -> int:
    """Return a score for how surely `data` is a model's config: 0 without a model type, else higher
    for each key that only such configs have.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("model_type"), str):
        return 0
    return 3 + sum(name in data for name in MARKS)


def find_text_decoder(data: Any) -> Mapping[str, Any] | None:
    """Return the config of the text decoder in that of a model with several parts; None if `data` has none."""
    inner = data.get("text_config") if isinstance(data, Mapping) else None
    return inner if isinstance(inner, Mapping) and "model_type" in inner else None
