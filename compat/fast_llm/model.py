"""Facts about the model in its own section, whose layout changed from release to release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.config import nest
from bridge.rules import Context, Effect, Group, convert

BASE = "model.base_model"

OLDEST = {
    "model.layers": "transformer.num_layers",
    "model.hidden": "transformer.hidden_size",
    "model.heads": "transformer.num_attention_heads",
    "model.kv_heads": "transformer.head_groups",
    "model.ffn": "transformer.ffn_hidden_size",
    "model.experts": "transformer.num_experts",
    "model.vocab": "vocab_size",
    "model.tied": "tie_word_embeddings",
}
BLOCKS = {
    "model.layers": "decoder.num_blocks",
    "model.heads": "decoder.block.mixer.heads",
    "model.kv_heads": "decoder.block.mixer.head_groups",
    "model.ffn": "decoder.block.mlp.intermediate_size",
    "model.experts": "decoder.block.mlp.experts",
}
MIDDLE = {
    **BLOCKS,
    "model.hidden": "embeddings_layer.hidden_size",
    "model.vocab": "embeddings_layer.vocab_size",
    "model.tied": "output_layer.tied_weight",
}
NEWEST = {
    **BLOCKS,
    "model.hidden": "hidden_size",
    "model.vocab": "embeddings.vocab_size",
    "model.tied": "tied_embedding_weight",
}
LAYOUTS = (NEWEST, MIDDLE, OLDEST)
"""Where each fact stands inside `model.base_model`, newest release first."""


def layout(context: Context) -> Mapping[str, str]:
    """Where the release of `context` keeps facts."""
    return NEWEST if context.since("0.4.0") else MIDDLE if context.since("0.3.0") else OLDEST


def facts(values: Group) -> dict[str, int | bool]:
    """Plan fields that the model section tells, in whatever layout it is."""
    model = values.get(BASE)
    found: dict[str, int | bool] = {}
    for places in LAYOUTS if isinstance(model, Mapping) else ():
        for ours, place in places.items():
            value = _at(model, place)
            if _fits(ours, value):
                found.setdefault(ours, value)
    return found


def _fits(ours: str, value: Any) -> bool:
    return isinstance(value, bool) if ours == "model.tied" else type(value) is int and value > 0


def _at(data: Any, place: str) -> Any:
    for name in place.split("."):
        data = data.get(name) if isinstance(data, Mapping) else None
    return data


def _write(values: Group, context: Context) -> Group:
    known = {place: values[ours] for ours, place in layout(context).items() if values.get(ours) is not None}
    return {BASE: nest(known)} if known else {}


def _more(values: Group) -> bool:
    """Whether the section says more than its facts."""
    return _leaves(values.get(BASE)) > len(facts(values))


def _leaves(data: Any) -> int:
    return sum(map(_leaves, data.values())) or 1 if isinstance(data, Mapping) else 1


RULE = convert(
    BASE,
    tuple(NEWEST),
    lambda values, context: facts(values),
    _write,
    effect=Effect.NONE,
    blurs=_more,
    lossy="a Plan holds sizes of the model; the rest of it is defined where it is trained",
    note="the model is defined by the training script",
    source="models/gpt/config.py and layers/, whose layout changed in 0.3.0 and 0.4.0",
)
