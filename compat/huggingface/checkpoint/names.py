"""Parameter names of transformers' models: GPT-2, and decoders like Llama, with or without experts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bridge.checkpoint.hub import Model
from bridge.checkpoint.parameter_names import (
    GivenConfig,
    NameRow,
    Naming,
    Shapes,
    Table,
    one_to_one_rows,
)
from bridge.errors import SourceError
from bridge.files.shown import show_value

if TYPE_CHECKING:
    pass

EXPERT = "block{layer}.mlp.experts.{expert}"
CLASS = re.compile(
    r"(?:For[A-Z]\w+?(?:LM|Classification|Answering|Generation|Prediction|Model)|Model)$"
)
"""How the names of transformers' classes of whole models end."""
BUFFERS = r".*\.(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)"
"""Pattern for the names of buffers that some releases save although the model computes them."""

HEADS = one_to_one_rows(
    {
        "model.layers.{layer}.self_attn.q_proj.{kind}": "block{layer}.attention.query.{kind}",
        "model.layers.{layer}.self_attn.k_proj.{kind}": "block{layer}.attention.key.{kind}",
        "model.layers.{layer}.self_attn.v_proj.{kind}": "block{layer}.attention.value.{kind}",
        "model.layers.{layer}.self_attn.o_proj.{kind}": "block{layer}.attention.out.{kind}",
        "model.layers.{layer}.self_attn.q_norm.{kind}": "block{layer}.attention.query_norm.{kind}",
        "model.layers.{layer}.self_attn.k_norm.{kind}": "block{layer}.attention.key_norm.{kind}",
    }
)
DENSE = one_to_one_rows(
    {
        "model.layers.{layer}.mlp.gate_proj.{kind}": "block{layer}.mlp.gate.{kind}",
        "model.layers.{layer}.mlp.up_proj.{kind}": "block{layer}.mlp.up.{kind}",
        "model.layers.{layer}.mlp.down_proj.{kind}": "block{layer}.mlp.down.{kind}",
    }
)
NORMS = one_to_one_rows(
    {
        "model.layers.{layer}.input_layernorm.{kind}": "block{layer}.norm1.{kind}",
        "model.layers.{layer}.post_attention_layernorm.{kind}": "block{layer}.norm2.{kind}",
    }
)
ROUTER = one_to_one_rows({"model.layers.{layer}.mlp.gate.{kind}": "block{layer}.mlp.router.{kind}"})
SHARED = one_to_one_rows(
    {
        "model.layers.{layer}.mlp.shared_expert.gate_proj.{kind}": "block{layer}.mlp.shared.gate.{kind}",
        "model.layers.{layer}.mlp.shared_expert.up_proj.{kind}": "block{layer}.mlp.shared.up.{kind}",
        "model.layers.{layer}.mlp.shared_expert.down_proj.{kind}": "block{layer}.mlp.shared.down.{kind}",
        "model.layers.{layer}.mlp.shared_expert_gate.weight": "block{layer}.mlp.shared_gate.weight",
    }
)
APART = one_to_one_rows(
    {
        "model.layers.{layer}.mlp.experts.{expert}.gate_proj.{kind}": f"{EXPERT}.gate.{{kind}}",
        "model.layers.{layer}.mlp.experts.{expert}.up_proj.{kind}": f"{EXPERT}.up.{{kind}}",
        "model.layers.{layer}.mlp.experts.{expert}.down_proj.{kind}": f"{EXPERT}.down.{{kind}}",
    }
)
MIXTRAL = (
    *one_to_one_rows(
        {"model.layers.{layer}.block_sparse_moe.gate.weight": "block{layer}.mlp.router.weight"}
    ),
    *one_to_one_rows(
        {
            "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight": f"{EXPERT}.gate.weight",
            "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight": f"{EXPERT}.down.weight",
            "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight": f"{EXPERT}.up.weight",
        }
    ),
)
# Since transformers 5 a running model holds gate and up of all experts in one tensor, one behind
# the other.
STACKED = (
    NameRow(
        "model.layers.{layer}.mlp.experts.gate_up_proj",
        (f"{EXPERT}.gate.weight", f"{EXPERT}.up.weight"),
        stacked=True,
    ),
    NameRow("model.layers.{layer}.mlp.experts.down_proj", (f"{EXPERT}.down.weight",), stacked=True),
)
WORDS = one_to_one_rows({"model.embed_tokens.weight": "embedding.tokens.weight"}, padded=True)
END = (
    *one_to_one_rows({"model.norm.{kind}": "head.norm.{kind}"}),
    *one_to_one_rows({"lm_head.weight": "head.logits.weight"}, padded=True),
)
TIED = ("lm_head.weight", "model.embed_tokens.weight")


def _decoder(family: str, *layer: tuple[NameRow, ...], heads: tuple[NameRow, ...] = HEADS) -> Table:
    """Return the table of a family that differs from Llama only in its feed-forward layers."""
    return Table(
        family,
        WORDS,
        (*heads, *(row for part in layer for row in part), *NORMS),
        END,
        BUFFERS,
        TIED,
    )


LLAMA = _decoder("dense decoder like Llama", DENSE)
MIXTRAL_SAVED = _decoder("Mixtral", MIXTRAL)
EXPERTS_SAVED = _decoder("decoder with experts as in Qwen", DENSE, ROUTER, APART, SHARED)
HEADS_WITHOUT_NORMS = tuple(row for row in HEADS if "_norm" not in row.theirs)
EXPERTS_RUNNING = _decoder(
    "decoder with experts in one tensor", DENSE, ROUTER, STACKED, SHARED, heads=HEADS_WITHOUT_NORMS
)
# Qwen3, whose heads have norms, is the only one of these families in which experts come before their router.
QWEN3_RUNNING = _decoder(
    "decoder with experts in one tensor as in Qwen3", DENSE, STACKED, ROUTER, SHARED
)


def _gpt2(top: str) -> Table:
    """Return GPT-2's table, for names that begin with `top`. GPT-2's linear layers are
    transformers' `Conv1D`, whose weights are transposed.
    """
    inside = f"{top}h.{{layer}}."
    heads = tuple(f"block{{layer}}.attention.{part}.{{kind}}" for part in ("query", "key", "value"))
    norms = {
        f"{inside}ln_{number}.{{kind}}": f"block{{layer}}.norm{number}.{{kind}}"
        for number in (1, 2)
    }
    first, second = one_to_one_rows(norms)
    layer = (
        first,
        NameRow(f"{inside}attn.c_attn.{{kind}}", heads, turned=True),
        NameRow(
            f"{inside}attn.c_proj.{{kind}}", ("block{layer}.attention.out.{kind}",), turned=True
        ),
        second,
        NameRow(f"{inside}mlp.c_fc.{{kind}}", ("block{layer}.mlp.up.{kind}",), turned=True),
        NameRow(f"{inside}mlp.c_proj.{{kind}}", ("block{layer}.mlp.down.{kind}",), turned=True),
    )
    words = one_to_one_rows({f"{top}wte.weight": "embedding.tokens.weight"}, padded=True)
    places = one_to_one_rows({f"{top}wpe.weight": "embedding.positions.weight"})
    last = (
        *one_to_one_rows({f"{top}ln_f.{{kind}}": "head.norm.{kind}"}),
        *(END[-1:] if top else ()),
    )
    tied = ("lm_head.weight", f"{top}wte.weight") if top else None
    return Table("GPT-2", (*words, *places), layer, last, BUFFERS, tied)


GPT2, BARE_GPT2 = _gpt2("transformer."), _gpt2("")
"""Tables for GPT-2 with an output layer, and for GPT-2 without one, as in the first published
files.
"""

MODELS = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Values of `model_type` to which these tables apply. Other families may use the same names for
weights with another meaning.
"""


class Saved(Naming):
    """Parameter names in files that transformers saves, and in published models."""

    name = "huggingface"
    title = "Hugging Face"
    stack = "huggingface"

    def describe_model(self, config: GivenConfig) -> tuple[str | None, tuple[str, ...]]:
        """Return the `model_type`, and a refusal unless it is one of `MODELS`. A class with another name than
        those of transformers, such as `LlamaForCausalLMEagle`, is of no family.
        """
        family = str(config.given.get("model_type"))
        has_map = family in MODELS
        classes = (config.given.get("*") or {}).get("architectures") or ()
        if classes and not any(CLASS.search(str(one)) for one in classes):
            return None, (
                f"architectures: found {show_value(classes[0])}, no class of transformers for {show_value(family)}",
            )
        return family, () if has_map else (
            f"model_type: found {family!r}; maps of parameter names are known for {', '.join(MODELS)}",
        )

    def tables(self) -> Sequence[Table]:
        """Return the tables of all families. The tables of families with experts come last."""
        return (GPT2, BARE_GPT2, LLAMA, MIXTRAL_SAVED, EXPERTS_SAVED)

    def table_for_shapes(self, shapes: Shapes, facts: Model) -> Table:
        """Return the table of names with which parameters of these shapes are written."""
        return _family(shapes, facts, experts_of(facts, shapes))


class Runtime(Naming):
    """Parameter names in a running model of transformers 5, which stacks the experts of a layer in
    one tensor. DeepSpeed and FSDP work with these names.
    """

    name = "transformers"
    title = "transformers 5 in memory"
    stack = "huggingface"

    def tables(self) -> Sequence[Table]:
        """Return the tables in which the names in a running model differ from the names in saved files."""
        return (EXPERTS_RUNNING, QWEN3_RUNNING)

    def table_for_shapes(self, shapes: Shapes, facts: Model) -> Table:
        """Return the table of names with which parameters of these shapes are written."""
        norms = any(name.endswith("query_norm.weight") for name in shapes)
        return _family(shapes, facts, QWEN3_RUNNING if norms else EXPERTS_RUNNING)


def experts_of(facts: Model, shapes: Shapes) -> Table:
    """Return the table of a model with experts: the table of Mixtral, unless the config or other
    parameters show a Qwen model.
    """
    qwen = any(
        name.endswith(("query_norm.weight", "shared_gate.weight", "query.bias")) for name in shapes
    )
    return EXPERTS_SAVED if qwen or (facts.family or "").startswith("qwen") else MIXTRAL_SAVED


def _family(shapes: Shapes, facts: Model, experts: Table) -> Table:
    if any(".mlp.router." in name for name in shapes):
        return experts
    if "embedding.positions.weight" not in shapes:
        return LLAMA
    # GPT-2 has learned positions, equally wide queries and keys, and no gates; with any of these it
    # is no family's model.
    wide = {
        name: shape
        for name, shape in shapes.items()
        if name.endswith(("attention.query.weight", "attention.key.weight"))
    }
    if len(set(wide.values())) > 1 or any(name.endswith(".mlp.gate.weight") for name in shapes):
        raise SourceError(
            "huggingface: found learned positions with grouped heads or gates, which no family of "
            "transformers combines; convert to another format"
        )
    return GPT2
