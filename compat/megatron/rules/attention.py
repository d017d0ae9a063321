"""The table between Megatron's arguments of attention and the plan's fields."""

from __future__ import annotations

from typing import Any

from bridge.plan.equality import shared_width
from bridge.stack.rules import Context, Group, convert
from bridge.stack.words import among
from compat.megatron.patterns import all_but_last_of, blocks, fits, spell_pattern

SCRIPT = "the model is defined by the training script"
LATENT, KV_RANK = "multi_latent_attention", "model.attention.latent.kv_rank"
ATTENTION = "model.attention."


def _read_attention(values: Group, context: Context) -> Group:
    """Return the plan's fields for attention heads, norms of heads and the softmax. Empty if the
    dropout rate of attention is not known. Latent attention has separate plan fields for the sizes
    of heads.
    """
    if values.get("attention_dropout") is None:
        return {}
    latent, has_norm = values.get(LATENT), values.get("qk_layernorm")
    scale = values.get("softmax_scale")
    # Latent attention normalises the latents as a whole, usual attention each head of queries and
    # keys.
    norm = "width" if latent else "head"
    return {
        f"{ATTENTION}head_size": None if latent else values.get("kv_channels"),
        f"{ATTENTION}norm": norm if has_norm else "none",
        f"{ATTENTION}dropout": values["attention_dropout"],
        f"{ATTENTION}sinks": values.get("softmax_type") == "learnable",
        f"{ATTENTION}scale": scale if scale and scale > 0 else None,
    }


def _write_attention(values: Group, context: Context) -> Group:
    latent = bool(values.get(KV_RANK))
    has_norm = values.get(f"{ATTENTION}norm") == ("width" if latent else "head")
    width = None if latent else values.get(f"{ATTENTION}head_size")
    hidden, heads = values.get("model.hidden"), values.get("model.heads")
    # Megatron refuses heads that do not divide the hidden width unless kv_channels is set, even
    # with latent attention, which never reads it.
    if not width and hidden and heads and hidden % heads:
        width = shared_width(values)
    return {
        "kv_channels": width,
        "attention_dropout": values.get(f"{ATTENTION}dropout"),
        "softmax_scale": values.get(f"{ATTENTION}scale"),
        **({"qk_layernorm": True} if has_norm else {}),
        **({"softmax_type": "learnable"} if values.get(f"{ATTENTION}sinks") else {}),
    }


CARRIED = {
    "kv_channels": f"{ATTENTION}head_size",
    "qk_layernorm": f"{ATTENTION}norm",
    "attention_dropout": f"{ATTENTION}dropout",
    "softmax_type": f"{ATTENTION}sinks",
    "softmax_scale": f"{ATTENTION}scale",
}
HEADS = convert(
    tuple(CARRIED),
    tuple(CARRIED.values()),
    _read_attention,
    _write_attention,
    sees=(LATENT, KV_RANK, "model.hidden", "model.heads"),
    blurs=among("softmax_type", "off-by-one"),
    carries=CARRIED,
    lossy="Megatron normalises the heads of both queries and keys, or of neither; Megatron divides logits by"
    " the square root of a head's width; stagebridge does not translate the off-by-one softmax",
    note=SCRIPT,
    source="attention.py: q_layernorm, k_layernorm; dot_product_attention.py: softmax_scale, softmax_type (since 0.15)",
    model=True,
)


# Windows


def _window_before(values: Group) -> int | None:
    """Return the number of earlier tokens that a token attends to; None if it attends to all of
    them.
    """
    window: Any = values.get("window_size")
    before = window[0] if isinstance(window, list | tuple) and len(window) == 2 else None
    return before if isinstance(before, int) and before >= 0 else None


def _read_window(values: Group, context: Context) -> Group:
    before = _window_before(values)
    if before is None:
        return {}
    pattern = blocks(values.get("window_attn_skip_freq"), values.get("num_layers"), all_but_last_of)
    # Megatron counts the tokens to the left, a plan also the token itself.
    return {f"{ATTENTION}window": before + 1, f"{ATTENTION}windowed": pattern}


def _write_window(values: Group, context: Context) -> Group:
    window, pattern = values.get(f"{ATTENTION}window"), values.get(f"{ATTENTION}windowed")
    if window is None:
        return {}
    some = None if pattern is None or all(pattern) else pattern
    frequency = (
        {"window_attn_skip_freq": spell_pattern(some, values.get("model.layers"), all_but_last_of)}
        if some
        else {}
    )
    return {"window_size": [window - 1, 0], **frequency}


WINDOW = convert(
    ("window_size", "window_attn_skip_freq"),
    (f"{ATTENTION}window", f"{ATTENTION}windowed"),
    _read_window,
    _write_window,
    sees=("num_layers", "model.layers"),
    blurs=lambda values: (
        _window_before(values) is not None
        and not fits(values.get("window_attn_skip_freq"), values.get("num_layers"))
    ),
    carries={"window_size": f"{ATTENTION}window", "window_attn_skip_freq": f"{ATTENTION}windowed"},
    lossy="Megatron has flags for sliding windows since 0.15",
    note=SCRIPT,
    source="transformer/utils.py: is_layer_window_attention; a window of (w - 1, 0) holds w tokens",
    model=True,
)


# Latent attention


SIZES = {
    "q_lora_rank": "query_rank",
    "kv_lora_rank": "kv_rank",
    "qk_head_dim": "plain_size",
    "qk_pos_emb_head_dim": "rotary_size",
    "v_head_dim": "value_size",
}
NARROW = f"{ATTENTION}latent."


def _read_latent(values: Group, context: Context) -> Group:
    if not values.get(LATENT) or values.get("kv_lora_rank") is None:
        return {}
    sizes = {f"{NARROW}{ours}": values.get(theirs) for theirs, ours in SIZES.items()}
    # None means that queries are not compressed, for which a plan has 0.
    return {**sizes, f"{NARROW}query_rank": values.get("q_lora_rank") or 0}


def _write_latent(values: Group, context: Context) -> Group:
    if not values.get(KV_RANK):
        return {}
    sizes = {theirs: values.get(f"{NARROW}{ours}") for theirs, ours in SIZES.items()}
    return {LATENT: True, **sizes, "q_lora_rank": sizes["q_lora_rank"] or None}


NARROWED = convert(
    (LATENT, *SIZES),
    tuple(f"{NARROW}{ours}" for ours in SIZES.values()),
    _read_latent,
    _write_latent,
    carries={theirs: f"{NARROW}{ours}" for theirs, ours in SIZES.items()},
    lossy="Megatron has multi-latent attention since 0.10",
    note=SCRIPT,
    source="multi_latent_attention.py; transformer_config.py: MLATransformerConfig",
    model=True,
)

RULES = (HEADS, WINDOW, NARROWED)
