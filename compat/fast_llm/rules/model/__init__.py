"""Rules that convert the section of the model, in any release's layout, to the plan's model, and
back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.stack.rules import Group, convert
from bridge.stack.words import some
from compat.fast_llm.rules import router_losses
from compat.fast_llm.rules.model.places import BASE as BASE, layout_of as layout_of
from compat.fast_llm.rules.model.reading import (
    MASTER,
    SCALE as SCALE,
    read,
    unread_settings_text,
    unsaid,
    weigh,
)
from compat.fast_llm.rules.model.writing import OURS, write

BESIDE = (
    "parallel.vocabulary",
    "precision.residual",
    "optimizer.embedding_lr",
    "optimizer.output_lr",
    "recompute.granularity",
    "recompute.modules",
    "adapters.rank",
    "adapters.alpha",
    "adapters.dropout",
    "adapters.targets",
    "habits.embedding_lr",
    "habits.output_lr",
    router_losses.HABIT,
)
"""Plan fields outside `model` for which Fast-LLM has a setting in its model section."""


def facts(values: Group) -> Mapping[str, Any]:
    """Return the plan fields that the model section sets, with the defaults of the newest layout
    for missing settings; empty without a model section.
    """
    return read(values, None)


REASONS = {
    f"model.{name}": reason
    for name, reason in {
        "tied": "Fast-LLM ties embedding and output layer unless tied weights are switched off",
        "predicted": "Fast-LLM predicts further tokens with plain blocks, unlike all other stacks",
        "norm": (
            "Fast-LLM's norms are LayerNorm with a bias or RMSNorm, alike everywhere in the model"
        ),
        "norm.place": (
            "Fast-LLM has norms before each layer, after each layer, or both, alike in all blocks"
        ),
        "norm.parallel": "in Fast-LLM's blocks, attention and feed-forward layer run one after the other",
        "norm.shared": "in Fast-LLM's blocks, attention and feed-forward layer run one after the other",
        "mlp.activation": (
            "Fast-LLM has silu, relu, squared relu, and the tanh approximation of gelu"
        ),
        "attention.norm": "Fast-LLM normalises queries and keys by head, with the settings of the block's norms",
        "attention.scale": "Fast-LLM scales attention logits by a power of the head's width",
        "attention.sinks": "Fast-LLM has no attention sinks",
        "rotary": (
            "Fast-LLM rotates all features of a head, pairs the first half with the second, and "
            "scales positions only as llama3 or yarn"
        ),
        "embedding.positions": "Fast-LLM's positions are rotary, learned or none",
        "embedding.norm": "Fast-LLM has no norm after the embedding",
        "embedding.output_bias": "Fast-LLM's output layer has no bias",
        "embedding.padding": "Fast-LLM trains the row of the padding token as all others, in inputs that contain this token",
        "embedding.offset": "Fast-LLM's table of learned positions has position 0 in row 0",
        "moe.score": "Fast-LLM's router computes the softmax over a token's chosen experts",
        "moe.normalised": (
            "Fast-LLM's router computes the softmax over a token's chosen experts, whose weights "
            "sum to one"
        ),
        "moe.shared_ffn": "Fast-LLM's shared experts are as wide as the routed experts",
        "moe.shared_gate": "Fast-LLM's shared experts have no gate",
        "moe.balance": "Fast-LLM balances experts by a loss in each block over each microbatch, or by sinkhorn",
        "moe.aux_trained": "Fast-LLM adds the load-balancing loss to the training loss whenever its coefficient is set",
        **dict.fromkeys(("moe.aux_loss", "moe.z_loss"), router_losses.SUMS),
        "moe.router_bias": "Fast-LLM's router has no bias",
        "moe.balance_bias": "Fast-LLM's router has no bias",
        "init": "Fast-LLM sets the standard deviation of initial weights for each layer",
    }.items()
} | {
    router_losses.HABIT: router_losses.SUMS,
    "adapters.targets": "Fast-LLM adapts queries and values alone by default, keys only with values, and never the output layer",
}
"""The reason why a field of the plan's model may be lost, by field."""

RULE = convert(
    BASE,
    (*OURS, *BESIDE),
    read,
    write,
    effect=weigh,
    sees=(
        *(MASTER, SCALE, "precision.compute", "precision.master"),
        *(*router_losses.SEES, *router_losses.SEES_OF_PLAN),
    ),
    blurs=some(unsaid),
    tells=unread_settings_text,
    lossy="either Fast-LLM's model has no setting with this meaning, or stagebridge does not translate it",
    model=True,
    mixed=True,
    reasons=REASONS,
    source="models/gpt/config.py, layers/attention/config.py, layers/decoder/config.py, layers/decoder/mlp/config.py, "
    "layers/common/normalization/config.py, layers/language_model/config.py; layers/transformer/config.py before 0.3.0",
)
