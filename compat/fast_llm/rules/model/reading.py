"""Reads plan fields from the model section. Fast-LLM's defaults for missing settings count as set,
because they are part of the model's meaning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bridge.stack.rules import Context, Effect, Group
from compat.fast_llm.rules import router_losses
from compat.fast_llm.rules.model.places import BASE, Leaves, Sections, sections

MASTER = "model.distributed.optimization_dtype"
SCALE = "optimizer.default_learning_rate_scale"
NORMS = {"layer_norm": "layer", "rms_norm": "rms"}
ACTIVATIONS = {"gelu": "gelu_tanh", "silu": "silu", "relu": "relu", "squared_relu": "squared_relu"}
"""The plan's name for each of Fast-LLM's activations. Fast-LLM's gelu is the approximation by tanh
(functional/config.py, _set_activation_fn_map).
"""
ROTARY = {"default": "none", "llama3": "llama3", "yarn": "yarn"}
LACKED = frozenset(
    f"model.{name}"
    for name in (
        "family",
        "attention.softcap",
        *(
            f"attention.latent.{part}"
            for part in ("query_rank", "kv_rank", "plain_size", "rotary_size", "value_size")
        ),
        "rotary.scaling.mscale",
        "rotary.scaling.mscale_all",
        "mlp.clamp",
        "mlp.offset",
        "embedding.width",
        "embedding.begin",
        "embedding.ends",
        "embedding.residual_scale",
        "moe.scale",
        "moe.groups",
        "moe.top_groups",
        "moe.balance_rate",
        "moe.capacity",
    )
)
"""Plan fields for features that Fast-LLM's model does not have. Reading leaves these fields open."""

Facts = dict[str, Any]


def read(values: Group, context: Context | None) -> Facts:
    """Return the plan fields that Fast-LLM's `values` set."""
    model = values.get(BASE)
    facts = _read_model(sections(model, context), values)[0] if isinstance(model, Mapping) else {}
    return dict(router_losses.of_plan(facts, values, context)) if facts and context else facts


NEUTRAL = {"mlp.router_input_scale": 1.0, "mlp.jitter_eps": 0.0, "head.cross_entropy_splits": 1}
"""Settings that no plan field stands for, each with the value that has no effect."""
CHEAP = (
    "implementation",
    "use_flash_attention",
    "cross_entropy_splits",
    "dropless",
    "dropless_dynamic_shape",
    "recompute_level",
)
"""Prefixes of names of settings that choose between implementations of the same computation."""


def weigh(values: Group) -> Effect:
    """Return the effect on the run if the settings that no plan field stands for are lost."""
    paths = unsaid(values)
    cheap = paths and all(path.rpartition(".")[2].startswith(CHEAP) for path in paths)
    return Effect.ROUNDING if cheap else Effect.NUMBERS


def unread_settings_text(values: Group) -> str:
    """Return a sentence that names the settings that no plan field stands for."""
    paths = unsaid(values)
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return f"stagebridge does not translate {', '.join(paths[:5])}{more}"


def unsaid(values: Group) -> list[str]:
    """Return the paths of settings that no plan field stands for, or that contradict each other."""
    model = values.get(BASE)
    if not isinstance(model, Mapping):
        return []
    parts = sections(model, None)
    # Reading marks the leaves that a plan field stands for, so it comes before the question which
    # are left.
    _, odd = _read_model(parts, values)
    return [*parts.unsaid(NEUTRAL), *odd]


def _read_model(parts: Sections, values: Group) -> tuple[Facts, list[str]]:
    odd: list[str] = []
    facts = _common(parts, values, odd)
    defaults = _defaults(parts, facts)
    blocks = {}
    for name, at in parts.blocks.items():
        at.name("type", "decoder", ("decoder",))
        block = {"model.dropout": at.share("dropout"), **_norm(at, odd)}
        if "adapters.rank" in facts:
            block["adapters.targets"] = _adapter_layers(at)
        blocks[name] = block | _attention(at, defaults, block, odd) | _mlp(at, defaults, odd)
    facts |= _join_blocks(blocks, parts, facts, odd)
    _positions(parts, facts)
    _head(parts, facts, odd)
    _initial(parts, facts, odd)
    return {path: value for path, value in facts.items() if value is not None}, odd


def _defaults(parts: Sections, facts: Facts) -> dict[str, Any]:
    """Return the defaults of a block's widths in the layout of `parts`. Before 0.3.0, they depended
    on the hidden size.
    """
    hidden = facts["model.hidden"]
    if parts.layout != "oldest":
        return {"head_size": 128, "ffn": 4096}
    # Through leaves of its own, so that the number is not marked as read here.
    heads = Leaves(parts.blocks[""].values).count("mixer.heads", 8)
    whole = hidden and heads and hidden % heads == 0
    return {
        "head_size": hidden // heads if whole else None,
        "ffn": 4 * hidden if hidden else None,
        "oldest": True,
    }


def _common(parts: Sections, values: Group, odd: list[str]) -> Facts:
    at = parts.common
    at.name("decoder.type", "fixed", ("fixed", "pattern"))
    full = at.flag("embeddings.full_precision_residual", False)
    return {
        "model.layers": at.count("decoder.num_blocks", 12),
        "model.hidden": at.count("hidden_size", 1024),
        "model.vocab": at.count("embeddings.vocab_size", 49152),
        "model.tied": at.flag("tied_embedding_weight", parts.layout != "newest"),
        "model.predicted": at.take("head.prediction_heads", 1, lambda heads: heads == 1) - 1,
        "model.embedding.dropout": at.share("embeddings.dropout"),
        "model.embedding.scale": at.real("embeddings.embedding_scale", 1.0) or None,
        "model.embedding.logit_scale": at.real("head.logits_scale_factor", 1.0) or None,
        "model.embedding.softcap": at.real("head.final_logit_softcap") or None,
        "model.embedding.norm": False,
        "model.embedding.padding": "none",
        "model.embedding.output_bias": False,
        "model.attention.sinks": False,
        "model.norm.parallel": False,
        "parallel.vocabulary": at.flag("embeddings.vocab_parallel", True),
        "precision.residual": {"float32": "fp32", "float64": "fp64"}.get(
            values.get(MASTER) or "float32"
        )
        if full
        else None,
        **_factors(at, values),
        **_adapters(at, odd),
    }


def _factors(at: Leaves, values: Group) -> Facts:
    """Return the learning-rate factors of embedding and output layer, divided by the default
    factor. In Fast-LLM such a factor replaces the default factor (optimizer.py).
    """
    usual = values.get(SCALE)
    usual = 1.0 if usual is None else usual
    # A plan's factors are relative to its peak rate, which has the default factor in it already.
    factors: Facts = {}
    for which, (wide, narrow, names) in SCOPES.items():
        # Of both factors on a path, a weight has the product and what goes along only the wide one.
        place = narrow if at.within(narrow) and not at.within(wide) else wide
        factor = at.real(place)
        if factor is not None and usual:
            factors[f"optimizer.{which}_lr"] = factor / usual
            factors[f"habits.{which}_lr"] = names[place == wide]
    return factors


SCOPES = {
    "embedding": (
        "embeddings.lr_scale",
        "embeddings.word_embeddings.lr_scale",
        ("words", "words_and_positions"),
    ),
    "output": ("head.lr_scale", "head.output_weight.lr_scale", ("weight", "weight_and_norm")),
}
"""For embedding and output layer: the factor on the learning rate of the whole part, the factor of its
weight alone, and the plan's names for what has the weight's rate (layers/language_model/embedding.py,
head.py: the learned positions and the final norm are parts).
"""


def _adapters(at: Leaves, odd: list[str]) -> Facts:
    if at.name("peft.type", "none", ("none", "lora")) != "lora":
        return {}
    if at.flag("peft.freeze_others", True) is not True:
        odd.append("peft.freeze_others")
    rank, alpha = at.count("peft.rank", 8), at.real("peft.alpha", 8.0) or None
    return {
        "adapters.rank": rank,
        "adapters.alpha": alpha,
        "adapters.dropout": at.share("peft.dropout"),
    }


def _adapter_layers(at: Leaves) -> tuple[str, ...]:
    """Return the layers of a block that have an adapter if the model has adapters. By default, these
    are queries and values (layers/attention/attention.py: default_apply_peft, key_layer.apply_peft).
    """
    both = at.flag("mixer.key_layer.apply_peft", None)
    switches = {
        "query": at.flag("mixer.query_layer.apply_peft", True),
        "key": both,
        "value": both is not False,
        "dense": at.flag("mixer.dense_layer.apply_peft", False),
        "mlp_in": at.flag("mlp.layer_1.apply_peft", False),
        "mlp_out": at.flag("mlp.layer_2.apply_peft", False),
    }
    return tuple(name for name, on in switches.items() if on)


# A block


def _norm(at: Leaves, odd: list[str]) -> Facts:
    kind, eps, zero = normalization(at, "normalization")
    return {
        "model.norm.kind": kind,
        "model.norm.eps": eps,
        "model.norm.zero_centred": zero,
        "model.norm.bias": kind == "layer",
        "model.norm.place": _place(at, (kind, eps, zero), odd),
    }


Normalization = tuple[str, float, bool]


def normalization(at: Leaves, start: str) -> Normalization:
    """Return kind, epsilon and offset of the norm at `start`
    (layers/common/normalization/config.py).
    """
    at.known.add(start)
    kind = NORMS[at.name(f"{start}.type", "layer_norm", tuple(NORMS))]
    return kind, at.real(f"{start}.epsilon", 1e-5), at.flag(f"{start}.zero_centered", False)


def _place(at: Leaves, own: Normalization, odd: list[str]) -> str:
    """Return the position of the norms in a block: before the layer, after it, or both
    (layers/decoder/block.py).
    """
    before = {
        _norm_at(at, f"pre_{layer}_normalization", own, "before") for layer in ("mixer", "mlp")
    }
    after = {_norm_at(at, f"post_{layer}_normalization", own, "none") for layer in ("mixer", "mlp")}
    # A plan has one place for both layers, so both must answer alike.
    places: dict[tuple[str, ...], str]
    places = {
        ("before", "none"): "before",
        ("before", "before"): "both",
        ("none", "before"): "after",
    }
    place = places.get((*before, *after)) if len(before) == len(after) == 1 else None
    if place is None:
        odd.append("normalization")
    return place or "before"


def _norm_at(at: Leaves, start: str, own: Normalization, without: str) -> str:
    """Return the kind of the norm at `start`: "before" if it has the settings of the block's own
    norm, "none" if it is off, else "other".

    If the config sets nothing at `start`, return `without`.
    """
    if not at.within(start):
        return without
    if at.name(f"{start}.type", "layer_norm", ("none",)) == "none":
        return "none"
    return "before" if normalization(at, start) == own else "other"


def _attention(at: Leaves, defaults: Mapping[str, Any], norm: Facts, odd: list[str]) -> Facts:
    at.name("mixer.type", "attention", ("attention",))
    size, power = (
        at.count("mixer.head_size", defaults["head_size"]),
        at.real("mixer.softmax_scale_power", 0.5),
    )
    if at.flag("mixer.causal", True) is not True:
        odd.append("mixer.causal")
    if at.flag("mixer.shared_key_value", False) is not False:
        odd.append("mixer.shared_key_value")
    qkv, output = _biases(at, odd)
    return {
        "model.heads": at.count("mixer.heads", 8),
        "model.kv_heads": at.count("mixer.head_groups", 1),
        "model.attention.head_size": size,
        "model.attention.qkv_bias": qkv,
        "model.attention.output_bias": output,
        "model.attention.norm": _query_norm(at, norm, odd),
        "window": at.count("mixer.window_size"),
        # Logits are multiplied by size ** -power; a power of 0.5 is the usual 1 / sqrt(size), which
        # a plan leaves open.
        "model.attention.scale": round_number(size**-power) if size and power != 0.5 else None,
        "model.attention.dropout": at.share("mixer.dropout"),
        **_rotary(at, defaults),
    }


def round_number(value: float) -> float:
    """Return a computed number, rounded to 12 digits, so that converting it back gives the same
    number.
    """
    return float(f"{value:.12g}")


def _biases(at: Leaves, odd: list[str]) -> tuple[bool, bool]:
    """Return whether queries, keys and values have biases, and whether the output projection has
    one. Keys and values share a setting (attention.py).
    """
    usual = at.flag("mixer.add_linear_biases", True)
    query, key, _, dense = (
        at.flag(f"mixer.{name}_layer.bias.enabled", usual)
        for name in ("query", "key", "value", "dense")
    )
    if query != key:
        odd.append("mixer.query_layer.bias.enabled")
    return query, dense


def _query_norm(at: Leaves, block: Facts, odd: list[str]) -> str:
    starts = [start for start in ("mixer.query_norm", "mixer.key_norm") if at.within(start)]
    if not starts:
        return "none"
    own = tuple(block.get(f"model.norm.{name}") for name in ("kind", "eps", "zero_centred"))
    if len(starts) == 2 and all(normalization(at, start) == own for start in starts):
        return "head"
    odd.append("mixer.query_norm")
    return "none"


def _rotary(at: Leaves, defaults: Mapping[str, Any]) -> Facts:
    kind = at.name(
        "mixer.rotary.type",
        "default" if at.within("mixer.rotary.type") else "none",
        ("none", *ROTARY),
    )
    if "oldest" in defaults and at.flag("mixer.rotary.enabled", None):
        kind = "default"
    if kind == "none":
        return {"rotary": False}
    # Before 0.2.0 the setting was -log(theta).
    scale = at.real("mixer.rotary.scale", None, -math.inf)
    theta = at.real(
        "mixer.rotary.theta", 10000.0 if scale is None else round_number(math.exp(-scale))
    )
    facts = {
        "rotary": True,
        "base": theta or None,
        "model.rotary.share": 1.0,
        "model.rotary.interleaved": at.flag("mixer.rotary.triton", True) is False,
        "model.rotary.scaling.kind": ROTARY[kind],
    }
    return facts | {
        f"model.rotary.scaling.{ours}": value for ours, value in _rotary_scaling(at, kind).items()
    }


def _rotary_scaling(at: Leaves, kind: str | None) -> Facts:
    """Return the rotary scaling, with the defaults of layers/attention/rotary/config.py. The bounds
    of YaRN's ramp are whole numbers (rotary.py).
    """

    def of(name: str, default: float | None) -> Any:
        return at.real(f"mixer.rotary.{name}", default) or None

    if kind not in ("llama3", "yarn"):
        return {}
    facts = {
        "factor": of("scale_factor", 8.0),
        "original": at.count("mixer.rotary.original_context_length", 8192),
    }
    if kind == "llama3":
        return facts | {
            "low": of("low_frequency_factor", 1.0),
            "high": of("high_frequency_factor", 4.0),
        }
    ramp = {"fast": of("beta_fast", 32.0), "slow": of("beta_slow", 1.0), "truncate": True}
    return facts | ramp | {"attention": of("attention_factor", None)}


def _mlp(at: Leaves, defaults: Mapping[str, Any], odd: list[str]) -> Facts:
    kind = at.name("mlp.type", "mlp", ("mlp", "moe"))
    if "oldest" in defaults:
        kind = "moe" if (at.count("mlp.experts", 1) or 1) > 1 else "mlp"
    gated, usual = at.flag("mlp.gated", False), at.flag("mlp.add_linear_biases", True)
    activation = at.name("mlp.activation", "silu" if gated else "gelu", tuple(ACTIVATIONS))
    first, second = (at.flag(f"mlp.layer_{number}.bias.enabled", usual) for number in (1, 2))
    if first != second:
        odd.append("mlp.layer_1.bias.enabled")
    facts = {
        "ffn": at.count("mlp.intermediate_size", defaults["ffn"]),
        "model.mlp.gated": gated,
        "model.mlp.activation": ACTIVATIONS[activation],
        "model.mlp.bias": first,
        "recompute": at.name("mlp.recompute_level", "none", ("none", "full")) == "full",
    }
    return facts | (_experts(at, facts["ffn"]) if kind == "moe" else {})


def _experts(at: Leaves, width: int | None) -> Facts:
    """Return the plan fields of experts. Fast-LLM's number of experts includes the shared experts
    (layers/decoder/mlp/config.py, unshared_experts).
    """
    shared = at.take("mlp.shared_experts", 0, lambda value: type(value) is int and value >= 0)
    count, uses_aux_loss = (
        at.count("mlp.experts", 2),
        at.name("mlp.routing", "aux_loss", ("aux_loss", "sinkhorn")) == "aux_loss",
    )
    loss = at.real("mlp.auxiliary_loss_coefficient", 0.01)
    balance = "batch" if loss else "none"
    return {
        "model.experts": max(1, count - shared),
        "model.moe.ffn": width,
        "model.moe.top_k": at.count("mlp.experts_per_token", 1),
        "model.moe.shared_ffn": shared * width if width else None,
        "model.moe.shared_gate": False,
        "model.moe.score": "softmax" if uses_aux_loss else None,
        "model.moe.normalised": True if uses_aux_loss else None,
        "model.moe.balance": balance if uses_aux_loss else "sinkhorn",
        # Only _topk_routing reads the coefficient.
        "model.moe.aux_loss": loss if uses_aux_loss else 0.0,
        "model.moe.aux_trained": True if uses_aux_loss and loss else None,
        "model.moe.z_loss": at.real("mlp.z_loss_coefficient", 0.0),
        "model.moe.router_bias": False,
        "model.moe.balance_bias": False,
    }


# All blocks

OWN = ("window", "rotary", "base", "ffn", "recompute")
"""Keys of a block's facts that may differ between the blocks of a model."""


def _join_blocks(
    blocks: Mapping[str, Facts], parts: Sections, facts: Facts, odd: list[str]
) -> Facts:
    """Return the plan fields of all blocks together. If blocks differ in a way that a plan cannot
    hold, the values of the first block are used.
    """
    names = _block_names(parts, facts["model.layers"])
    used = [blocks[name] for name in dict.fromkeys(names)]
    # Reversed, so that the first block is the last to set a value.
    result = {
        path: value for block in reversed(used) for path, value in block.items() if path not in OWN
    }
    for path, value in result.items():
        of_experts = path.startswith(("model.moe.", "model.experts"))
        if any(block.get(path) != value for block in used if path in block or not of_experts):
            odd.append(path)
    layers = [blocks[name] for name in names]
    window = _only_value([block.get("window") for block in layers], "mixer.window_size", odd)
    result["model.attention.window"] = window
    result["model.attention.windowed"] = (
        _pattern_or_none([block.get("window") is not None for block in layers]) if window else None
    )
    return result | _bases(layers, odd) | _widths(layers, odd) | _recompute_fields(layers, odd)


def _block_names(parts: Sections, layers: int | None) -> list[str]:
    """Return the name of each block, in the order of the model."""
    if not parts.order:
        return []
    if parts.order == ("",):
        return [""]  # all blocks are alike, so one stands for all
    count = min(layers or len(parts.order), MOST)
    return [parts.order[place % len(parts.order)] for place in range(count)]


MOST = 10_000
"""Largest number of blocks whose order is computed. A larger `num_blocks` is not a real model."""


def _pattern_or_none(pattern: list[bool]) -> tuple[bool, ...] | None:
    """Return the pattern; None if it has the same value for all blocks."""
    return tuple(pattern) if len(set(pattern)) > 1 else None


def _only_value(values: list[Any], what: str, odd: list[str]) -> Any:
    """Return the only value among `values` that is not None. If there are several, return the first
    and add `what` to `odd`.
    """
    distinct = [value for value in dict.fromkeys(values) if value is not None]
    if len(distinct) > 1:
        odd.append(what)
    return distinct[0] if distinct else None


def _bases(layers: list[Facts], odd: list[str]) -> Facts:
    rotating = [block for block in layers if block.get("rotary")]
    bases = {block.get("base") for block in rotating}
    facts = {
        "rotary": bool(rotating),
        "model.rotary.layers": _pattern_or_none([bool(block.get("rotary")) for block in layers]),
    }
    if len(bases) < 2:
        return facts | {"model.rotary.base": next(iter(bases), None)}
    # A plan has two bases, one for blocks with a window and one for the others.
    local = _only_value(
        [block["base"] for block in rotating if block.get("window")], "mixer.rotary.theta", odd
    )
    base = _only_value(
        [block["base"] for block in rotating if not block.get("window")], "mixer.rotary.theta", odd
    )
    return facts | {"model.rotary.base": base, "model.rotary.local_base": local}


def _widths(layers: list[Facts], odd: list[str]) -> Facts:
    dense = [block.get("ffn") for block in layers if "model.moe.ffn" not in block]
    width = _only_value(
        dense or [block.get("ffn") for block in layers], "mlp.intermediate_size", odd
    )
    pattern = [block.get("model.experts") is not None for block in layers]
    return {"model.ffn": width, "model.moe.layers": _pattern_or_none(pattern)}


def _recompute_fields(layers: list[Facts], odd: list[str]) -> Facts:
    """Return the plan fields for recomputation of whole feed-forward layers (functional/config.py,
    MLPRecomputeLevel).
    """
    full = [block for block in layers if block.get("recompute")]
    if full and len(full) < len(layers):
        odd.append("mlp.recompute_level")
    kinds = {"experts" if "model.moe.ffn" in block else "mlp" for block in full}
    modules = tuple(name for name in ("mlp", "experts") if name in kinds)
    if not modules:
        return {"recompute.granularity": "none"}
    return {"recompute.granularity": "selective", "recompute.modules": modules}


# Settings outside of the blocks


def _positions(parts: Sections, facts: Facts) -> None:
    """Set the kind of positions.

    Learned positions are off by default. Before 0.3.0 they were on by default, unless positions
    were rotary.
    """
    at, rotary = parts.common, facts.pop("rotary", False)
    learned = at.flag(
        "embeddings.position_embeddings.enabled", parts.layout == "oldest" and not rotary
    )
    if learned and rotary:
        # A plan has one kind of positions. Learned ones beside rotary ones are reported as lost.
        at.known.discard("embeddings.position_embeddings.enabled")
    kind = "learned" if learned else "none"
    kind = "rotary" if rotary else kind
    facts["model.embedding.positions"] = kind
    facts["model.embedding.max_positions"] = at.count(
        "embeddings.num_position_embeddings", 2048 if kind == "learned" else None
    )
    facts["model.embedding.offset"] = 0 if kind == "learned" else None


def _head(parts: Sections, facts: Facts, odd: list[str]) -> None:
    """Check that the norm before the output layer has the settings of the blocks' norms. Fast-LLM
    has separate settings for it since 0.3.0, but a plan has the same norm everywhere.
    """
    if parts.layout == "oldest":
        return
    own = tuple(facts.get(f"model.norm.{name}") for name in ("kind", "eps", "zero_centred"))
    if normalization(parts.common, "head.normalization") != own:
        odd.append("head.normalization, unlike that of the blocks")


PLAIN = ("mixer.query_layer.weight", "mixer.key_layer.weight", "mlp.layer_1.weight")
OUT = ("mixer.dense_layer.weight", "mlp.layer_2.weight")
"""Names of a block's weights. `PLAIN` has the input projections, and `OUT` has the projections back
into the residual stream.
"""


def _initial(parts: Sections, facts: Facts, odd: list[str]) -> None:
    """Set the standard deviation of initial weights. Its default is hidden^-0.5
    (layers/attention/attention.py, decoder/mlp/mlp.py).
    """
    hidden, layers = facts.get("model.hidden"), facts.get("model.layers")
    if not hidden or not layers:
        return
    usual = hidden**-0.5
    plain, out = (
        _oldest_initial(parts.common, usual, layers)
        if parts.layout == "oldest"
        else _deviations(parts, facts, usual)
    )
    # Projections back into the residual are either drawn like the others or smaller by sqrt(2 x
    # layers).
    same = math.isclose(out[0], plain[0], rel_tol=1e-9)
    shrunk = math.isclose(out[0], plain[0] / math.sqrt(2 * layers), rel_tol=1e-9) and not same
    if len({*plain}) > 1 or len({*out}) > 1 or not (shrunk or same):
        several = ", ".join(f"{value:.4g}" for value in sorted({*plain, *out}))
        odd.append(f"initial weights of several standard deviations ({several})")
    facts["model.init.std"], facts["model.init.scaled"] = plain[0], shrunk


def _oldest_initial(at: Leaves, usual: float, layers: int) -> tuple[list[float], list[float]]:
    """Return the standard deviations of initial weights before 0.3.0
    (layers/transformer/config.py): of input projections, and of projections back into the residual
    stream, which had a smaller default.
    """
    std = float(at.real("init.std", usual))
    same = [at.real(f"init.{name}", std) for name in ("qkv", "layer_1", "embed")]
    out = [at.real(f"init.{name}", std / math.sqrt(2 * layers)) for name in ("dense", "layer_2")]
    return same, out


def _deviations(parts: Sections, facts: Facts, usual: float) -> tuple[list[float], list[float]]:
    plain, out = list[float](), list[float]()
    for block in parts.blocks.values():
        router = ("mlp.router.weight",) if block.values.get("mlp.type") == "moe" else ()
        plain += [_deviation(block, place, usual) for place in (*PLAIN, *router)]
        out += [_deviation(block, place, usual) for place in OUT]
        _deviation(block, "mixer.value_layer.weight", usual)
    heads = ["embeddings.word_embeddings"]
    if not facts.get("model.tied"):
        heads.append("head.output_weight")
    if facts["model.embedding.positions"] == "learned":
        heads.append("embeddings.position_embeddings")
    return plain + [_deviation(parts.common, place, usual) for place in heads], out


def _deviation(at: Leaves, place: str, usual: float) -> float:
    """Return the standard deviation of the initial weight at `place`. A distribution other than a
    normal one around 0 stays unread.
    """
    start = f"{place}.initialization"
    # Without a type the distribution is the default one of the layer, whatever numbers there are.
    if at.name(f"{start}.type", "default", ("normal",)) == "default":
        return usual
    at.take(f"{start}.mean", 0.0, lambda value: value == 0)
    return float(at.real(f"{start}.std", 1.0))
