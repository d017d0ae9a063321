"""Facts about the model of a checkpoint. The shapes of its tensors, its own record, the config in its folder and a
config that the user names are believed in this order; two that contradict each other are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from bridge.checkpoint.hub import Hub, Model
from bridge.checkpoint.lazy import read_strips
from bridge.checkpoint.parameter_names import neutral_shapes, read_names
from bridge.checkpoint.renaming import (
    all_namings,
    naming_that_fits,
    shapes_by_name,
    try_namings,
    unwrap_names,
)
from bridge.errors import SourceError
from bridge.stack.checkpoint_side import namings_of
from bridge.stack.dialect import Config
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
    "queries": "rows of the queries (heads x size of a head)",
    "keys": "rows of the keys (groups of heads x size of a head)",
}
MEASURED = {
    r"embedding\.tokens\.weight": (("vocab", 0), ("hidden", 1)),
    r"embedding\.positions\.weight": (("positions", 0),),
    r"block\d+\.attention\.query\.weight": (("queries", 0), ("hidden", 1)),
    r"block\d+\.attention\.key\.weight": (("keys", 0),),
    r"block\d+\.attention\.query_norm\.weight": (("head_size", 0),),
    r"block\d+\.mlp\.down\.weight": (("ffn", 1),),
    r"block\d+\.mlp\.experts\.\d+\.down\.weight": (("expert_ffn", 1),),
    r"block\d+\.mlp\.shared\.down\.weight": (("shared_ffn", 1),),
}
"""Patterns of neutral names, each with the facts that a dimension of the parameter shows."""
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
        refusals,
    )


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
    statements = [(f"{folder}, its own record of the model", model_of(hub)), *configs]
    refusals = tuple(dict.fromkeys(line for _, model in statements for line in model.refused))
    measures = [] if refusals else list(_measure(hub))
    claims_by_fact: dict[str, tuple[str, Any]] = {}
    problems: dict[tuple[str, str], str] = {}
    for place, model in statements:
        claims = {**_stated(model), **_products(model)}
        for fact, value in claims.items():
            there, other = claims_by_fact.setdefault(fact, (place, value))
            if other != value:
                problems[place, fact] = f"found {value}, but {there}: {other}"
        for fact, size, name in measures:
            value = claims.get(fact, size)
            # An embedding may have more rows than words: what is left is padding.
            if value > size if fact == "vocab" else value != size:
                problems[place, fact] = f"found {value}, but the weights have {size} ({name})"
        if not refusals and (line := _untrue_tie(hub, model.tied)):
            problems[place, "tied"] = f"found {model.tied}, but {line}"
    SourceError.raise_if(
        f"{place}: {WORDS[fact]}: {line}; name the config that belongs to this checkpoint"
        for (place, fact), line in problems.items()
    )
    facts = {fact: value for fact, (_, value) in claims_by_fact.items() if fact in _NAMES}
    return Model(**facts, refused=refusals)


_NAMES = tuple(field.name for field in fields(Model) if field.name != "refused")


def _stated(model: Model) -> dict[str, Any]:
    return {name: value for name in _NAMES if (value := getattr(model, name)) is not None}


def _products(model: Model) -> dict[str, int]:
    """Return the rows of queries and keys that a model of these sizes has."""
    size = model.head_size
    if size is None and model.hidden and model.heads:
        size = model.hidden // model.heads
    pairs = {"queries": model.heads, "keys": model.kv_heads}
    return {fact: heads * size for fact, heads in pairs.items() if heads and size}


def _neutral_of(hub: Hub) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the shapes of the neutral parameters in a checkpoint, and for each the name under which
    the checkpoint has it. Both are empty if no family has these names.
    """
    recognition = try_namings(hub)
    if recognition is None:
        return {}, {}
    try:
        # All rows of queries, keys and values together are as many with any number of groups.
        pieces = read_names(
            recognition.naming, recognition.table, shapes_by_name(hub), Model(kv_heads=1)
        )
        shapes = neutral_shapes(pieces)
    except SourceError:
        # Shapes that no model of the family has: renaming refuses them, and other formats keep them.
        return {}, {}
    return shapes, {block.name: theirs.name for theirs in pieces for block in theirs.blocks}


def _measure(hub: Hub) -> Iterator[tuple[str, int, str]]:
    """Yield each fact that shapes show, with the size and the name of the parameter that shows it."""
    shapes, names = _neutral_of(hub)
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
    yield from (
        (fact, len(names_by_number), names_by_number[max(names_by_number)])
        for fact, names_by_number in numbers.items()
        if names_by_number
    )


def _untrue_tie(hub: Hub, tied: bool | None) -> str:
    """Return what contradicts that the output is tied, or that it is not; empty if nothing does."""
    shapes, names = _neutral_of(hub)
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
    `establish_model` holds against `configs`.
    """
    if target or usual:
        hub = unwrap_names(hub)
    facts = establish_model(hub, configs)
    hub_with_facts = replace(hub, model=None if facts == Model() else facts)
    return naming_that_fits(hub_with_facts, target, usual, facts)
