"""Every key of a `config.json` that describes the model, with its type. All other keys are kept
unchanged in `others`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field as field

from bridge.plan.families.schema import REST, Free, ModelKeys, Share
from bridge.plan.section import Count, Real


def _dtype(value: Any) -> Any:
    return value.removeprefix("torch.") if isinstance(value, str) else value


class HuggingFace(ModelKeys):
    """A model's config."""

    model_type: str | None = field(
        None, description="Family of the model, by its name in transformers."
    )
    torch_dtype: Annotated[str, BeforeValidator(_dtype)] | None = field(
        None, description="Format of the stored weights."
    )
    dtype: Annotated[str, BeforeValidator(_dtype)] | None = field(
        None, description="Format of the stored weights, since transformers 5."
    )
    # Keys without a plan field
    router_jitter_noise: Share | None = field(
        None, description="Noise on a router's input while training."
    )
    clip_qkv: Real | None = field(
        None, description="Largest absolute value of queries, keys and values."
    )
    scale_attn_by_inverse_layer_idx: bool | None = field(
        None, description="GPT-2 divides attention logits by the number of the block."
    )
    scale_attn_weights: bool | None = field(None, description="GPT-2 scales attention logits.")
    apply_residual_connection_post_layernorm: bool | None = field(
        None, description="Bloom's residual connection starts after the norm."
    )
    use_bidirectional_attention: bool | None = field(
        None, description="Gemma also attends to later tokens."
    )
    layerdrop: Share | None = field(
        None, description="Probability that OPT skips a block in a training step."
    )
    layer_norm_elementwise_affine: bool | None = field(
        None, description="OPT's norms have weights."
    )
    hybrid_override_pattern: str | None = field(
        None, description="Kinds of Nemotron-H's blocks, one letter for each block."
    )
    quantization_config: Free | None = field(None, description="How stored weights are quantised.")
    pretraining_tp: Count | None = field(
        None,
        description=(
            "Tensor parallel size of an old model's training; sums are"
            " computed in the order of that size."
        ),
    )
    others: Free | None = field(
        None, alias=REST, description="All other keys, unchanged: tokens, names, classes."
    )


SCHEMA = HuggingFace
"""The schema, under the name by which `PackagedDialect` finds it."""
