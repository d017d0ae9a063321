"""Checks and derivations of `TransformerConfig.__post_init__` for sizes, precision, recomputation
and attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from bridge.stack.checks import (
    above,
    equals,
    excludes,
    multiple_of,
    needs,
    on,
    one_of,
    positive,
    set_,
)
from compat.megatron.arguments.namespace import Namespace, Predicate, Step, member_name
from compat.megatron.arguments.steps import (
    check,
    compute_argument,
    derive,
    fallback,
    inherit,
    under,
    when,
)
from compat.megatron.releases import MAIN, RELEASES

CLASS = "TransformerConfig"
PRECISION = "TransformerConfig: fp8 and fp4"
RECOMPUTE = "TransformerConfig: recomputation"
OFFLOAD = "TransformerConfig: offloading"
ACTIVATION = "TransformerConfig: activation"
ATTENTION = "TransformerConfig: attention"
DELTA = "TransformerConfig: gated delta net"
SPARSE = "TransformerConfig: sparse attention"
STREAMS = "TransformerConfig: residual streams"
EXPERTS = "TransformerConfig: experts"
MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe")
"""Modules that can be recomputed; shared_experts came with 0.14, gdn_norm_out with 0.19."""
OFFLOADED = (
    "core_attn",
    "attn_proj",
    "expert_fc1",
    "moe_act",
    "attn_norm",
    "mlp_norm",
    "qkv_linear",
)
"""Modules whose activations can be offloaded; fused_group_mlp came with 0.19."""
LINEAR = (
    "linear_attention_freq",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)


def activation(c: Namespace) -> str:
    """Return the name of the activation function; gelu if none is set."""
    # A live config object holds the function itself, a config of flags its name.
    function: Any = c.activation_func
    return "gelu" if function is None else member_name(getattr(function, "__name__", function))


def _is_delta(c: Namespace) -> bool:
    """Whether attention is a gated delta net: `gated_delta_net`, or since 0.20 `gdn` or `gdn2`."""
    variant = c.experimental_attention_variant
    return variant == "gated_delta_net" or (
        variant in ("gdn", "gdn2") and RELEASES.since(c.release, MAIN)
    )


_delta = under(DELTA, _is_delta, "0.16.0")


def _missing(name: str) -> Step:
    """Return a check that refuses a missing size `name`."""
    # gdn2 may be the G of a hybrid pattern, and then it needs no frequency.
    return _delta(
        lambda c: (
            getattr(c, name) is None
            and (name, c.experimental_attention_variant) != (LINEAR[0], "gdn2")
        ),
        f"{name}: missing; experimental_attention_variant gated_delta_net needs it",
    )


def _linear_heads(c: Namespace, ranks: int) -> bool:
    """Whether the number of value heads is a multiple of the number of key heads, and both are
    multiples of `ranks`.
    """
    if any(getattr(c, name) is None for name in LINEAR[1:]):
        return True  # the checks of missing sizes refuse it instead
    keys, values = c.linear_num_key_heads, c.linear_num_value_heads
    return bool(keys) and values % keys == 0 and keys % ranks == 0 and values % ranks == 0


HEADS = (
    "linear_num_key_heads: found {linear_num_key_heads}, and linear_num_value_heads {linear_num_value_heads};"
    " expected the number of value heads to be a multiple of the number of key heads, and both to "
    "be multiples of the number of ranks"
)

SIZE_STEPS: tuple[Step, ...] = (
    derive(
        DELTA,
        when(
            lambda c: c.experimental_attention_variant == "gated_delta_net",
            experimental_attention_variant="gdn",
        ),
        since=MAIN,
    ),
    check(
        CLASS,
        lambda c: c.mtp_hsm and (c.mtp_num_layers or 0) < 2,
        "mtp_hsm: found with mtp_num_layers {mtp_num_layers}; expected at least 2",
        since=MAIN,
    ),
    positive("gdp_num_householder", CLASS, since=MAIN),
    # Stages send the residual stream, so messages have its format.
    derive(
        CLASS,
        when(
            lambda c: c.fp32_residual_connection and c.pipeline_dtype is not None,
            pipeline_dtype="torch.float32",
        ),
        since="0.17.0",
    ),
    excludes("fp16", "bf16", CLASS),
    multiple_of("num_attention_heads", "tensor_model_parallel_size", CLASS),
    check(
        CLASS,
        lambda c: c.num_layers < 1,
        "num_layers: found {num_layers}; expected a positive number",
        needs=("num_layers",),
        last=True,
    ),
    derive(CLASS, inherit("embedding_init_method_std", "init_method_std"), since="0.14.0"),
    # The class does not know SwiGLU's narrower default; validate_args has set the width before
    # (arguments/training.py).
    derive(CLASS, fallback("ffn_hidden_size", lambda c: 4 * c.hidden_size), needs=("hidden_size",)),
    derive(
        CLASS,
        fallback("kv_channels", lambda c: c.hidden_size // max(c.num_attention_heads, 1)),
        needs=("hidden_size", "num_attention_heads"),
    ),
    derive(
        CLASS, inherit("num_query_groups", "num_attention_heads"), needs=("num_attention_heads",)
    ),
    # Since 0.16, several tensor ranks may share a query group, so a divisor of the ranks is allowed
    # too.
    multiple_of("num_query_groups", "tensor_model_parallel_size", CLASS, until="0.16.0"),
    check(
        CLASS,
        lambda c: (
            c.num_query_groups % c.tensor_model_parallel_size != 0
            and (c.num_query_groups == 0 or c.tensor_model_parallel_size % c.num_query_groups != 0)
        ),
        "num_query_groups: found {num_query_groups}; expected a multiple or a divisor of"
        " tensor_model_parallel_size ({tensor_model_parallel_size})",
        since="0.16.0",
        needs=("num_query_groups",),
    ),
    *map(_missing, LINEAR),
    _delta(
        lambda c: not _linear_heads(c, c.tensor_model_parallel_size),
        HEADS + " (tensor_model_parallel_size {tensor_model_parallel_size})",
        until="0.18.0",
    ),
    _delta(
        lambda c: c.context_parallel_size != 1,
        "context_parallel_size: found {context_parallel_size} with gated_delta_net; this release expects 1",
        until="0.18.0",
    ),
    _delta(
        lambda c: not _linear_heads(c, c.tensor_model_parallel_size * c.context_parallel_size),
        HEADS
        + " (tensor_model_parallel_size {tensor_model_parallel_size} x context_parallel_size {context_parallel_size})",
        since="0.18.0",
    ),
    # Sparse attention runs on latents whose projections are absorbed into others, and this works
    # only without biases.
    excludes(
        "add_bias_linear",
        equals("experimental_attention_variant", "dsa"),
        SPARSE,
        "add --disable-bias-linear",
        since="0.19.0",
    ),
    check(
        SPARSE,
        lambda c: (
            c.experimental_attention_variant == "dsa"
            and (c.dsa_indexer_topk_freq < 1 or c.dsa_indexer_skip_topk_offset < 0)
        ),
        "dsa_indexer_topk_freq: found {dsa_indexer_topk_freq}, and dsa_indexer_skip_topk_offset"
        " {dsa_indexer_skip_topk_offset}; expected at least 1 for the first, and at least 0 for "
        "the second",
        since="0.19.0",
    ),
)


def _bf16_layers(name: str) -> Step:
    """Return a check that the layers kept in bf16 at one end of the model fit into one stage."""

    def fails(c: Namespace) -> bool:
        most = c.num_layers // c.pipeline_model_parallel_size
        return bool(c.fp8 and c.first_last_layers_bf16 and not 0 <= getattr(c, name) <= most)

    return check(
        PRECISION,
        fails,
        f"{name}: found {{{name}}}; expected a number from 0 to the layers of one pipeline rank: num_layers"
        " ({num_layers}) / pipeline_model_parallel_size ({pipeline_model_parallel_size})",
        since="0.12.0",
        needs=("num_layers",),
        name="found-expected-0-to-the",
    )


PRECISION_STEPS: tuple[Step, ...] = (
    check(
        PRECISION,
        lambda c: c.fp8 and c.first_last_layers_bf16 and member_name(c.fp8_recipe) == "delayed",
        "first_last_layers_bf16: found with fp8_recipe delayed, which cannot keep single layers in bf16; choose another recipe",
        since="0.12.0",
    ),
    _bf16_layers("num_layers_at_start_in_bf16"),
    _bf16_layers("num_layers_at_end_in_bf16"),
    check(
        PRECISION,
        lambda c: c.fp8 and member_name(c.fp8_recipe) == "mxfp8" and c.fp8_param,
        "fp8_param: found with fp8_recipe mxfp8, which this release cannot keep in fp8; drop --fp8-param-gather",
        since="0.12.0",
        until="0.13.0",
    ),
    check(
        PRECISION,
        lambda c: c.fp8 and member_name(c.fp8_recipe) == "custom" and not c.fp8_quantizer_factory,
        "fp8_quantizer_factory: missing; fp8_recipe custom needs it; add --fp8-quantizer-factory",
        since="0.16.0",
    ),
    needs(
        "fp8_param",
        "fp8",
        PRECISION,
        "add --fp8-format, or drop --fp8-param-gather",
        since="0.12.0",
    ),
    check(
        PRECISION,
        lambda c: c.fp8_output_proj and (not c.fp8 or member_name(c.fp8_recipe) != "mxfp8"),
        "fp8_output_proj: found with fp8 {fp8} and fp8_recipe {fp8_recipe}; expected fp8 with mxfp8",
        since="0.18.0",
    ),
    needs("fp4_param", "fp4", PRECISION, "add --fp4-format", since="0.15.0"),
    excludes("fp4", "fp8", PRECISION, since="0.15.0"),
    check(
        PRECISION,
        lambda c: c.fp4 and member_name(c.fp4_recipe) == "custom" and not c.fp4_quantizer_factory,
        "fp4_quantizer_factory: missing; fp4_recipe custom needs it; add --fp4-quantizer-factory",
        since="0.16.0",
    ),
    derive(CLASS, when(lambda c: c.apply_query_key_layer_scaling, attention_softmax_in_fp32=True)),
)


_selective = under(RECOMPUTE, equals("recompute_granularity", "selective"), "0.12.0")


def _unknown_modules(names: tuple[str, ...], since: str, until: str) -> Step:
    return _selective(
        lambda c: set(c.recompute_modules) - set(names),
        f"recompute_modules: found {{recompute_modules}}; expected some of {', '.join(names)}",
        since,
        until,
    )


def _whole_layers(c: Namespace) -> None:
    """Replace the deprecated moe_layer_recompute by `moe` in recompute_modules."""
    if c.moe_layer_recompute:
        c.recompute_granularity = "selective"
        if "moe" not in c.recompute_modules:
            # A new list: the old one may be the user's.
            c.recompute_modules = [*c.recompute_modules, "moe"]


def _narrow_recompute(c: Namespace) -> bool:
    return bool(c.fp8 and {"moe_act", "layernorm"} & set(c.recompute_modules))


_streamed = under(
    RECOMPUTE,
    lambda c: c.recompute_granularity == "selective" and "mhc" in (c.recompute_modules or ()),
    MAIN,
)
SINGLE: Mapping[str, Predicate] = {
    "mtp_num_layers": lambda c: c.mtp_num_layers is not None,
    "recompute_granularity": lambda c: c.recompute_granularity == "full",
    "inference_fuse_tp_communication": lambda c: c.inference_fuse_tp_communication,
    "pipeline_model_parallel_size": lambda c: c.pipeline_model_parallel_size > 1,
    "fp32_residual_connection": lambda c: c.fp32_residual_connection,
}
"""Settings that cannot be combined with several residual streams (enable_mhc_connections), each
with its condition.
"""


def _single(name: str, fails: Predicate) -> Step:
    return check(
        STREAMS,
        lambda c: c.enable_mhc_connections and fails(c),
        f"enable_mhc_connections: found with {name} {{{name}}}; drop one of them",
        since=MAIN,
    )


RECOMPUTE_STEPS: tuple[Step, ...] = (
    check(
        OFFLOAD,
        lambda c: c.cpu_offloading and not 0 <= c.cpu_offloading_num_layers < c.num_layers,
        "cpu_offloading_num_layers: found {cpu_offloading_num_layers}; expected less than num_layers ({num_layers})",
        needs=("num_layers",),
    ),
    excludes("cpu_offloading", above("pipeline_model_parallel_size", 1), OFFLOAD, "expected 1"),
    excludes("cpu_offloading", set_("recompute_granularity"), OFFLOAD),
    one_of("recompute_granularity", (None, "full", "selective"), RECOMPUTE),
    check(
        RECOMPUTE,
        lambda c: (
            c.recompute_granularity is not None
            and c.recompute_method not in (None, "block", "uniform")
        ),
        "recompute_method: found {recompute_method}; expected block or uniform",
    ),
    check(
        RECOMPUTE,
        lambda c: c.recompute_granularity == "full" and c.recompute_method is None,
        "recompute_method: missing; recompute_granularity full needs it; add --recompute-method uniform or block",
    ),
    check(
        RECOMPUTE,
        lambda c: c.recompute_granularity == "full" and c.recompute_num_layers is None,
        "recompute_num_layers: missing; recompute_granularity full needs it; add --recompute-num-layers",
    ),
    excludes(
        set_("recompute_num_layers"),
        equals("recompute_granularity", "selective"),
        RECOMPUTE,
        "drop it",
    ),
    check(
        RECOMPUTE,
        lambda c: (
            c.recompute_granularity is not None
            and c.distribute_saved_activations
            and c.sequence_parallel
        ),
        "distribute_saved_activations: found with sequence_parallel, which already splits the "
        "activations; drop one of the two",
    ),
    # Selective recomputation without names is that of the attention core, as before 0.12.
    derive(
        RECOMPUTE,
        when(lambda c: c.recompute_modules is None, recompute_modules=["core_attn"]),
        since="0.12.0",
    ),
    _unknown_modules(MODULES, "0.12.0", "0.14.0"),
    _unknown_modules((*MODULES, "shared_experts"), "0.14.0", "0.19.0"),
    _unknown_modules((*MODULES, "shared_experts", "gdn_norm_out"), "0.19.0", MAIN),
    _unknown_modules(
        (*MODULES, "shared_experts", "gdn_norm_out", "gdp_in_proj", "gdp_qkv", "mhc"), MAIN, ""
    ),
    _selective(
        lambda c: "moe_act" in c.recompute_modules and not c.moe_grouped_gemm,
        "recompute_modules: found moe_act without moe_grouped_gemm; add --moe-grouped-gemm",
    ),
    _selective(
        lambda c: "mla_up_proj" in c.recompute_modules and not c.multi_latent_attention,
        "recompute_modules: found mla_up_proj without multi_latent_attention; drop it",
    ),
    _selective(
        lambda c: "gdn_norm_out" in c.recompute_modules and not _is_delta(c),
        "recompute_modules: found gdn_norm_out without gated_delta_net attention; drop it",
        since="0.19.0",
    ),
    _selective(
        lambda c: (
            "shared_experts" in c.recompute_modules
            and c.moe_shared_expert_intermediate_size is not None
            and c.moe_shared_expert_overlap
        ),
        "recompute_modules: found shared_experts with moe_shared_expert_overlap; keep one of them",
        since="0.14.0",
    ),
    # Since 0.14, only delayed scaling rules this recomputation out.
    _selective(
        _narrow_recompute,
        "recompute_modules: found moe_act or layernorm with fp8, which this release cannot recompute; drop them",
        since="0.13.0",
        until="0.14.0",
    ),
    _selective(
        lambda c: _narrow_recompute(c) and member_name(c.fp8_recipe) == "delayed",
        "recompute_modules: found moe_act or layernorm with fp8_recipe delayed; choose another recipe, or drop them",
        since="0.14.0",
    ),
    excludes(
        "moe_layer_recompute",
        equals("recompute_granularity", "full"),
        RECOMPUTE,
        "drop one of them",
        since="0.12.0",
    ),
    derive(RECOMPUTE, _whole_layers, since="0.12.0"),
    _streamed(
        lambda c: not c.enable_mhc_connections,
        "recompute_modules: found mhc without enable_mhc_connections; drop it",
    ),
    _streamed(
        lambda c: "mlp" in c.recompute_modules,
        "recompute_modules: found mhc with mlp; keep one of them",
    ),
    _streamed(
        lambda c: c.mhc_recompute_layer_num is not None and c.mhc_recompute_layer_num < 1,
        "mhc_recompute_layer_num: found {mhc_recompute_layer_num}; expected a positive number",
    ),
    _streamed(
        lambda c: c.fine_grained_activation_offloading,
        "recompute_modules: found mhc with fine_grained_activation_offloading; keep one of them",
    ),
    *(_single(name, fails) for name, fails in SINGLE.items()),
    check(
        STREAMS,
        lambda c: c.enable_mhc_connections and c.mhc_sinkhorn_iterations < 1,
        "mhc_sinkhorn_iterations: found {mhc_sinkhorn_iterations}; expected a positive number",
        since=MAIN,
    ),
    check(
        STREAMS,
        lambda c: c.enable_mhc_connections and c.mhc_init_gating_factor < 0,
        "mhc_init_gating_factor: found {mhc_init_gating_factor}; expected no negative number",
        since=MAIN,
    ),
)


_fine = under(OFFLOAD, on("fine_grained_activation_offloading"), "0.16.0")


def _modules_to_offload(c: Namespace) -> set[str]:
    return set(c.offload_modules or ())


def _unknown_offloads(names: tuple[str, ...], since: str, until: str) -> Step:
    return _fine(
        lambda c: not _modules_to_offload(c) or _modules_to_offload(c) - set(names),
        f"offload_modules: found {{offload_modules}}; expected some of {', '.join(names)}",
        since,
        until,
    )


OFFLOAD_STEPS: tuple[Step, ...] = (
    _fine(
        lambda c: c.cpu_offloading,
        "fine_grained_activation_offloading: found with cpu_offloading; keep one of them",
    ),
    _unknown_offloads(OFFLOADED, "0.16.0", "0.19.0"),
    _unknown_offloads((*OFFLOADED, "fused_group_mlp"), "0.19.0", MAIN),
    _unknown_offloads((*OFFLOADED, "fused_group_mlp", "gdp_qkv"), MAIN, ""),
    _fine(
        lambda c: (
            "gdp_qkv" in _modules_to_offload(c)
            and c.recompute_granularity == "selective"
            and "gdp_in_proj" in c.recompute_modules
        ),
        "offload_modules: found gdp_qkv with gdp_in_proj in recompute_modules; drop one of them",
        since=MAIN,
    ),
    # The projection's input is the output of the core, which the core's backward needs on the
    # device.
    _fine(
        lambda c: (
            "attn_proj" in _modules_to_offload(c) and "core_attn" not in _modules_to_offload(c)
        ),
        "offload_modules: found attn_proj without core_attn, whose output it needs; add core_attn",
    ),
    # A recomputed layer of experts saves none of its inner activations, so there is nothing to
    # offload.
    _fine(
        lambda c: (
            c.recompute_granularity == "selective"
            and "moe" in c.recompute_modules
            and _modules_to_offload(c) & {"moe_act", "expert_fc1", "fused_group_mlp"}
        ),
        "offload_modules: found {offload_modules} with moe in recompute_modules; drop one of them",
        since="0.19.0",
        name="found-with-recomputation-of-whole",
    ),
    _fine(
        lambda c: (
            c.min_offloaded_tensor_size < 0
            or not 0 <= c.activation_offload_fraction <= 1
            or c.delta_offload_bytes_across_pp_ranks < 0
        ),
        "activation_offload_fraction: found {activation_offload_fraction}, min_offloaded_tensor_size"
        " {min_offloaded_tensor_size} and delta_offload_bytes_across_pp_ranks"
        " {delta_offload_bytes_across_pp_ranks}; expected a fraction from 0 to 1, and two sizes of at least 0",
        since="0.19.0",
    ),
    _fine(
        lambda c: (
            "fused_group_mlp" in _modules_to_offload(c)
            and (
                not c.use_transformer_engine_op_fuser
                or _modules_to_offload(c) & {"expert_fc1", "moe_act"}
            )
        ),
        "offload_modules: found fused_group_mlp; expected use_transformer_engine_op_fuser, and neither expert_fc1 nor moe_act",
        since="0.19.0",
    ),
    check(
        CLASS,
        lambda c: c.gdp_cutedsl_kernel and not 0 <= c.gdp_num_chunk_states_to_recompute <= 64,
        "gdp_num_chunk_states_to_recompute: found {gdp_num_chunk_states_to_recompute}; expected 0 to 64",
        since=MAIN,
    ),
    check(
        CLASS,
        lambda c: set(c.gtp_remat_opt_in_modules or ()) - {"moe_latent_proj"},
        "gtp_remat_opt_in_modules: found {gtp_remat_opt_in_modules}; expected moe_latent_proj",
        since=MAIN,
    ),
    check(
        OFFLOAD,
        lambda c: (
            c.moe_paged_stash
            and (
                c.cpu_offloading
                or c.moe_expert_rank_capacity_factor is None
                or _modules_to_offload(c) & {"expert_fc1", "moe_act", "fused_group_mlp"}
            )
        ),
        "moe_paged_stash: found with cpu_offloading {cpu_offloading}, moe_expert_rank_capacity_factor"
        " {moe_expert_rank_capacity_factor} and offload_modules {offload_modules}; set the factor, and drop"
        " cpu_offloading and the offloading of expert_fc1, moe_act and fused_group_mlp",
        since="0.18.0",
    ),
)


_fused = under(ACTIVATION, on("bias_activation_fusion"))


_clamped = under(
    ACTIVATION,
    lambda c: (
        c.activation_func_clamp_value is not None
        and activation(c) == "silu"
        and c.gated_linear_unit
    ),
    MAIN,
)


ACTIVATION_STEPS: tuple[Step, ...] = (
    _fused(
        lambda c: activation(c) not in ("gelu", "silu"),
        "bias_activation_fusion: found with an activation other than gelu and silu; add --no-bias-gelu-fusion",
        until="0.15.0",
        name="found-with-another-activation-than",
    ),
    _fused(
        lambda c: activation(c) not in ("gelu", "silu", "quick_gelu"),
        "bias_activation_fusion: found with an activation other than gelu, silu and quick_gelu; add --no-bias-gelu-fusion",
        since="0.15.0",
        name="found-with-another-activation-than",
    ),
    _fused(
        lambda c: activation(c) == "gelu" and not c.gated_linear_unit and not c.add_bias_linear,
        "bias_activation_fusion: found with gelu and without biases; add --no-bias-gelu-fusion",
        name="found-with-gelu-without-biases",
    ),
    _fused(
        lambda c: activation(c) == "quick_gelu" and not c.gated_linear_unit,
        "bias_activation_fusion: found with quick_gelu and without gated_linear_unit; add --no-bias-gelu-fusion",
        since="0.15.0",
        name="found-with-quick_gelu-without-gates",
    ),
    _fused(
        lambda c: c.glu_linear_offset != 0.0 and activation(c) != "quick_gelu",
        "glu_linear_offset: found {glu_linear_offset} with bias_activation_fusion; expected the activation"
        " quick_gelu",
        since="0.15.0",
        name="found-with-bias_activation_fusion-expected-quick_gelu",
    ),
    _fused(
        lambda c: c.use_te_activation_func,
        "use_te_activation_func: found with bias_activation_fusion; keep one of them",
        since="0.15.0",
    ),
    check(
        ACTIVATION,
        lambda c: c.fused_residual_rmsnorm and c.normalization != "RMSNorm",
        "fused_residual_rmsnorm: found with normalization {normalization}; expected RMSNorm",
        since="0.17.0",
    ),
    check(
        ACTIVATION,
        lambda c: c.use_te_activation_func and activation(c) not in ("gelu", "silu", "relu"),
        "use_te_activation_func: found with an activation other than gelu, silu and relu; drop it",
        since="0.15.0",
        name="found-with-another-activation-than",
    ),
    check(
        ACTIVATION,
        lambda c: (
            c.activation_func_fp8_input_store
            and (activation(c) != "silu" or not c.gated_linear_unit)
        ),
        "activation_func_fp8_input_store: found with an activation other than SwiGLU; drop it, or add --swiglu",
        name="found-with-another-activation-than",
    ),
    _clamped(
        lambda c: not 0 < c.activation_func_clamp_value < inf,
        "activation_func_clamp_value: found {activation_func_clamp_value}; SwiGLU expects a positive number",
    ),
    _clamped(
        lambda c: c.num_moe_experts is None,
        "activation_func_clamp_value: found with SwiGLU and without experts; drop it",
    ),
    _clamped(
        lambda c: c.glu_linear_offset != 0.0,
        "glu_linear_offset: found {glu_linear_offset} with SwiGLU and activation_func_clamp_value; expected 0.0",
    ),
    _clamped(
        lambda c: c.use_te_activation_func,
        "use_te_activation_func: found with SwiGLU and activation_func_clamp_value; keep one of them",
    ),
)


def _positive_base(c: Namespace) -> bool:
    # Without a base, the model is its own base, and the width multiplier is 1.
    base = c.hidden_size if c.mup_base_hidden_size is None else c.mup_base_hidden_size
    return base is None or base > 0


def _scales_by_width(c: Namespace) -> bool:
    """Whether the factor of attention logits follows from the width of a head."""
    return bool(c.use_mup and _positive_base(c) and c.softmax_scale is None and c.kv_channels)


def _base_width(c: Namespace) -> float:
    return 1.0 if c.mup_base_head_dim is None else float(c.mup_base_head_dim)


def _width_scale(c: Namespace) -> float | None:
    """Return the factor of attention logits, sqrt(base head width) / head width ^ power. None if it
    is not a number.
    """
    # Upstream's default power of 1 is that of maximal update parametrization; 0.5 is that of usual
    # attention.
    try:
        return float(_base_width(c) ** 0.5 / c.kv_channels**c.mup_attn_scale_power)
    except (ArithmeticError, TypeError):  # of a complex number: a negative one to a part of a power
        return None


def _scale_by_width(c: Namespace) -> None:
    """Set the base width, the width multiplier and their scales (maximal update parametrization)."""
    if c.use_mup and _positive_base(c):
        c.mup_base_hidden_size = c.mup_base_hidden_size or c.hidden_size
        c.mup_width_mult = c.hidden_size / c.mup_base_hidden_size
        if _scales_by_width(c):
            c.softmax_scale = _width_scale(c)
        # Logits are divided by the width multiplier, so that they keep their size; a multiplier of
        # the user's stays.
        if c.mup_output_mult == 1.0 and c.mup_width_mult != 1.0:
            c.mup_output_mult = 1.0 / c.mup_width_mult


def _positions_fit(c: Namespace) -> bool:
    """Whether the pattern of layers without rotary positions fits the number of layers."""
    if not c.no_rope_freq:
        return True
    if isinstance(c.no_rope_freq, int):
        return bool(c.num_layers % c.no_rope_freq == 0)
    return bool(len(c.no_rope_freq) == c.num_layers)


ATTENTION_STEPS: tuple[Step, ...] = (
    check(
        ATTENTION,
        lambda c: c.apply_rope_fusion and c.rotary_interleaved,
        "rotary_interleaved: found with rope fusion; add --no-rope-fusion",
        until="0.12.1",
    ),
    excludes(
        "apply_rope_fusion",
        "multi_latent_attention",
        ATTENTION,
        "add --no-rope-fusion",
        since="0.11.0",
        until="0.13.0",
    ),
    excludes("fused_single_qkv_rope", "attention_output_gate", ATTENTION, since="0.16.0"),
    excludes("rotary_interleaved", "multi_latent_attention", ATTENTION, since="0.10.0"),
    check(
        ATTENTION,
        lambda c: c.use_mup and not _positive_base(c),
        "mup_base_hidden_size: found {mup_base_hidden_size}; expected a positive number",
        since="0.17.0",
    ),
    # Upstream takes the square root of it, a complex number, which no attention can scale with.
    check(
        ATTENTION,
        lambda c: _scales_by_width(c) and _base_width(c) < 0,
        "mup_base_head_dim: found {mup_base_head_dim}; expected at least 0",
        since="0.17.0",
        needs=("hidden_size",),
    ),
    check(
        ATTENTION,
        lambda c: _scales_by_width(c) and _base_width(c) >= 0 and _width_scale(c) is None,
        "mup_attn_scale_power: found {mup_attn_scale_power}; kv_channels ({kv_channels}) to this power"
        " is not a number",
        since="0.17.0",
        needs=("hidden_size",),
    ),
    derive(ATTENTION, _scale_by_width, since="0.17.0", needs=("hidden_size",)),
)


def _is_inference_optimized(c: Namespace) -> bool:
    return bool(c.transformer_impl == "inference_optimized")


SERVED = {
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "use_kitchen": False,
}
"""Settings that transformer_impl inference_optimized requires."""


def _require_for_inference(name: str, value: Any) -> Step:
    """Return a check for one setting that transformer_impl inference_optimized requires."""
    # With --use-checkpoint-args the checkpoint decides over the model, and upstream checks nothing
    # here.
    return check(
        CLASS,
        lambda c: (
            _is_inference_optimized(c)
            and not c.use_checkpoint_args
            and (getattr(c, name) or False) != value
        ),
        f"{name}: found {{{name}}} with transformer_impl inference_optimized; expected {value}",
        since="0.16.0",
    )


_invariant = under(ATTENTION, on("batch_invariant_mode"), MAIN)
_invariant_experts = under(
    EXPERTS, lambda c: c.batch_invariant_mode and (c.num_moe_experts or 0) > 0, MAIN
)
INVARIANT_STEPS: tuple[Step, ...] = (
    _invariant(
        lambda c: c.batch_invariant_backend not in ("te_native", "deepgemm", "triton"),
        "batch_invariant_backend: found {batch_invariant_backend}; expected te_native, deepgemm or triton",
    ),
    _invariant(
        lambda c: c.params_dtype != "torch.bfloat16",
        "batch_invariant_mode: found with params_dtype {params_dtype}; expected torch.bfloat16",
        name="found-with-parameters-in-expected",
    ),
    _invariant_experts(
        lambda c: not _is_inference_optimized(c) and c.moe_token_dispatcher_type != "alltoall",
        "batch_invariant_mode: found with experts and moe_token_dispatcher_type {moe_token_dispatcher_type}; expected alltoall",
    ),
    _invariant_experts(
        lambda c: c.fp8 or c.fp4,
        "batch_invariant_mode: found with experts and fp8 {fp8} or fp4 {fp4}; drop them",
    ),
    _invariant_experts(
        lambda c: c.moe_permute_fusion or c.moe_permute_fusion_into_hybridep,
        "batch_invariant_mode: found with moe_permute_fusion or moe_permute_fusion_into_hybridep; drop them",
        name="found-with-fused-permutation-of",
    ),
    _invariant_experts(
        lambda c: c.moe_pad_expert_input_to_capacity or c.moe_pad_experts_for_cuda_graph_inference,
        "batch_invariant_mode: found with padded experts; drop moe_pad_expert_input_to_capacity and"
        " moe_pad_experts_for_cuda_graph_inference",
        name="found-with-experts-that-are",
    ),
)
"""Requirements of batch-invariant results since 0.20.

Megatron also requires that DeepGEMM is installed, which cannot be checked here.
"""

LAST_STEPS: tuple[Step, ...] = (
    *(_require_for_inference(name, value) for name, value in SERVED.items()),
    check(
        ATTENTION,
        lambda c: isinstance(c.cp_comm_type, list) and len(c.cp_comm_type) != c.num_layers,
        "cp_comm_type: found {cp_comm_type}; expected one type, or one for each of num_layers ({num_layers})",
        since="0.10.0",
        until="0.12.0",
        needs=("num_layers",),
    ),
    # Since 0.12, a list is read only if there are context ranks.
    check(
        ATTENTION,
        lambda c: (
            c.context_parallel_size > 1
            and isinstance(c.cp_comm_type, list)
            and len(c.cp_comm_type) != c.num_layers
        ),
        "cp_comm_type: found {cp_comm_type}; expected one type, or one for each of num_layers ({num_layers})",
        since="0.12.0",
        needs=("num_layers",),
    ),
    excludes("no_rope_freq", "flash_decode", ATTENTION, since="0.13.0"),
    check(
        ATTENTION,
        lambda c: not _positions_fit(c),
        "no_rope_freq: found {no_rope_freq}; expected a divisor of num_layers ({num_layers}), or one entry for each layer",
        since="0.13.0",
        needs=("num_layers",),
    ),
    # A frequency of n becomes one entry for each layer: n - 1 layers with rotary positions (0),
    # then one without (1).
    derive(
        ATTENTION,
        compute_argument(
            "no_rope_freq",
            lambda c: [*[0] * (c.no_rope_freq - 1), 1] * (c.num_layers // c.no_rope_freq),
            lambda c: c.no_rope_freq and isinstance(c.no_rope_freq, int) and _positions_fit(c),
        ),
        since="0.13.0",
        needs=("num_layers",),
    ),
    check(
        SPARSE,
        lambda c: c.experimental_attention_variant == "dsa" and c.context_parallel_size != 1,
        "context_parallel_size: found {context_parallel_size} with experimental_attention_variant dsa; expected 1",
        since="0.16.0",
        until="0.19.0",
    ),
    excludes(
        "apply_rope_fusion",
        equals("experimental_attention_variant", "dsa"),
        SPARSE,
        "add --no-rope-fusion",
        since="0.16.0",
    ),
    check(
        SPARSE,
        # The class accepts both spellings, allgather and all_gather, in one name or one for each
        # layer.
        lambda c: (
            c.experimental_attention_variant == "dsa"
            and c.context_parallel_size > 1
            and any(
                str(kind).replace("_", "").lower() != "allgather"
                for kind in (
                    c.cp_comm_type if isinstance(c.cp_comm_type, list) else [c.cp_comm_type]
                )
            )
        ),
        "cp_comm_type: found {cp_comm_type} with experimental_attention_variant dsa; expected allgather",
        since="0.19.0",
    ),
    check(
        CLASS,
        lambda c: c.inference_fuse_tp_communication and not _is_inference_optimized(c),
        "inference_fuse_tp_communication: found with transformer_impl {transformer_impl}; expected inference_optimized",
        since="0.16.0",
    ),
    check(
        CLASS,
        lambda c: c.inference_fuse_tp_communication and c.num_moe_experts is not None,
        "inference_fuse_tp_communication: found with experts; drop it",
        since="0.17.0",
    ),
    check(
        CLASS,
        lambda c: c.inference_disable_triton_nvls_kernels and not _is_inference_optimized(c),
        "inference_disable_triton_nvls_kernels: found with transformer_impl {transformer_impl}; expected inference_optimized",
        since="0.17.0",
    ),
    one_of("flash_attention_version", (None, 2, 3, 4), ATTENTION, since="0.19.0"),
    check(
        ATTENTION,
        lambda c: c.batch_invariant_mode and member_name(c.attention_backend) != "flash",
        "batch_invariant_mode: found with attention_backend {attention_backend}; expected flash",
        since="0.16.0",
    ),
    check(
        ATTENTION,
        lambda c: (
            c.batch_invariant_mode
            and (
                c.flash_attention_version not in (3, 4)
                or c.context_parallel_size != 1
                or c.attention_dropout != 0.0
            )
        ),
        "batch_invariant_mode: found with flash_attention_version {flash_attention_version},"
        " context_parallel_size {context_parallel_size} and attention_dropout {attention_dropout}; expected"
        " flash_attention_version 3 or 4, context_parallel_size 1 and attention_dropout 0.0",
        since="0.19.0",
    ),
    *INVARIANT_STEPS,
)

LATENT_STEPS: tuple[Step, ...] = (
    # The fused kernel of latent attention rotates by YaRN alone.
    check(
        "MLATransformerConfig",
        lambda c: c.multi_latent_attention and c.apply_rope_fusion and c.rope_type != "yarn",
        "apply_rope_fusion: found with multi_latent_attention and rope_type {rope_type}; expected rope_type yarn",
        since="0.13.0",
    ),
    check(
        "MLATransformerConfig",
        lambda c: c.attention_output_gate,
        "attention_output_gate: found with multi_latent_attention, which has no output gate; drop it",
        since="0.16.0",
    ),
    check(
        "MLATransformerConfig",
        lambda c: c.cache_mla_latents and c.apply_rope_fusion,
        "cache_mla_latents: found with rope fusion; add --no-rope-fusion",
        since="0.14.0",
    ),
)

FACTORY = "core_transformer_config_from_args"
BEFORE = (
    excludes("squared_relu", "swiglu", FACTORY),
    check(
        FACTORY,
        lambda a: a.quick_geglu and a.swiglu and not a.squared_relu,
        "quick_geglu: found with swiglu; keep one of them",
    ),
    check(
        FACTORY,
        lambda a: a.rope_type not in (None, "rope") and not a.multi_latent_attention,
        "rope_type: found {rope_type} without multi_latent_attention; drop --rope-type",
        name="found-another-than-rope-without",
    ),
    check(
        FACTORY,
        lambda a: a.init_method_xavier_uniform,
        "init_method_xavier_uniform: found true; a defect of every release ends the run there"
        " (TypeError: no field scaled_init_method); drop --init-method-xavier-uniform",
    ),
    excludes(set_("heterogeneous_layers_config_path"), "multi_latent_attention", FACTORY),
)
"""Checks that Megatron makes before it builds the TransformerConfig."""
