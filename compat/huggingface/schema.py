"""Every key of a `config.json` that says what the model is, typed; the rest stays as it stands."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic import Field as field

from bridge.config import Count, Real
from bridge.families.schema import Free, ModelKeys, Share

REST = "*"


def _dtype(value: Any) -> Any:
    return value.removeprefix("torch.") if isinstance(value, str) else value


class HuggingFace(ModelKeys):
    """A model's config."""

    model_type: str | None = field(None, description="The family, by the name that transformers has for it.")
    torch_dtype: Annotated[str, BeforeValidator(_dtype)] | None = field(None, description="Format that weights are stored in.")
    dtype: Annotated[str, BeforeValidator(_dtype)] | None = field(None, description="The same since transformers 5.")
    # What no plan has words for
    router_jitter_noise: Share | None = field(None, description="Noise on a router's input while training.")
    clip_qkv: Real | None = field(None, description="Bound of queries, keys and values.")
    scale_attn_by_inverse_layer_idx: bool | None = field(None, description="GPT-2's logits are divided by the block's number.")
    scale_attn_weights: bool | None = field(None, description="GPT-2's logits are scaled at all.")
    apply_residual_connection_post_layernorm: bool | None = field(None, description="Bloom's residual is taken after the norm.")
    use_bidirectional_attention: bool | None = field(None, description="Gemma attends to what follows, too.")
    layerdrop: Share | None = field(None, description="OPT leaves out blocks at random.")
    layer_norm_elementwise_affine: bool | None = field(None, description="OPT's norms have weights.")
    hybrid_override_pattern: str | None = field(None, description="Kinds of Nemotron-H's blocks, a letter each.")
    quantization_config: Free | None = field(None, description="How stored weights are quantised.")
    pretraining_tp: Count | None = field(None, description="Tensor ranks whose order of sums old files repeat.")
    others: Free | None = field(None, alias=REST, description="Every other key, as it stands: tokens, names, classes.")


SCHEMA = HuggingFace
"""What the dialect's package is asked for."""
