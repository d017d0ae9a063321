"""What transformers makes of a config: the defaults of its family, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bridge.errors import BridgeError, ConfigError, nearest
from bridge.families import FAMILIES, Family, family_of, meaning
from bridge.findings import Finding, Origin
from bridge.plan import Plan
from bridge.rules import Effect, How
from compat.huggingface.schema import REST

Given = Mapping[str, Any]
KV = "num_key_value_heads"


def keys_of(given: Given) -> dict[str, Any]:
    """What of a config its family may read."""
    return {key: value for key, value in given.items() if key not in (REST, "model_type")}


def effective(given: Given) -> dict[str, Any]:
    """Values by key; raises one `ConfigError` with every reason to refuse."""
    family = family_of(given.get("model_type"))
    if family is None:
        name = given["model_type"]
        raise ConfigError(f"model_type: found {name!r}, whose layers no plan has words for{nearest(name, FAMILIES)}")
    spelled = {name for key in family.keys.values() if any(name in given for name in key.names) for name in key.names}
    filled = {key: value for key, value in family.defaults.items() if key not in spelled and not _other(key, given)}
    model = meaning(keys_of(given), family)
    if filled.get(KV) != model.get("model.kv_heads"):
        filled.pop(KV, None)
    ConfigError.raise_if((*_sizes(model), *_width(model, family)))
    try:
        Plan.of(model)
    except BridgeError as error:
        raise ConfigError(*(problem.replace("model.", "", 1) for problem in error.problems)) from None
    return {**{key: tuple(value) if isinstance(value, list) else value for key, value in filled.items()}, **given}


def _other(key: str, given: Given) -> bool:
    """Whether a default is taken back by the other spelling of rotary positions."""
    return key in ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "rotary_pct") and (
        "rope_parameters" in given or (key == "rope_scaling" and "rope_scaling" in given)
    )


def _sizes(model: Mapping[str, Any]) -> Iterator[str]:
    heads, kv = model.get("model.heads"), model.get("model.kv_heads")
    latent = model.get("model.attention.latent.kv_rank")
    if heads and kv and heads % kv and not latent:
        yield f"num_key_value_heads: found {kv}, expected a divisor of the attention heads ({heads})"
    experts, chosen = model.get("model.experts"), model.get("model.moe.top_k")
    if experts and chosen and chosen > experts:
        yield f"num_experts_per_tok: found {chosen}, expected at most the experts ({experts})"
    layers = model.get("model.layers")
    for path in ("attention.windowed", "rotary.layers", "moe.layers"):
        if (blocks := model.get(f"model.{path}")) is not None and layers and len(blocks) != layers:
            yield f"model_type: a list names {len(blocks)} blocks, and there are {layers}"


DIVIDING = frozenset({"gpt_neox", "gpt2", "gptj", "opt", "bloom", "falcon", "gpt_bigcode", "olmoe", "phi"})
"""Families whose code divides the hidden size by the heads and stops where that leaves a rest; others round it down."""


def _width(model: Mapping[str, Any], family: Family) -> Iterator[str]:
    heads, hidden = model.get("model.heads"), model.get("model.hidden")
    if family.name in DIVIDING and heads and hidden and hidden % heads:
        yield f"num_attention_heads: found {heads}; {family.name} divides the hidden size ({hidden}) by them"


def foreign(given: Given, origins: Mapping[str, Origin]) -> Iterator[Finding]:
    """Layers that no plan has words for: what is read of such a model is no more than its sizes."""
    family = FAMILIES.get(given.get("model_type") or "")
    if family is not None and family.foreign:
        message = f"{family.foreign}, which no plan has words for; only what every model has is read"
        yield Finding("model_type", message, Effect.NUMBERS, True, None, family.name, origin=origins.get("model_type"))


def missing(given: Given) -> Iterator[Finding]:
    """The model type, without which no release reads the file (models/auto/configuration_auto.py: AutoConfig)."""
    if "model_type" not in given:
        message = "transformers cannot tell what model this is; name its model type"
        yield Finding("model_type", message, Effect.STOPS, False, How.MISSING)
