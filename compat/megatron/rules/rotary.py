"""The table between Megatron's arguments of positions and the plan's fields: kind, rotation and scaling."""

from __future__ import annotations

from typing import Any

from bridge.stack.rules import Context, Effect, Group, convert
from bridge.stack.words import among, effect_if, every, give, on, some
from compat.megatron.patterns import all_but_last_of, blocks, fits, spell_pattern
from compat.megatron.rules.attention import KV_RANK, LATENT, SCRIPT

TYPE, POSITIONS, SCALING = (
    "position_embedding_type",
    "model.embedding.positions",
    "model.rotary.scaling.",
)
ROTARY = ("rope", "yarn", "mrope")
KIND = f"{SCALING}kind"
LLAMA = {"low": 1.0, "high": 4.0, "original": 8192}
"""Constants of Llama 3's scaling, which have no argument (rotary_pos_embedding.py)."""
FACTOR = 8.0
"""Default of `rope_scaling_factor`."""
YARN = {"original": 4096, "fast": 32.0, "slow": 1.0, "truncate": True}
"""Defaults of YaRN (argument_utils.py: _apply_yarn_config_from_args; MLATransformerConfig)."""
PREFIXED = {
    "original": "yarn_original_max_position_embeddings",
    "fast": "yarn_beta_fast",
    "slow": "yarn_beta_slow",
    "truncate": "yarn_correction_range_round_to_int",
}
"""Arguments of YaRN since 0.19, by plan field."""


def turns(values: Group) -> bool:
    """Whether positions are rotary. Latent attention always rotates a part of each head."""
    return values.get(TYPE) in ROTARY or bool(values.get(LATENT) and TYPE in values)


def is_rotary(values: Group) -> bool:
    """Whether a plan's positions are rotary. Latent attention always has rotary positions."""
    return values.get(POSITIONS) == "rotary" or bool(values.get(KV_RANK))


# Kind of positions


def _read_kind(values: Group, context: Context) -> Group:
    kind = values.get(TYPE)
    if kind is None:
        return {}
    # Latent attention rotates whatever the kind is, but a learned table is added to the embedding
    # all the same.
    if kind == "learned_absolute":
        return {POSITIONS: "learned", "model.embedding.offset": 0}
    return {POSITIONS: "rotary" if turns(values) else "none", "model.embedding.offset": None}


def _write_kind(values: Group, context: Context) -> Group:
    kind = values.get(POSITIONS)
    if kind != "rotary":
        return {TYPE: {"learned": "learned_absolute", "none": "none"}.get(kind or "")}
    return {TYPE: "yarn" if is_yarn(values, context) else "rope"}


def is_yarn(values: Group, context: Context) -> bool:
    """Whether a plan's positions are written as `position_embedding_type` yarn.

    With latent attention, `rope_type` selects YaRN instead.
    """
    return values.get(KIND) == "yarn" and not values.get(KV_RANK) and context.since("0.18.0")


KINDS = convert(
    (TYPE, "use_rotary_position_embeddings", "add_position_embedding"),
    (POSITIONS, "model.embedding.offset"),
    _read_kind,
    _write_kind,
    sees=(LATENT, KV_RANK, KIND),
    blurs=some(
        among(TYPE, "mrope", "relative"), every(on(LATENT), among(TYPE, "learned_absolute"))
    ),
    lossy="Megatron has rotary positions, and learned positions whose table has position 0 in row "
    "0; stagebridge does not translate Megatron's relative positions or positions of images",
    note=SCRIPT,
    source="gpt_model.py: position_embedding_type; multi_latent_attention.py: rotary_pos_emb",
    model=True,
)


# Rotation


def _read_base(values: Group, context: Context) -> Group:
    if not turns(values) or "rotary_base" not in values:
        return {}
    # Latent attention has a size of its own for the rotated part of a head.
    share = None if values.get(LATENT) else values.get("rotary_percent")
    return {"model.rotary.base": values["rotary_base"], "model.rotary.share": share}


def _write_base(values: Group, context: Context) -> Group:
    if not is_rotary(values):
        return {}
    base = values.get("model.rotary.base")
    return {
        "rotary_base": None if base is None else max(1, round(base)),
        "rotary_percent": None if values.get(KV_RANK) else values.get("model.rotary.share"),
    }


def whole(number: Any) -> Any:
    """Return a whole number as an int, for flags that accept only whole numbers. Any other number
    is returned unchanged.
    """
    return int(number) if isinstance(number, float) and number.is_integer() else number


BASE = convert(
    ("rotary_base", "rotary_percent"),
    ("model.rotary.base", "model.rotary.share"),
    _read_base,
    _write_base,
    sees=(TYPE, LATENT, POSITIONS, KV_RANK),
    carries={"rotary_base": "model.rotary.base", "rotary_percent": "model.rotary.share"},
    lossy="Megatron accepts only a whole number as rotary base",
    note=SCRIPT,
    source="rotary_pos_embedding.py: RotaryEmbedding",
    model=True,
)


def _write_pairs(values: Group, context: Context) -> Group:
    latent = bool(values.get(KV_RANK))
    pairs = (
        bool(values.get("model.rotary.interleaved"))
        and not latent
        and values.get(POSITIONS) == "rotary"
    )
    # Since 0.13 the fused kernel serves latent attention with YaRN alone; before 0.14 it cannot
    # rotate neighbours.
    yarn = values.get(KIND) == "yarn" and context.since("0.13.0")
    plain = (latent and not yarn) or (pairs and not context.since("0.14.0"))
    return {
        **({"rotary_interleaved": True} if pairs else {}),
        **({"apply_rope_fusion": False} if plain else {}),
    }


PAIRS = convert(
    ("rotary_interleaved", "apply_rope_fusion"),
    "model.rotary.interleaved",
    # Latent attention always rotates neighbouring elements together.
    give("model.rotary.interleaved", some(on(LATENT), on("rotary_interleaved")), turns),
    _write_pairs,
    effect=effect_if(on("rotary_interleaved"), Effect.NUMBERS, Effect.ROUNDING),
    sees=(TYPE, LATENT, POSITIONS, KV_RANK, KIND),
    carries={"apply_rope_fusion": ()},
    lossy="Megatron's latent attention always rotates pairs of neighbouring elements",
    note="a choice of kernel inside Megatron",
    source="rope_utils.py: multi_latent_attention; arguments.py and transformer_config.py: rope fusion",
    model=True,
)


def _write_some(values: Group) -> Group:
    turning = values.get("model.rotary.layers")
    if turning is None or all(turning):
        return {}
    return {
        "no_rope_freq": spell_pattern(
            turning, values.get("model.layers"), all_but_last_of, inverted=True
        )
    }


SOME = convert(
    "no_rope_freq",
    "model.rotary.layers",
    lambda values, context: {
        "model.rotary.layers": blocks(
            values.get("no_rope_freq"), values.get("num_layers"), all_but_last_of, inverted=True
        )
    },
    _write_some,
    sees=("num_layers", "model.layers"),
    blurs=lambda values: not fits(values.get("no_rope_freq"), values.get("num_layers")),
    lossy="Megatron can leave out rotary positions in some blocks since 0.13",
    note=SCRIPT,
    source="transformer_config.py: no_rope_freq marks blocks without rotary positions",
    model=True,
)


# Scaling


def _read_scaling(values: Group, context: Context) -> Group:
    if not turns(values) or "rotary_base" not in values:
        return {}
    if values.get(LATENT):
        return _read_latent(values)
    if values.get(TYPE) == "yarn":
        return _read_yarn(values, context)
    if values.get("use_rope_scaling"):
        factor = values.get("rope_scaling_factor", FACTOR)
        return {
            KIND: "llama3",
            f"{SCALING}factor": factor,
            **{SCALING + name: value for name, value in LLAMA.items()},
        }
    factor = values.get("rotary_seq_len_interpolation_factor")
    return (
        {KIND: "linear", f"{SCALING}factor": float(factor)}
        if factor and factor > 0
        else {KIND: "none"}
    )


def _read_latent(values: Group) -> Group:
    """Read the scaling of latent attention, which is YaRN unless rope_type is rope or the factor is
    1.
    """
    factor = values.get("rotary_scaling_factor")
    if values.get("rope_type") == "rope" or factor is None or factor == 1.0:
        return {KIND: "none"}
    constants = {SCALING + name: value for name, value in YARN.items()}
    return {KIND: "yarn", f"{SCALING}factor": factor, **constants, **_weights(values)}


def _read_yarn(values: Group, context: Context) -> Group:
    fields = {KIND: "yarn", f"{SCALING}factor": values.get("rotary_scaling_factor")}
    if not context.since("0.19.0"):
        return fields
    bounds = {name: values.get(flag) for name, flag in PREFIXED.items()}
    return {
        **fields,
        **{
            SCALING + name: YARN[name] if value is None else value for name, value in bounds.items()
        },
        **_weights(values),
    }


def _weights(values: Group) -> Group:
    """Return both mscale values of the plan. Empty if one of them is missing, or if they are 1 and 0,
    the defaults of YaRN's formula.
    """
    weights = values.get("mscale"), values.get("mscale_all_dim")
    # Both together, since the formula divides one by the other.
    return (
        {}
        if None in weights or weights == (1.0, 0.0)
        else dict(zip(MSCALES.values(), weights, strict=True))
    )


MSCALES = {"mscale": f"{SCALING}mscale", "mscale_all_dim": f"{SCALING}mscale_all"}


def _write_scaling(values: Group, context: Context) -> Group:
    if not is_rotary(values):
        return {}
    kind, factor = values.get(KIND), values.get(f"{SCALING}factor")
    latent = bool(values.get(KV_RANK))
    if kind == "yarn" and (latent or context.since("0.18.0")):
        return {"rotary_scaling_factor": factor, **_write_yarn(values, context, latent)}
    # The default of rope_type is yarn, so positions that are not scaled have to be asked for.
    if latent:
        return {"rope_type": "rope"}
    if kind == "llama3":
        return {"use_rope_scaling": True, "rope_scaling_factor": factor}
    return {"rotary_seq_len_interpolation_factor": whole(factor)} if kind == "linear" else {}


def _write_yarn(values: Group, context: Context, latent: bool) -> Group:
    weights = {flag: values.get(path) for flag, path in MSCALES.items()}
    usual = {"mscale": 1.0, "mscale_all_dim": 0.0}
    formula = {flag: usual[flag] if weight is None else weight for flag, weight in weights.items()}
    bounds = (
        {"rope_type": "yarn"}
        if latent
        else {flag: values.get(SCALING + name) for name, flag in PREFIXED.items()}
    )
    return {**bounds, **(formula if latent or context.since("0.19.0") else {})}


BOUNDS = (
    "kind",
    "factor",
    "original",
    "low",
    "high",
    "fast",
    "slow",
    "mscale",
    "mscale_all",
    "truncate",
)
STRETCH = convert(
    (
        *(
            "use_rope_scaling",
            "rope_scaling_factor",
            "rotary_scaling_factor",
            "rotary_seq_len_interpolation_factor",
        ),
        *("rope_type", *PREFIXED.values(), *MSCALES),
    ),
    tuple(SCALING + name for name in BOUNDS),
    _read_scaling,
    _write_scaling,
    sees=(TYPE, LATENT, "rotary_base", POSITIONS, KV_RANK),
    carries={
        **{flag: SCALING + name for name, flag in PREFIXED.items()},
        **MSCALES,
        "use_rope_scaling": tuple(SCALING + name for name in ("kind", "low", "high", "original")),
        "rope_scaling_factor": f"{SCALING}factor",
        "rotary_scaling_factor": (KIND, f"{SCALING}factor"),
        "rotary_seq_len_interpolation_factor": (KIND, f"{SCALING}factor"),
        "rope_type": tuple(
            SCALING + name for name in ("kind", "original", "fast", "slow", "truncate")
        ),
    },
    lossy="Megatron has three scalings of positions: Llama 3.1's, linear by a whole factor, and YaRN; "
    "in Llama 3.1's, the factors 1 and 4 and the length 8192 are fixed; YaRN exists since 0.18; latent "
    "attention has YaRN in every release, but with fixed length 4096 and fixed bounds 32 and 1",
    note=SCRIPT,
    source="rotary_pos_embedding.py; yarn_rotary_pos_embedding.py; multi_latent_attention.py: softmax_scale",
    model=True,
)

RULES = (KINDS, BASE, PAIRS, SOME, STRETCH)
