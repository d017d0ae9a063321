"""Why a rule has no example: what keeps every source from it."""

from __future__ import annotations

from collections.abc import Mapping

CHOICES = (
    "none: the flag's parser refuses every other value first, and no other source has the setting"
)
DEFAULTS = "none: the parser has a default for it, and no flag takes that away"

REASONS: Mapping[str, Mapping[str, str]] = {
    "megatron": {
        "fim_prefix_token/fim_data-expects-all-of-its": DEFAULTS,
        "inference_dynamic_batching_buffer_guaranteed_fraction/missing-inference_dynamic_batching-needs-it": DEFAULTS,
        "inference_dynamic_batching_buffer_size_gb/missing-inference_dynamic_batching-needs-it": DEFAULTS,
        "megatron_fsdp_version/found-expected-1-or-2": CHOICES,
        "no_weight_decay_cond_type/found-expected-apply_wd_to_qk_layernorm": CHOICES,
    }
}
"""By stack and rule."""
