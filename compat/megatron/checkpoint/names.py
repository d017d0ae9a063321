"""Parameter names of Megatron-Core's GPT, with layers of Transformer Engine and with Megatron's own layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bridge.checkpoint.hub import Hub, Model
from bridge.checkpoint.parameter_names import (
    GivenConfig,
    NameRow,
    Naming,
    Shapes,
    Table,
    one_to_one_rows,
)
from compat.megatron.checkpoint.run import model_of, refusals, run_state

if TYPE_CHECKING:
    pass

EXPERT = "block{layer}.mlp.experts.{expert}"
IN_LAYER: Mapping[str, str] = {
    "input_layernorm": "norm1",
    "pre_mlp_layernorm": "norm2",
    "self_attention.linear_proj": "attention.out",
    "self_attention.q_layernorm": "attention.query_norm",
    "self_attention.k_layernorm": "attention.key_norm",
    "mlp.router": "mlp.router",
}
"""For each module of Megatron's layers: the native module with the same weights."""
FUSED: Mapping[str, str] = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Norms that Transformer Engine keeps inside the next linear layer. Distributed checkpoints have
these names in models with either kind of layers (models/gpt/gpt_layer_specs.py: sharded_state_dict_keys_map).
"""
TOP = "decoder.layers.{layer}."


def _ours(names: Sequence[str], inside: str = "block{layer}.") -> tuple[str, ...]:
    return tuple(f"{inside}{name}.{{kind}}" for name in names)


def _halves(theirs: str, inside: str, kind: str = "{kind}") -> tuple[NameRow, ...]:
    """Return table rows for the first matrix of a feed-forward layer. It is a stack of gate and up
    projection, or only the up projection.
    """
    both = tuple(f"{inside}.{part}.{kind}" for part in ("gate", "up"))
    # Whether the layer is gated is a fact about the model, and only one of the two rows is used.
    return (NameRow(theirs, both, gated=True), NameRow(theirs, both[1:], gated=False))


ALONE = tuple(
    NameRow(f"{TOP}{module}.{{kind}}", _ours([ours])) for module, ours in IN_LAYER.items()
)
NORMS, REST = ALONE[:2], ALONE[2:]
WITHIN = tuple(
    NameRow(f"{TOP}{theirs}{{kind}}", _ours([IN_LAYER[module.rstrip(".")]]))
    for module, theirs in FUSED.items()
)
# One matrix; its rows go by query group: the group's query heads, its key head, its value head.
QKV = NameRow(
    f"{TOP}self_attention.linear_qkv.{{kind}}",
    _ours(["attention.query", "attention.key", "attention.value"]),
    heads=True,
)
FEED = (
    *_halves(f"{TOP}mlp.linear_fc1.{{kind}}", "block{layer}.mlp"),
    NameRow(f"{TOP}mlp.linear_fc2.{{kind}}", _ours(["mlp.down"])),
)
SHARED = (
    *_halves(f"{TOP}mlp.shared_experts.linear_fc1.{{kind}}", "block{layer}.mlp.shared"),
    NameRow(f"{TOP}mlp.shared_experts.linear_fc2.{{kind}}", _ours(["mlp.shared.down"])),
    NameRow(f"{TOP}mlp.shared_experts.gate_weight", ("block{layer}.mlp.shared_gate.weight",)),
)
LOCAL = f"{TOP}mlp.experts.local_experts.{{expert}}."
EXPERTS = (
    *_halves(f"{LOCAL}linear_fc1.{{kind}}", EXPERT),
    NameRow(f"{LOCAL}linear_fc2.{{kind}}", (f"{EXPERT}.down.{{kind}}",)),
)
# Experts in one grouped matrix product: a parameter for each expert, weight0, weight1, ...
GROUPED = (
    *_halves(f"{TOP}mlp.experts.linear_fc1.weight{{expert}}", EXPERT, "weight"),
    NameRow(f"{TOP}mlp.experts.linear_fc2.weight{{expert}}", (f"{EXPERT}.down.weight",)),
)
WORDS = one_to_one_rows(
    {"embedding.word_embeddings.weight": "embedding.tokens.weight"}, padded=True
)
FIRST = (
    *WORDS,
    *one_to_one_rows({"embedding.position_embeddings.weight": "embedding.positions.weight"}),
)
LAST = (
    *one_to_one_rows({"decoder.final_layernorm.{kind}": "head.norm.{kind}"}),
    *one_to_one_rows({"output_layer.weight": "head.logits.weight"}, padded=True),
)
# Transformer Engine's scales of 8-bit formats; they are no parameters.
IGNORED = r".*\._extra_state"


def _table(family: str, *layer: tuple[NameRow, ...]) -> Table:
    return Table(family, FIRST, tuple(row for part in layer for row in part), LAST, IGNORED)


ENGINE = _table("GPT of Megatron-Core", WITHIN[:1], REST, (QKV,), WITHIN[1:], FEED)
EXPERTS_ENGINE = _table(
    "GPT of Megatron-Core with experts", WITHIN[:1], NORMS[1:], REST, (QKV,), FEED, SHARED, GROUPED
)
OWN = _table("GPT of Megatron-Core's own layers", NORMS, REST, (QKV,), FEED, SHARED, EXPERTS)
MIXED = _table("GPT of Megatron-Core", NORMS, WITHIN, REST, (QKV,), FEED, SHARED, EXPERTS, GROUPED)
"""The table with all names of the other tables; every checkpoint is read with it."""


class Engine(Naming):
    """Names of models with the Transformer Engine spec, and of distributed checkpoints."""

    name = "megatron"
    title = "Megatron-Core"
    stack = "megatron"

    def describe_model(self, config: GivenConfig) -> tuple[str | None, tuple[str, ...]]:
        """Return None as the model's family, and a refusal for each argument that changes the meaning
        of weights.
        """
        # A config of another stack has no such attribute.
        args = getattr(config, "args", None)
        return None, () if args is None else refusals(args)

    def carry_facts(self, hub: Hub) -> Model | None:
        """Return facts about the model from Megatron's arguments. Checkpoints in other formats
        carry these arguments in the script's own state.
        """
        return model_of(run_state(hub).get("args") or {})

    def tables(self) -> Sequence[Table]:
        """Return the only table. It has the names of all kinds of models."""
        return (MIXED,)

    def table_for_shapes(self, shapes: Shapes, facts: Model) -> Table:
        """Return the table with which names are written. Models with experts have a table of their
        own, because each of their layers has a separate norm before the experts.
        """
        return EXPERTS_ENGINE if any(".mlp.router." in name for name in shapes) else ENGINE


class Own(Naming):
    """Names of models with the local spec, Megatron's own modules."""

    name = "megatron-local"
    title = "Megatron-Core's own layers"
    stack = "megatron"

    def tables(self) -> Sequence[Table]:
        """Return the only table, which has the names of the local spec."""
        return (OWN,)

    def table_for_shapes(self, shapes: Shapes, facts: Model) -> Table:
        """Return the table with which names are written. It is the table of the local spec for
        every model.
        """
        return OWN
