# Made of schema.json by `python docs/generate`.
from typing import Any, Literal

from pydantic import Field as field

from bridge.plan.section import Count, Real
from compat.huggingface.setting_types import Dtype, Free, ModelKeys, Share

unset: Any

class HuggingFace(ModelKeys):
    model_type: str | None = None
    torch_dtype: Dtype | None = None
    dtype: Dtype | None = None
    router_jitter_noise: Share | None = None
    clip_qkv: Real | None = None
    scale_attn_by_inverse_layer_idx: bool | None = None
    scale_attn_weights: bool | None = None
    apply_residual_connection_post_layernorm: bool | None = None
    use_bidirectional_attention: bool | None = None
    layerdrop: Share | None = None
    layer_norm_elementwise_affine: bool | None = None
    hybrid_override_pattern: str | None = None
    quantization_config: Free | None = None
    pretraining_tp: Count | None = None
    others: Free | None = field(None, alias='*')

SCHEMA = HuggingFace
