"""Computes the effective values of a config, with the defaults of its family, and refuses wrong
values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bridge.errors import BridgeError, ConfigError, nearest
from bridge.plan.families import FAMILIES, Family, family_of, meaning
from bridge.plan.families.setting_types import REST
from bridge.plan.plan import Plan
from bridge.stack.findings import Finding, Origin
from bridge.stack.rules import Effect, How

Given = Mapping[str, Any]
KV = "num_key_value_heads"


def keys_of(settings: Given) -> dict[str, Any]:
    """Return a config without its model type and without unknown keys. The family may read the
    remaining keys.
    """
    return {key: value for key, value in settings.items() if key not in (REST, "model_type")}


def effective(settings: Given) -> dict[str, Any]:
    """Return the effective values by key. Raises one `ConfigError` with every refusal."""
    family = family_of(settings.get("model_type"))
    if family is None:
        name = settings["model_type"]
        raise ConfigError(
            f"model_type: found {name!r}, whose layers stagebridge cannot translate{nearest(name, FAMILIES)}"
        )
    # A field may have several names. If one of them is given, the defaults of the others must not
    # stand beside it.
    names = {
        name
        for key in family.keys.values()
        if any(name in settings for name in key.names)
        for name in key.names
    }
    defaults = {}
    for key, value in family.defaults.items():
        # The other spelling of rotary positions, one mapping for all of them, replaces the defaults
        # of single keys.
        elsewhere = key in ROTARY and "rope_parameters" in settings
        if key not in names and not elsewhere and not (key == "rope_scaling" and key in settings):
            defaults[key] = value
    model = meaning(keys_of(settings), family)
    # A default number of key and value heads belongs to the family's default model, and need not fit this one.
    if defaults.get(KV) != model.get("model.kv_heads"):
        defaults.pop(KV, None)
    ConfigError.raise_if(_sizes(model, settings, family))
    try:
        Plan.of(model)
    except BridgeError as error:
        raise ConfigError(
            *(problem.replace("model.", "", 1) for problem in error.problems)
        ) from None
    return {
        **{
            key: tuple(value) if isinstance(value, list) else value
            for key, value in defaults.items()
        },
        **settings,
    }


ROTARY = (
    "rope_theta",
    "rope_scaling",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "rotary_pct",
)
"""Separate keys for settings of rotary positions, which `rope_parameters` replaces."""
LISTS = {
    "attention.windowed": ("layer_types",),
    "rotary.layers": ("no_rope_layers", "layer_types"),
    "moe.layers": ("mlp_layer_types", "is_moe_layer"),
}
"""Keys that may hold a list with one entry for each block, by the plan field that they set."""
DIVIDING = frozenset(
    {"gpt_neox", "gpt2", "gptj", "opt", "bloom", "falcon", "gpt_bigcode", "olmoe", "phi"}
)
"""Families whose code stops if the number of heads does not divide the hidden size. Other families
round the quotient down.
"""


def _sizes(model: Mapping[str, Any], settings: Given, family: Family) -> Iterator[str]:
    heads, kv, hidden = (
        model.get("model.heads"),
        model.get("model.kv_heads"),
        model.get("model.hidden"),
    )
    # Latent attention makes keys and values for every head, whatever their number is.
    latent = model.get("model.attention.latent.kv_rank")
    if heads and kv and heads % kv and not latent:
        yield f"num_key_value_heads: found {kv}; expected a divisor of the attention heads ({heads})"
    experts, chosen = model.get("model.experts"), model.get("model.moe.top_k")
    if experts and chosen and chosen > experts:
        yield f"num_experts_per_tok: found {chosen}; expected at most the number of experts ({experts})"
    layers = model.get("model.layers")
    for path, keys in LISTS.items():
        if (blocks := model.get(f"model.{path}")) is not None and layers and len(blocks) != layers:
            key = next((key for key in keys if key in settings), "model_type")
            yield f"{key}: found a list for {len(blocks)} blocks; expected one entry for each of the {layers} blocks"
    if family.name in DIVIDING and heads and hidden and hidden % heads:
        yield f"num_attention_heads: found {heads}; {family.name} expects a divisor of the hidden size ({hidden})"


def foreign(settings: Given, origins: Mapping[str, Origin]) -> Iterator[Finding]:
    """Yield a finding on a family with layers that no plan can describe. Only the sizes of such a
    model are read.
    """
    family = FAMILIES.get(settings.get("model_type") or "")
    if family is not None and family.foreign:
        message = f"{family.foreign}, which stagebridge cannot translate; only the fields that every model has are read"
        yield Finding(
            "model_type",
            message,
            Effect.NUMBERS,
            True,
            None,
            family.name,
            origin=origins.get("model_type"),
        )


def missing(settings: Given) -> Iterator[Finding]:
    """Yield a finding on a missing model type. No release of transformers reads a file without it
    (models/auto/configuration_auto.py: AutoConfig).
    """
    if "model_type" not in settings:
        message = "missing; without it transformers cannot choose the model's class; set model_type"
        yield Finding("model_type", message, Effect.STOPS, False, How.MISSING)
