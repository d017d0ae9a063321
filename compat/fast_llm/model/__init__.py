"""The model in its own section: what a plan says of it, in whatever layout of releases it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.rules import Group, convert
from compat.fast_llm.model.places import BASE as BASE
from compat.fast_llm.model.places import layout_of as layout_of
from compat.fast_llm.model.reading import MASTER, read, told, unsaid, weigh
from compat.fast_llm.model.reading import SCALE as SCALE
from compat.fast_llm.model.writing import OURS, write

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
)
"""What a plan says elsewhere, and Fast-LLM in the section of its model."""


def facts(values: Group) -> Mapping[str, Any]:
    """Plan fields that the model section tells, as the newest layout takes its defaults; empty without a section."""
    return read(values, None)


REASONS = {
    f"model.{name}": reason
    for name, reason in {
        "tied": "Fast-LLM ties embedding and output layer unless it is told not to",
        "predicted": "Fast-LLM predicts further tokens with plain blocks, which is no other stack's model",
        "norm": "Fast-LLM's norms are LayerNorm with a bias or RMSNorm, alike in all places",
        "norm.place": "Fast-LLM has norms before a layer, after it, or both, the same in all blocks",
        "norm.parallel": "Fast-LLM's blocks are sequential",
        "norm.shared": "Fast-LLM's blocks are sequential",
        "mlp.activation": "Fast-LLM's gelu is the approximation by tanh, and beside it there are silu, relu and squared relu",
        "attention.norm": "Fast-LLM's norms of queries and keys are of each head, with the settings of the block's",
        "attention.scale": "Fast-LLM's factor of attention's logits is a power of the head's width",
        "attention.sinks": "Fast-LLM's heads attend to nothing but tokens",
        "rotary": "Fast-LLM rotates halves of whole heads, and scales as llama3 or yarn",
        "embedding.positions": "Fast-LLM's positions are rotary, learned or none",
        "embedding.norm": "Fast-LLM has no norm after the embedding",
        "embedding.output_bias": "Fast-LLM's output layer has no bias",
        "embedding.offset": "Fast-LLM's table of positions begins with the first one",
        "moe.score": "Fast-LLM's router takes softmax over the experts of a token",
        "moe.normalised": "Fast-LLM's router takes softmax over the experts of a token, which sums to one",
        "moe.shared_ffn": "Fast-LLM's shared experts are as wide as the others",
        "moe.shared_gate": "Fast-LLM's shared experts have no gate",
        "moe.balance": "Fast-LLM balances by a loss of each block over each microbatch, or by sinkhorn",
        "moe.aux_trained": "Fast-LLM trains that loss wherever it has a coefficient",
        "moe.router_bias": "Fast-LLM's router has no bias",
        "moe.balance_bias": "Fast-LLM's router has no bias",
        "init": "Fast-LLM draws first weights with a deviation for each layer",
    }.items()
}
"""Why single fields of the model may be lost."""

RULE = convert(
    BASE,
    (*OURS, *BESIDE),
    read,
    write,
    effect=weigh,
    sees=(MASTER, SCALE, "precision.compute", "precision.master"),
    blurs=lambda values: bool(unsaid(values)),
    tells=told,
    lossy="Fast-LLM's model has no such setting, or none that means the same, or a Plan has none",
    model=True,
    mixed=True,
    reasons=REASONS,
    source="models/gpt/config.py, layers/attention/config.py, layers/decoder/config.py, layers/decoder/mlp/config.py, "
    "layers/common/normalization/config.py, layers/language_model/config.py; layers/transformer/config.py before 0.3.0",
)
