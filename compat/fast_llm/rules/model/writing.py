"""Writes the section of the model from plan fields.

Every setting is written, because Fast-LLM's defaults describe another model.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterator
from typing import Any, NamedTuple

from bridge.plan.equality import head_size
from bridge.plan.plan import paths
from bridge.plan.section import nest
from bridge.stack.rules import Context, Group
from compat.fast_llm.rules import router_losses
from compat.fast_llm.rules.model.places import BASE, BLOCK, BLOCKS, Layout, layout_of, place_leaves
from compat.fast_llm.rules.model.reading import (
    ACTIVATIONS,
    LACKED,
    MOST,
    NORMS,
    OUT,
    PLAIN,
    SCALE,
    SCOPES,
)
from compat.fast_llm.signatures import problems

Leaves = dict[str, Any]
KINDS = {theirs: ours for ours, theirs in NORMS.items()}
THEIRS = {ours: theirs for theirs, ours in ACTIVATIONS.items()} | {"gelu": "gelu"}
"""Fast-LLM's name for each activation of a plan. Fast-LLM has no exact gelu, so its tanh
approximation takes its place.
"""

COMMON = {
    "model.layers": "decoder.num_blocks",
    "model.hidden": "hidden_size",
    "model.tied": "tied_embedding_weight",
    "model.embedding.max_positions": "embeddings.num_position_embeddings",
    "model.embedding.dropout": "embeddings.dropout",
    "model.embedding.scale": "embeddings.embedding_scale",
    "model.embedding.softcap": "head.final_logit_softcap",
    "model.embedding.logit_scale": "head.logits_scale_factor",
    "parallel.vocabulary": "embeddings.vocab_parallel",
}
MIXER = {"model.heads": "heads", "model.attention.dropout": "dropout"}
MLP = {"model.mlp.gated": "gated", "model.mlp.bias": "add_linear_biases"}
NORM = {"model.norm.eps": "epsilon", "model.norm.zero_centred": "zero_centered"}
STRETCHED = {
    "llama3": {
        "factor": "scale_factor",
        "original": "original_context_length",
        "low": "low_frequency_factor",
        "high": "high_frequency_factor",
    },
    "yarn": {
        "factor": "scale_factor",
        "original": "original_context_length",
        "fast": "beta_fast",
        "slow": "beta_slow",
        "attention": "attention_factor",
    },
}
LATER = {"yarn": "0.3.0", "llama3": "0.2.0"}
"""The first release that has each kind of rotary scaling."""


OURS = tuple(
    path
    for path in paths()
    if path.startswith("model.") and path != "model.sequence" and path not in LACKED
)
"""Plan fields of the model for features that Fast-LLM's model has."""


class Kind(NamedTuple):
    """Features of a block that may differ between the blocks of a model."""

    windowed: bool
    experts: bool
    rotary: bool


def write(values: Group, context: Context) -> Group:
    """Return the section of the model for a plan; empty if the plan does not set the model."""
    if not any(values.get(path) is not None for path in OURS):
        return {}
    layout = layout_of(context)
    values = ChainMap(router_losses.of_stack(values, context), values)  # type: ignore[arg-type]
    leaves = place_leaves(_write_model(values, context, layout), layout)
    settings = {path: value for path, value in leaves.items() if value is not None}
    # Settings that the classes of the release refuse are left out, and show as lost on the way
    # back.
    refusals = {
        path.removeprefix(BASE + ".") for path, _ in problems(nest(settings), BASE, context.version)
    }
    remainder = {
        path: value
        for path, value in settings.items()
        if not any(f"{path}.".startswith(f"{bad}.") for bad in refusals)
    }
    section = nest(remainder)
    return {BASE: section} if section else {}


def _write_model(values: Group, context: Context, layout: Layout) -> Leaves:
    leaves: Leaves = {place: values.get(ours) for ours, place in COMMON.items()}
    leaves["embeddings.vocab_size"] = values.get("model.embedding.padded_vocab") or values.get(
        "model.vocab"
    )
    positions = values.get("model.embedding.positions")
    # Learned positions are off by default since 0.3.0. Before, they were on, so "off" has to be
    # written.
    if positions == "learned" or (positions is not None and layout == "oldest"):
        leaves["embeddings.position_embeddings.enabled"] = positions == "learned"
    leaves |= _write_outside(values) | _adapters(values)
    leaves |= {f"head.normalization.{name}": value for name, value in _norm(values).items()}
    kinds = _kinds(values) if layout != "oldest" else []
    if len(set(kinds)) > 1:
        return leaves | _pattern(values, context, kinds)
    # The oldest layout has one kind of block, with all features that the model has.
    kind = (
        kinds[0]
        if kinds
        else Kind(
            values.get("model.attention.window") is not None,
            bool(values.get("model.experts")),
            True,
        )
    )
    block = _block(values, context, kind, layout)
    initial = _initial(values, layout)
    return leaves | {f"{BLOCK}{place}": value for place, value in block.items()} | initial


def _write_outside(values: Group) -> Leaves:
    """Return settings of the model section that come from plan fields outside `model`.

    A plan that predicts further tokens sets nothing here, because Fast-LLM predicts them in another
    way than any other stack. It uses plain blocks, without the embedding of the next token, and
    adds the full losses.
    """
    residual, compute, usual = (
        values.get(path) for path in ("precision.residual", "precision.compute", SCALE)
    )
    scale = 1.0 if usual is None else usual
    factors = {}
    for which, (wide, narrow, names) in SCOPES.items():
        factor, scope = values.get(f"optimizer.{which}_lr"), values.get(f"habits.{which}_lr")
        if factor is not None:
            factors[narrow if scope == names[0] else wide] = factor * scale
    return {
        "embeddings.full_precision_residual": residual != (compute or "fp32")
        if residual is not None
        else None,
        "head.prediction_heads": 1 if values.get("model.predicted") == 0 else None,
        **factors,
    }


def _adapters(values: Group) -> Leaves:
    rank = values.get("adapters.rank")
    if rank is None:
        return {}
    rest = {f"peft.{name}": values.get(f"adapters.{name}") for name in ("alpha", "dropout")}
    return {"peft.type": "lora", "peft.rank": rank, **rest}


def _adapter_switches(values: Group, layout: Layout) -> Leaves:
    """Return the switches of adapters in a block. Fast-LLM has none for values alone: they are adapted
    without keys if keys have no switch.
    """
    targets = values.get("adapters.targets")
    if targets is None or values.get("adapters.rank") is None or layout == "oldest":
        return {}
    both = ("key" in targets) if ("key" in targets) == ("value" in targets) else None
    usual = {"dense": "mixer.dense_layer", "mlp_in": "mlp.layer_1", "mlp_out": "mlp.layer_2"}
    return {
        "mixer.query_layer.apply_peft": None if "query" in targets else False,
        "mixer.key_layer.apply_peft": both,
        **{f"{place}.apply_peft": True for name, place in usual.items() if name in targets},
    }


# Blocks


def _kinds(values: Group) -> list[Kind]:
    """Return the features of each block; empty if all blocks are alike or if their number is not
    known.
    """
    patterns = [
        values.get(f"model.{name}")
        for name in ("attention.windowed", "moe.layers", "rotary.layers")
    ]
    count = values.get("model.layers") or max(
        (len(pattern) for pattern in patterns if pattern), default=0
    )
    there = (
        values.get("model.attention.window") is not None,
        bool(values.get("model.experts")),
        True,
    )
    if not any(patterns) or count > MOST:
        return []
    # A block has a feature if the model does, and its pattern, if there is one, is true at the
    # block's place.
    columns = []
    for pattern, has in zip(patterns, there, strict=True):
        own = (
            (True,) * count
            if pattern is None
            else tuple(pattern[:count]) + (False,) * (count - len(pattern))
        )
        columns.append([has and one for one in own])
    return [Kind(*features) for features in zip(*columns, strict=True)]


NAMES = (("full", "windowed"), ("dense", "experts"), ("unrotated", "rotary"))


def _pattern(values: Group, context: Context, kinds: list[Kind]) -> Leaves:
    """Return the settings of blocks by block name, and one period of the pattern
    (layers/block/config.py, PatternBlockSequenceConfig).
    """
    axes = [axis for axis in range(3) if len({kind[axis] for kind in kinds}) > 1]
    names = {
        kind: "_".join(NAMES[axis][kind[axis]] for axis in axes) for kind in dict.fromkeys(kinds)
    }
    leaves: Leaves = {
        "decoder.type": "pattern",
        "decoder.pattern": _shortest_period([names[kind] for kind in kinds]),
    }
    initial = _initial(values, "newest")
    for kind, name in names.items():
        block = _block(values, context, kind, "newest")
        own = {
            path.removeprefix(BLOCK): value
            for path, value in initial.items()
            if path.startswith(BLOCK)
        }
        # A block without experts has no router to initialise, and its class refuses the key.
        deviations = {
            path: value
            for path, value in own.items()
            if kind.experts or not path.startswith("mlp.router")
        }
        leaves |= {
            f"{BLOCKS}{name}.{place}": value for place, value in {**block, **deviations}.items()
        }
    return leaves | {path: value for path, value in initial.items() if not path.startswith(BLOCK)}


def _shortest_period(order: list[str]) -> list[str]:
    """Return the shortest prefix of `order` that gives `order` when it is repeated."""
    return next(
        order[:size]
        for size in range(1, len(order) + 1)
        if all(order[place] == order[place - size] for place in range(size, len(order)))
    )


def _block(values: Group, context: Context, kind: Kind, layout: Layout) -> Leaves:
    mlp = (
        _experts(values, layout) if kind.experts else {"intermediate_size": values.get("model.ffn")}
    )
    leaves: Leaves = {"dropout": values.get("model.dropout")}
    leaves |= {f"mixer.{name}": value for name, value in _mixer(values, context, kind).items()}
    leaves |= {f"mlp.{name}": value for name, value in (_mlp(values, kind) | mlp).items()}
    leaves |= {f"normalization.{name}": value for name, value in _norm(values).items()}
    return leaves | _places(values) | _adapter_switches(values, layout)


def _mixer(values: Group, context: Context, kind: Kind) -> Leaves:
    leaves: Leaves = {name: values.get(ours) for ours, name in MIXER.items()}
    size, scale = head_size(values), values.get("model.attention.scale")
    leaves["head_groups"] = values.get("model.kv_heads") or values.get("model.heads")
    leaves["head_size"] = size
    leaves["window_size"] = values.get("model.attention.window") if kind.windowed else None
    leaves["softmax_scale_power"] = _power(size, scale)
    if values.get("model.attention.norm") == "head":
        leaves |= {
            f"{part}_norm.{name}": value
            for part in ("query", "key")
            for name, value in _norm(values).items()
        }
    return leaves | _biases(values) | _rotary(values, context, kind)


def _power(size: int | None, scale: float | None) -> float | None:
    """Return the exponent p for which size ** -p == scale. Return None if p is the default of 0.5,
    or if it would be negative.
    """
    if scale is None or not size or size == 1 or math.isclose(scale, size**-0.5, rel_tol=1e-9):
        return None
    power = -math.log(scale) / math.log(size)
    return power if power >= 0 else None


def _biases(values: Group) -> Leaves:
    """Return the settings of biases: one switch if all projections are alike, else a switch for
    each projection.
    """
    qkv, output = (values.get(f"model.attention.{name}_bias") for name in ("qkv", "output"))
    if qkv is None or output is None or qkv == output:
        return {"add_linear_biases": output if qkv is None else qkv}
    layers = {f"{name}_layer.bias.enabled": qkv for name in ("query", "key", "value")}
    return {"add_linear_biases": False, **layers, "dense_layer.bias.enabled": output}


def _rotary(values: Group, context: Context, kind: Kind) -> Leaves:
    positions, base = values.get("model.embedding.positions"), values.get("model.rotary.base")
    rotates = base is not None if positions is None else positions == "rotary"
    if not kind.rotary or not rotates:
        if positions is None and kind.rotary:
            return {}
        return {"rotary.type": "none"} if context.since("0.2.0") else {"rotary.enabled": False}
    if kind.windowed:
        base = values.get("model.rotary.local_base") or base
    if not context.since("0.2.0"):
        return {"rotary.enabled": True, "rotary.scale": -math.log(base) if base else None}
    scaling = values.get("model.rotary.scaling.kind") or "none"
    available = scaling in STRETCHED and context.since(LATER[scaling])
    names = STRETCHED[scaling] if available else {}
    leaves = {
        f"rotary.{name}": values.get(f"model.rotary.scaling.{ours}") for ours, name in names.items()
    }
    return {"rotary.type": scaling if available else "default", "rotary.theta": base, **leaves}


def _mlp(values: Group, kind: Kind) -> Leaves:
    leaves: Leaves = {name: values.get(ours) for ours, name in MLP.items()}
    again = ("experts" if kind.experts else "mlp") in (values.get("recompute.modules") or ())
    leaves["activation"] = THEIRS.get(values.get("model.mlp.activation") or "")
    leaves["recompute_level"] = (
        "full" if again and values.get("recompute.granularity") == "selective" else None
    )
    return leaves


def _experts(values: Group, layout: Layout) -> Leaves:
    """Return the settings of experts. Fast-LLM's shared experts are as wide as routed experts, and
    its number of experts includes them.
    """
    width = values.get("model.moe.ffn") or values.get("model.ffn")
    wide, balance = values.get("model.moe.shared_ffn") or 0, values.get("model.moe.balance")
    # A plan has the width of all shared experts together; one that is no multiple of a routed one
    # cannot be written.
    shared = wide // width if width and wide % width == 0 else 0
    loss = values.get("model.moe.aux_loss")
    return {
        "type": "moe" if layout != "oldest" else None,
        "intermediate_size": width,
        "experts": values["model.experts"] + shared,
        "shared_experts": shared or None,
        "experts_per_token": values.get("model.moe.top_k"),
        "routing": "sinkhorn" if balance == "sinkhorn" else None,
        "auxiliary_loss_coefficient": 0.0 if balance == "none" else loss,
        "z_loss_coefficient": values.get("model.moe.z_loss"),
    }


def _norm(values: Group) -> Leaves:
    kind = KINDS.get(values.get("model.norm.kind") or "")
    return {"type": kind, **{name: values.get(ours) for ours, name in NORM.items()}}


def _places(values: Group) -> Leaves:
    """Return the settings of norms after each layer. Norms before each layer are switched off if
    the plan does not have them.
    """
    place, leaves = values.get("model.norm.place"), Leaves()
    for layer in ("mixer", "mlp"):
        if place == "after":
            leaves[f"pre_{layer}_normalization.type"] = "none"
        if place in ("after", "both"):
            leaves |= {
                f"post_{layer}_normalization.{name}": value for name, value in _norm(values).items()
            }
    return leaves


# Initial weights


def _initial(values: Group, layout: Layout) -> Leaves:
    """Return the standard deviations of initial weights that differ from Fast-LLM's defaults."""
    std, hidden, layers = (
        values.get("model.init.std"),
        values.get("model.hidden"),
        values.get("model.layers"),
    )
    scaled = bool(values.get("model.init.scaled"))
    if std is None or not layers:
        return {}
    out = std / math.sqrt(2 * layers) if scaled else std
    if layout == "oldest":
        whole = {} if scaled else {"init.dense": out, "init.layer_2": out}
        return {"init.std": std, **whole}
    if hidden and not scaled and math.isclose(std, hidden**-0.5, rel_tol=1e-9):
        return {}  # Fast-LLM's own default
    deviations = {
        f"{place}.initialization": size for place, size in _initial_deviations(values, std, out)
    }
    return {
        f"{place}.{name}": value
        for place, size in deviations.items()
        for name, value in (("type", "normal"), ("std", size))
    }


def _initial_deviations(values: Group, std: float, out: float) -> Iterator[tuple[str, float]]:
    yield "embeddings.word_embeddings", std
    if values.get("model.embedding.positions") == "learned":
        yield "embeddings.position_embeddings", std
    if not values.get("model.tied"):
        yield "head.output_weight", std
    yield from ((BLOCK + place, std) for place in (*PLAIN, "mixer.value_layer.weight"))
    yield from ((BLOCK + place, out) for place in OUT)
    if values.get("model.experts"):
        yield f"{BLOCK}mlp.router.weight", std
