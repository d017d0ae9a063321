"""Facts about the model of a checkpoint. The shapes of its tensors, its own record, the config in its folder and a
config that the user names are believed in this order; two that contradict each other are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from bridge.checkpoint.hub import Hub, Model, loss_finding
from bridge.checkpoint.lazy import read_strips
from bridge.checkpoint.renaming import (
    all_namings,
    naming_of_name,
    naming_that_fits,
    try_namings,
    unwrap_names,
)
from bridge.checkpoint.whole_models import NeutralModel, neutral_model, refuse_parts
from bridge.errors import BridgeError, SourceError
from bridge.plan.section import Section, flatten
from bridge.stack import registry
from bridge.stack.checkpoint_side import namings_of, side_of
from bridge.stack.dialect import Config
from bridge.stack.rules import Effect
from bridge.translation.lift import lift

Said = tuple[str, Model]
"""A place, in words for messages, with what it says about the model."""
WORDS: Mapping[str, str] = {
    "kv_heads": "groups of attention heads that share keys",
    "vocab": "words of the vocabulary",
    "family": "the family of models",
    "layers": "layers",
    "hidden": "the hidden size",
    "heads": "attention heads",
    "head_size": "the size of an attention head",
    "ffn": "the size of the feed-forward layer",
    "experts": "experts",
    "expert_ffn": "the size of an expert's feed-forward layer",
    "shared_ffn": "the size of the shared expert's feed-forward layer",
    "positions": "learned positions",
    "tied": "whether the output uses the word embedding",
    "qkv_bias": "whether queries, keys and values have biases",
    "output_bias": "whether the projection of attention's output has a bias",
    "mlp_bias": "whether the feed-forward layer has biases",
    "norm_bias": "whether norms have biases",
    "head_norms": "whether queries and keys have norms",
    "gated": "whether the feed-forward layer has a gate",
    "queries": "rows of the queries (heads x size of a head)",
    "keys": "rows of the keys (groups of heads x size of a head)",
}
MEASURED = {
    r"embedding\.tokens\.weight": (("vocab", 0), ("hidden", 1)),
    r"embedding\.positions\.weight": (("positions", 0),),
    r"block\d+\.attention\.query\.weight": (("queries", 0), ("hidden", 1)),
    r"block\d+\.attention\.(?:key|value)\.weight": (("keys", 0), ("hidden", 1)),
    r"block\d+\.attention\.out\.weight": (("hidden", 0), ("queries", 1)),
    r"block\d+\.attention\.query_norm\.weight": (("head_size", 0),),
    r"block\d+\.mlp\.(?:up|gate)\.weight": (("ffn", 0), ("hidden", 1)),
    r"block\d+\.mlp\.down\.weight": (("hidden", 0), ("ffn", 1)),
    r"block\d+\.mlp\.experts\.\d+\.(?:up|gate)\.weight": (("expert_ffn", 0), ("hidden", 1)),
    r"block\d+\.mlp\.experts\.\d+\.down\.weight": (("hidden", 0), ("expert_ffn", 1)),
    r"block\d+\.mlp\.shared\.down\.weight": (("shared_ffn", 1),),
}
"""Patterns of neutral names, each with the facts that a dimension of the parameter shows."""
FORWARD = r"block\d+\.mlp\.(?:experts\.\d+\.|shared\.)?"
PRESENT = {
    "qkv_bias": (r"block\d+\.attention\.query\.", "weight", "bias"),
    "output_bias": (r"block\d+\.attention\.out\.", "weight", "bias"),
    "mlp_bias": (rf"{FORWARD}up\.", "weight", "bias"),
    "norm_bias": (r"block\d+\.norm1\.", "weight", "bias"),
    "head_norms": (r"block\d+\.attention\.", r"query\.weight", r"query_norm\.weight"),
    "gated": (FORWARD, r"up\.weight", r"gate\.weight"),
}
"""Facts that names show: the pattern with which neutral names begin, and how the parameter that every model
has ends, and the one that only some have.
"""
SPARED = (
    *("family.", "sequence.", "predicted.", "init.", "dropout.", "attention.dropout."),
    *("embedding.dropout.", "embedding.max_positions.", "embedding.padded_vocab."),
    *(
        "moe.balance",
        "moe.aux",
        "moe.z_loss.",
        "moe.capacity.",
        "moe.router_bias.",
        "moe.shared_gate.",
    ),
    *("layers.", "hidden.", "heads.", "kv_heads.", "ffn.", "experts.", "tied.", "vocab."),
    *("attention.head_size.", "attention.qkv_bias.", "attention.output_bias.", "attention.norm."),
    *("mlp.gated.", "mlp.bias.", "norm.bias.", "norm.shared.", "moe.ffn.", "moe.shared_ffn."),
)
"""Beginnings of the paths of a plan's model that concern its training, or that are facts of `Model`."""
ABSENT = (
    *("attention.softcap", "attention.scale", "attention.window", "attention.sinks"),
    *("rotary.local_base", "mlp.clamp", "embedding.scale", "embedding.softcap"),
    *("embedding.logit_scale", "embedding.residual_scale"),
)
"""Paths that a model without such a thing leaves open."""
OUTPUT, EMBEDDING = "head.logits.weight", "embedding.tokens.weight"


def describe_config(config: Config) -> Model:
    """Return what a config says about its model."""
    model = lift(config).model
    descriptions = [naming.describe_model(config) for naming in namings_of(config.dialect)]
    family = next((family for family, _ in descriptions if family), None)
    refusals = tuple(dict.fromkeys(line for _, lines in descriptions for line in lines))
    return Model(
        model.kv_heads or model.heads,
        model.vocab,
        family,
        model.layers,
        model.hidden,
        model.heads,
        model.attention.head_size,
        model.ffn,
        model.experts,
        (model.moe.ffn or model.ffn) if model.experts else None,
        model.moe.shared_ffn or None,
        model.embedding.max_positions if model.embedding.positions == "learned" else None,
        model.tied,
        model.attention.qkv_bias,
        model.attention.output_bias,
        model.mlp.bias,
        model.norm.bias,
        None if model.attention.norm is None else model.attention.norm != "none",
        model.mlp.gated,
        refusals,
        settings=_settings_of(model) if model.layers else None,
    )


def _settings_of(model: Section) -> dict[str, Any]:
    """Return the settings of a plan's model that shapes do not show."""
    values = flatten(model, only_set=False)
    return {
        path: value or "none" if path in ABSENT else value
        for path, value in values.items()
        if not f"{path}.".startswith(SPARED) and (value is not None or path in ABSENT)
    }


def config_of_record(hub: Hub) -> Config | None:
    """Return the config of the arguments of a run in a checkpoint; None if it does not have all of them. Raises
    `BridgeError` for arguments without a meaning.
    """
    configs = (side_of(registry.load(name)).config_of_record(hub) for name in registry.OWN)
    return next(filter(None, configs), None)


def model_of(hub: Hub) -> Model:
    """Return what the checkpoint's own record says about its model."""
    records = (naming.carry_facts(hub) for naming in all_namings().values())
    return hub.model or next((model for model in records if model is not None), Model())


def establish_model(hub: Hub, configs: Sequence[Said] = ()) -> Model:
    """Return the facts about the model of a checkpoint, each from the first place that states it: the
    checkpoint's own record, then `configs` in order. Raises `SourceError` with both values and both
    places if two places, or a place and the shapes, contradict each other.
    """
    folder = hub.origin.files[0].parent if hub.origin.files else hub.origin.format
    record = model_of(hub)
    padded = record.padded_vocab
    if padded in {model.vocab for _, model in configs}:
        record = replace(record, vocab=padded)  # the config counts the padding as words
    statements = [(f"{folder}, its own record of the model", record), *configs]
    refusals = tuple(dict.fromkeys(line for _, model in statements for line in model.refused))
    model_there = (
        NeutralModel()
        if refusals
        else neutral_model(
            hub, next((model.family for _, model in statements if model.family), None)
        )
    )
    measures = list(_measure(model_there))
    claims_by_fact: dict[str, tuple[str, Any]] = {}
    problems: dict[tuple[str, str], str] = {}
    for place, model in statements:
        claims = {**_stated(model), **_products(model), **(model.settings or {})}
        for fact, value in claims.items():
            there, other = claims_by_fact.setdefault(fact, (place, value))
            if other != value:
                problems[place, fact] = f"found {value}, but {there}: {other}"
        for fact, size, name in measures:
            value = claims.get(fact, size)
            # An embedding may have more rows than words: what is left is padding, up to a multiple of
            # a number that ranks and kernels divide by, which is even, or that the record states.
            is_padded = fact == "vocab" and value < size and (size % 2 == 0 or size == padded)
            # Layers may be under other names, which are no family's.
            elsewhere = fact == "layers" and value > size and not model_there.alone
            if value != size and not is_padded and not elsewhere:
                problems[place, fact] = f"found {value}, but the weights have {size} ({name})"
        if not refusals and (line := _untrue_tie(hub, model.tied)):
            problems[place, "tied"] = f"found {model.tied}, but {line}"
    SourceError.raise_if(
        f"{place}: {WORDS.get(fact, fact)}: {line}; name the config that belongs to this checkpoint"
        for (place, fact), line in problems.items()
    )
    facts = {fact: value for fact, (_, value) in claims_by_fact.items() if fact in _NAMES}
    return Model(**facts, refused=refusals)


_NAMES = tuple(
    field.name
    for field in fields(Model)
    if field.name not in ("refused", "padded_vocab", "settings")
)


def _stated(model: Model) -> dict[str, Any]:
    return {name: value for name in _NAMES if (value := getattr(model, name)) is not None}


def _products(model: Model) -> dict[str, int]:
    """Return the rows of queries and keys that a model of these sizes has."""
    size = model.head_size
    if size is None and model.hidden and model.heads:
        size = model.hidden // model.heads
    pairs = {"queries": model.heads, "keys": model.kv_heads}
    return {fact: heads * size for fact, heads in pairs.items() if heads and size}


def _measure(model: NeutralModel) -> Iterator[tuple[str, int, str]]:
    """Yield each fact that shapes show, with the size and the name of the parameter that shows it."""
    shapes, names = model.shapes, model.names
    numbers: dict[str, dict[int, str]] = {"layers": {}, "experts": {}}
    for ours, shape in shapes.items():
        for pattern, facts in MEASURED.items():
            if re.fullmatch(pattern, ours):
                yield from ((fact, shape[at], names[ours]) for fact, at in facts if at < len(shape))
        for part, fact in (
            (r"block(\d+)\.", "layers"),
            (r"block\d+\.mlp\.experts\.(\d+)\.", "experts"),
        ):
            if match := re.match(part, ours):
                numbers[fact].setdefault(int(match[1]), names[ours])
    for fact, (start, usual, special) in PRESENT.items():
        there = [name for name in shapes if re.fullmatch(start + special, name)]
        others = [name for name in shapes if re.fullmatch(start + usual, name)]
        if there or others:
            yield fact, bool(there), names[(there or others)[0]]
    yield from (
        (fact, len(names_by_number), names_by_number[max(names_by_number)])
        for fact, names_by_number in numbers.items()
        if names_by_number
    )


def _untrue_tie(hub: Hub, tied: bool | None) -> str:
    """Return what contradicts that the output is tied, or that it is not; empty if nothing does."""
    model = neutral_model(hub)
    shapes, names = model.shapes, model.names
    words, output = (names.get(name) for name in (EMBEDDING, OUTPUT))
    if tied is False and output is None and "head.norm.weight" in shapes:
        return "the checkpoint has no weight of the output"
    if not tied or words is None or output is None:
        return ""
    import torch

    one, other = (hub.parameters[hub.ties.get(name, name)].best for name in (words, output))
    # Two copies of one tensor are tied as well. Only then are elements read.
    equal = one is other or (
        (one.shape, one.dtype) == (other.shape, other.dtype)
        and all(map(torch.equal, read_strips(one), read_strips(other)))
    )
    return "" if equal else f"{output} and {words} are different tensors"


def rename_under(hub: Hub, target: str | None, usual: str | None, configs: Sequence[Said]) -> Hub:
    """Return the checkpoint that `naming_that_fits` returns, with the facts about its model, which
    `establish_model` holds against `configs`. Raises `SourceError` if a target that is loaded by names
    would get a part of a model.
    """
    return rename_known(*with_arguments(hub, configs), target, usual)


def with_arguments(hub: Hub, configs: Sequence[Said]) -> tuple[Hub, Sequence[Said]]:
    """Return the checkpoint without what wraps its names, and `configs` after what the arguments of its run say of the
    model, if it has any. A finding says so if they cannot be read.
    """
    hub = unwrap_names(hub)
    try:
        if configs and (record := config_of_record(hub)) is not None:
            settings = Model(settings=describe_config(record).settings)
            configs = [("the arguments of the run in the checkpoint", settings), *configs]
    except BridgeError as error:
        message = f"the arguments of the run are not held against a config, as they cannot be read: {error}"
        hub = replace(hub, findings=(*hub.findings, loss_finding("args", message, Effect.NONE)))
    return hub, configs


def rename_known(hub: Hub, configs: Sequence[Said], target: str | None, usual: str | None) -> Hub:
    """Return what `rename_under` does of the result of `with_arguments`."""
    if target or usual:
        _refuse_parts(hub, target or usual or "", configs)
    facts = establish_model(hub, configs)
    hub_with_facts = replace(hub, model=None if facts == Model() else facts)
    return naming_that_fits(hub_with_facts, target, usual, facts)


def _refuse_parts(hub: Hub, target: str, configs: Sequence[Said]) -> None:
    models = [model_of(hub), *(model for _, model in configs)]
    family = next((model.family for model in models if model.family), None)
    layers = next((model.layers for model in models if model.layers), None)
    known_as = try_namings(hub)
    renames = known_as is not None and known_as.naming.stack != naming_of_name(target).stack
    if (family or renames) and not any(model.refused for model in models):
        refuse_parts(hub, Model(family=family, layers=layers))
