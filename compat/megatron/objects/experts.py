"""Checks and derivations of `TransformerConfig.__post_init__` for experts, their dispatchers and
overlapped communication.
"""

from __future__ import annotations

from typing import Any

from bridge.stack.checks import equals, excludes, needs, on, positive, set_
from compat.megatron.arguments.namespace import Namespace, Step, member_name
from compat.megatron.arguments.steps import check, compute_argument, derive, fallback, under, when
from compat.megatron.releases import MAIN

EXPERTS = "TransformerConfig: experts"
DISPATCH = "TransformerConfig: token dispatcher"
ROUTER = "TransformerConfig: router"
OVERLAP = "TransformerConfig: overlap of expert communication"
OPTIMIZED = "TransformerConfig: inference-optimized experts"
GROUPED = "TransformerConfig: grouped expert parameters"
BALANCED = ("aux_loss", "none")
"""Kinds of load balancing that may be combined with a capacity factor; later releases have more."""


def _has_mixed_layers(c: Namespace) -> bool:
    """Whether only some layers have experts."""
    # The config of a dense layer in such a model has no experts, but keeps their width.
    frequency: Any = c.moe_layer_freq
    if isinstance(frequency, list):
        return 0 in frequency
    return isinstance(frequency, int) and frequency > 1


def _kinds(c: Namespace) -> list[Any]:
    kinds: Any = c.moe_router_load_balancing_type
    return kinds if isinstance(kinds, list) else [kinds]


def _refuse_balancing(kinds: tuple[str, ...], since: str, until: str) -> Step:
    """Return a check that refuses a capacity factor together with kinds of load balancing that do
    not support it.
    """
    return check(
        ROUTER,
        lambda c: c.moe_expert_capacity_factor is not None and set(_kinds(c)) - set(kinds),
        "moe_expert_capacity_factor: found with moe_router_load_balancing_type"
        " {moe_router_load_balancing_type}; expected " + " or ".join(kinds),
        since=since,
        until=until,
    )


_optimized = under(
    OPTIMIZED,
    lambda c: c.transformer_impl == "inference_optimized" and c.num_moe_experts is not None,
    "0.17.0",
)


_grouped = under(
    GROUPED, lambda c: c.moe_single_grouped_weight or c.moe_single_grouped_bias, "0.18.0"
)


WIDE = ("torch", "vllm")
"""Backends of grouped GEMM that support gated layers and batch-invariant mode in inference."""


def _grouping(c: Namespace) -> str:
    return member_name(c.inference_grouped_gemm_backend).lower()


EXPERT_STEPS: tuple[Step, ...] = (
    derive(
        GROUPED,
        when(
            lambda c: c.use_transformer_engine_op_fuser and c.moe_grouped_gemm,
            moe_use_grouped_tensor=True,
        ),
        since=MAIN,
    ),
    needs(
        "moe_use_grouped_tensor", "moe_grouped_gemm", GROUPED, "add --moe-grouped-gemm", since=MAIN
    ),
    check(
        EXPERTS,
        lambda c: (c.expert_model_parallel_size or 1) > 1 and c.num_moe_experts is None,
        "expert_model_parallel_size: found {expert_model_parallel_size} without experts; set num_moe_experts (--num-experts)",
        needs=("num_layers",),
    ),
    _optimized(
        lambda c: (c.expert_tensor_parallel_size or 1) > 1,
        "expert_tensor_parallel_size: found {expert_tensor_parallel_size} with transformer_impl inference_optimized; expected 1",
    ),
    _optimized(
        lambda c: c.moe_expert_capacity_factor is not None or c.moe_router_padding_for_quantization,
        "moe_expert_capacity_factor: found {moe_expert_capacity_factor}, and"
        " moe_router_padding_for_quantization {moe_router_padding_for_quantization}, with transformer_impl"
        " inference_optimized; drop both",
        name="found-with-moe_router_padding_for_quantization-inference_optimized-expects",
    ),
    _optimized(
        lambda c: c.moe_router_dtype != "fp32",
        "moe_router_dtype: found {moe_router_dtype} with transformer_impl inference_optimized; expected fp32",
    ),
    _optimized(
        lambda c: c.gated_linear_unit and c.cuda_graph_impl == "local",
        "gated_linear_unit: found with inference_optimized and local CUDA graphs; drop one of them",
        until="0.18.0",
    ),
    _optimized(
        lambda c: c.gated_linear_unit,
        "gated_linear_unit: found with transformer_impl inference_optimized; drop one of them",
        since="0.18.0",
        until=MAIN,
    ),
    _optimized(
        lambda c: c.gated_linear_unit and _grouping(c) not in WIDE,
        "gated_linear_unit: found with inference_grouped_gemm_backend {inference_grouped_gemm_backend}; expected torch or vllm",
        since=MAIN,
    ),
    _optimized(
        lambda c: c.batch_invariant_mode and _grouping(c) not in WIDE,
        "batch_invariant_mode: found with inference_grouped_gemm_backend {inference_grouped_gemm_backend}; expected torch or"
        " vllm",
        since=MAIN,
    ),
    _optimized(
        lambda c: (
            c.batch_invariant_mode
            and (c.expert_model_parallel_size or 1) > 1
            and c.inference_moe_token_dispatcher_type != "nvls"
        ),
        "batch_invariant_mode: found with expert parallelism and inference_moe_token_dispatcher_type"
        " {inference_moe_token_dispatcher_type}; expected nvls",
        since=MAIN,
        name="found-with-split-experts-and",
    ),
    _optimized(
        lambda c: (
            c.inference_grouped_gemm_backend not in ("auto", "torch", "te")
            or (c.inference_grouped_gemm_backend == "te" and c.cuda_graph_impl == "local")
        ),
        "inference_grouped_gemm_backend: found {inference_grouped_gemm_backend}; expected auto or torch, or"
        " te without CUDA graphs",
        until="0.18.0",
    ),
    _optimized(
        lambda c: _grouping(c) not in ("flashinfer", *WIDE),
        "inference_grouped_gemm_backend: found {inference_grouped_gemm_backend}; expected flashinfer, torch or vllm",
        since="0.18.0",
    ),
    # Since 0.18 the class turns the text into a member of its enumeration, whose names are in
    # capitals.
    derive(
        OPTIMIZED,
        compute_argument(
            "inference_grouped_gemm_backend",
            lambda c: _grouping(c).upper(),
            lambda c: c.transformer_impl == "inference_optimized" and c.num_moe_experts is not None,
        ),
        since="0.18.0",
    ),
    positive("num_moe_experts", EXPERTS),
    # Before 0.13, a model without experts gets their width too.
    derive(
        EXPERTS,
        fallback("moe_ffn_hidden_size", lambda c: c.ffn_hidden_size),
        since="0.10.0",
        until="0.13.0",
    ),
    derive(
        EXPERTS,
        compute_argument(
            "moe_ffn_hidden_size",
            lambda c: c.ffn_hidden_size,
            lambda c: c.moe_ffn_hidden_size is None and c.num_moe_experts is not None,
        ),
        since="0.13.0",
    ),
    check(
        EXPERTS,
        lambda c: c.num_moe_experts is None and c.moe_ffn_hidden_size is not None,
        "moe_ffn_hidden_size: found {moe_ffn_hidden_size} without experts; drop it, or set num_moe_experts (--num-experts)",
        since="0.13.0",
        until="0.18.0",
    ),
    check(
        EXPERTS,
        lambda c: (
            c.num_moe_experts is None
            and c.moe_ffn_hidden_size is not None
            and not _has_mixed_layers(c)
        ),
        "moe_ffn_hidden_size: found {moe_ffn_hidden_size} without experts; drop it, or set num_moe_experts (--num-experts)",
        since="0.18.0",
    ),
    derive(
        EXPERTS, when(lambda c: c.num_moe_experts is None, moe_ffn_hidden_size=None), since="0.18.0"
    ),
    _grouped(
        lambda c: not c.moe_grouped_gemm,
        "moe_single_grouped_weight: found (or moe_single_grouped_bias) without moe_grouped_gemm; add"
        " --moe-grouped-gemm",
        name="found-without-moe_grouped_gemm-or-moe_single_grouped_bias",
    ),
    _grouped(
        lambda c: (
            c.moe_single_grouped_weight
            and (c.fp4 or not c.fp8 or member_name(c.fp8_recipe) != "mxfp8")
        ),
        "moe_single_grouped_weight: found with fp8 {fp8} and fp8_recipe {fp8_recipe}; this release expects fp8 with mxfp8",
        until="0.19.0",
    ),
    # Other formats would need a cast of parts of the grouped weight, which upstream does not have.
    _grouped(
        lambda c: (
            c.moe_single_grouped_weight
            and (
                (c.fp8 and member_name(c.fp8_recipe) != "mxfp8")
                or (c.fp4 and member_name(c.fp4_recipe) != "nvfp4")
                or not (c.moe_use_grouped_tensor or c.use_transformer_engine_op_fuser)
            )
        ),
        "moe_single_grouped_weight: found with fp8_recipe {fp8_recipe}, fp4_recipe {fp4_recipe} and"
        " use_transformer_engine_op_fuser {use_transformer_engine_op_fuser}; expected fp8 with"
        " mxfp8, fp4 with nvfp4, or neither, and use_transformer_engine_op_fuser or, since 0.20, moe_use_grouped_tensor",
        since="0.19.0",
    ),
    _grouped(
        lambda c: c.moe_single_grouped_weight and c.fp4 and not c.fp4_param,
        "moe_single_grouped_weight: found with fp4 and without fp4_param; add --fp4-param-gather",
        since=MAIN,
    ),
    _grouped(
        lambda c: c.moe_single_grouped_bias and not c.moe_use_grouped_tensor,
        "moe_single_grouped_bias: found without moe_use_grouped_tensor; add --moe-use-grouped-tensor",
        since=MAIN,
    ),
    _grouped(
        lambda c: c.moe_single_grouped_bias and not c.add_bias_linear,
        "moe_single_grouped_bias: found without add_bias_linear; drop it",
        name="found-without-biases-drop-it",
    ),
)


def _refuse_overlap(dispatchers: tuple[str, ...], since: str, until: str) -> Step:
    """Return a check that refuses overlapped shared experts with dispatchers that do not support
    the overlap.
    """
    return check(
        DISPATCH,
        lambda c: (
            c.moe_shared_expert_intermediate_size is not None
            and c.moe_shared_expert_overlap
            and c.moe_token_dispatcher_type not in dispatchers
        ),
        "moe_shared_expert_overlap: found with moe_token_dispatcher_type {moe_token_dispatcher_type};"
        " expected " + " or ".join(dispatchers),
        since=since,
        until=until,
    )


def _eight_bits(c: Namespace) -> bool:
    return any(
        kind not in (None, "bf16") for kind in (c.moe_dispatch_fwd_dtype, c.moe_combine_bwd_dtype)
    )


DISPATCH_STEPS: tuple[Step, ...] = (
    check(
        DISPATCH,
        lambda c: c.moe_enable_deepep and c.moe_token_dispatcher_type != "flex",
        "moe_enable_deepep: found with moe_token_dispatcher_type {moe_token_dispatcher_type}; expected flex",
        since="0.12.0",
    ),
    excludes(
        "moe_enable_deepep",
        equals("moe_flex_dispatcher_backend", "hybridep"),
        DISPATCH,
        since="0.16.0",
    ),
    derive(
        DISPATCH,
        when(lambda c: c.moe_enable_deepep, moe_flex_dispatcher_backend="deepep"),
        since="0.16.0",
    ),
    excludes(
        "moe_pad_expert_input_to_capacity",
        equals("moe_token_dispatcher_type", "flex"),
        DISPATCH,
        "drop one of them",
        since="0.12.0",
        until="0.16.0",
    ),
    check(
        DISPATCH,
        lambda c: (
            c.moe_token_dispatcher_type == "flex"
            and c.moe_pad_expert_input_to_capacity
            and (c.moe_enable_deepep or c.moe_flex_dispatcher_backend == "deepep")
        ),
        "moe_pad_expert_input_to_capacity: found with the deepep backend of the flex dispatcher; drop one of them",
        since="0.16.0",
    ),
    check(
        DISPATCH,
        lambda c: (
            c.moe_flex_dispatcher_backend == "ncclep" and c.moe_token_dispatcher_type != "flex"
        ),
        "moe_flex_dispatcher_backend: found ncclep with moe_token_dispatcher_type {moe_token_dispatcher_type}; expected flex",
        since="0.19.0",
    ),
    check(
        DISPATCH,
        lambda c: (
            c.moe_flex_dispatcher_backend == "ncclep"
            and c.moe_use_grouped_tensor
            and not c.use_transformer_engine_op_fuser
        ),
        "moe_use_grouped_tensor: found with moe_flex_dispatcher_backend ncclep; add --use-transformer-engine-op-fuser,"
        " or drop it",
        since=MAIN,
        name="found-with-the-ncclep-backend",
    ),
    check(
        DISPATCH,
        lambda c: (
            _eight_bits(c)
            and not (
                c.moe_token_dispatcher_type == "flex" and c.moe_flex_dispatcher_backend == "ncclep"
            )
        ),
        "moe_dispatch_fwd_dtype: found {moe_dispatch_fwd_dtype}, and moe_combine_bwd_dtype {moe_combine_bwd_dtype}; expected"
        " bf16, or the ncclep backend of the flex dispatcher",
        since=MAIN,
    ),
    check(
        DISPATCH,
        lambda c: _eight_bits(c) and not (c.use_transformer_engine_op_fuser and c.moe_grouped_gemm),
        "moe_dispatch_fwd_dtype: found {moe_dispatch_fwd_dtype}, and moe_combine_bwd_dtype {moe_combine_bwd_dtype}, without"
        " both use_transformer_engine_op_fuser and moe_grouped_gemm; add them",
        since=MAIN,
    ),
    check(
        DISPATCH,
        lambda c: (
            c.moe_flex_dispatcher_num_sms is None
            and c.moe_deepep_num_sms is not None
            and c.moe_hybridep_num_sms is not None
            and c.moe_deepep_num_sms != c.moe_hybridep_num_sms
        ),
        "moe_deepep_num_sms: found {moe_deepep_num_sms} with moe_hybridep_num_sms {moe_hybridep_num_sms}; set"
        " moe_flex_dispatcher_num_sms alone",
        since="0.19.0",
    ),
    # Either of the two deprecated numbers of multiprocessors stands for the new one.
    derive(
        DISPATCH,
        fallback(
            "moe_flex_dispatcher_num_sms",
            lambda c: (
                c.moe_hybridep_num_sms if c.moe_deepep_num_sms is None else c.moe_deepep_num_sms
            ),
        ),
        since="0.19.0",
    ),
    positive("moe_shared_expert_intermediate_size", DISPATCH, since="0.10.0"),
    _refuse_overlap(("alltoall",), "0.10.0", "0.18.0"),
    _refuse_overlap(("alltoall", "flex"), "0.18.0", ""),
    check(
        ROUTER,
        lambda c: (
            isinstance(c.moe_router_load_balancing_type, list)
            and not (
                isinstance(c.moe_aux_loss_coeff, list)
                and len(c.moe_aux_loss_coeff) == len(_kinds(c))
            )
        ),
        "moe_aux_loss_coeff: found {moe_aux_loss_coeff}; expected one coefficient for each of"
        " moe_router_load_balancing_type ({moe_router_load_balancing_type})",
        since="0.14.0",
        name="found-expected-one-for-each",
    ),
    check(
        DISPATCH,
        lambda c: (
            c.moe_expert_capacity_factor is not None
            and c.moe_token_dispatcher_type not in ("alltoall", "alltoall_seq")
        ),
        "moe_expert_capacity_factor: found with moe_token_dispatcher_type {moe_token_dispatcher_type}; this"
        " release expects alltoall",
        until="0.12.0",
    ),
    _refuse_balancing(BALANCED, "", "0.11.0"),
    _refuse_balancing((*BALANCED, "seq_aux_loss"), "0.11.0", "0.15.0"),
    _refuse_balancing((*BALANCED, "seq_aux_loss", "global_aux_loss"), "0.15.0", ""),
    # A negative factor means that no tokens are dropped.
    derive(
        ROUTER,
        when(
            lambda c: c.moe_expert_capacity_factor is not None and c.moe_expert_capacity_factor < 0,
            moe_expert_capacity_factor=None,
        ),
    ),
    needs("moe_pad_expert_input_to_capacity", set_("moe_expert_capacity_factor"), ROUTER, "add it"),
    check(
        ROUTER,
        lambda c: (
            c.moe_expert_rank_capacity_factor is not None
            and not (
                c.use_transformer_engine_op_fuser and c.moe_flex_dispatcher_backend == "hybridep"
            )
        ),
        "moe_expert_rank_capacity_factor: found with moe_flex_dispatcher_backend"
        " {moe_flex_dispatcher_backend}; expected hybridep, and use_transformer_engine_op_fuser",
        since="0.18.0",
        until="0.19.0",
    ),
    check(
        ROUTER,
        lambda c: (
            c.moe_expert_rank_capacity_factor is not None
            and not (
                c.moe_flex_dispatcher_backend == "ncclep"
                or (
                    (c.use_transformer_engine_op_fuser or c.moe_use_grouped_tensor)
                    and c.moe_flex_dispatcher_backend == "hybridep"
                )
            )
        ),
        "moe_expert_rank_capacity_factor: found with moe_flex_dispatcher_backend"
        " {moe_flex_dispatcher_backend}; expected ncclep, or hybridep with use_transformer_engine_op_fuser",
        since="0.19.0",
    ),
)


def _groups_fit(c: Namespace) -> bool:
    """Whether the number of routing groups divides the experts and is at least the number of chosen
    groups.
    """
    groups = c.moe_router_num_groups
    if not groups or not c.num_moe_experts:
        return False
    return bool(c.num_moe_experts % groups == 0 and c.moe_router_group_topk <= groups)


def _by_devices(c: Namespace) -> None:
    """Turn the deprecated limit of devices per token into a limit of groups, with a group per
    device.
    """
    if c.moe_router_topk_limited_devices and not c.moe_router_group_topk:
        c.moe_router_group_topk = c.moe_router_topk_limited_devices
        c.moe_router_num_groups = c.expert_model_parallel_size


def _expert_bias(scores: tuple[str, ...], since: str, until: str) -> Step:
    """Return a check that refuses a balancing bias with score functions that do not support it."""
    return check(
        ROUTER,
        lambda c: c.moe_router_enable_expert_bias and c.moe_router_score_function not in scores,
        "moe_router_enable_expert_bias: found with moe_router_score_function {moe_router_score_function};"
        " expected " + " or ".join(scores),
        since=since,
        until=until,
    )


ROUTER_STEPS: tuple[Step, ...] = (
    check(
        DISPATCH,
        lambda c: c.moe_extended_tp and c.moe_token_dispatcher_type != "allgather",
        "moe_extended_tp: found with moe_token_dispatcher_type {moe_token_dispatcher_type}; expected allgather",
        until="0.10.0",
    ),
    check(
        DISPATCH,
        lambda c: (
            c.moe_extended_tp
            and c.ffn_hidden_size % (c.tensor_model_parallel_size * c.expert_model_parallel_size)
            != 0
        ),
        "ffn_hidden_size: found {ffn_hidden_size}; moe_extended_tp expects a multiple of"
        " tensor_model_parallel_size ({tensor_model_parallel_size}) x expert_model_parallel_size"
        " ({expert_model_parallel_size})",
        until="0.10.0",
        needs=("ffn_hidden_size",),
    ),
    check(
        DISPATCH,
        lambda c: (
            c.moe_token_dispatcher_type == "alltoall_seq"
            and c.tensor_model_parallel_size != c.expert_tensor_parallel_size
        ),
        "expert_tensor_parallel_size: found {expert_tensor_parallel_size} with alltoall_seq; expected"
        " tensor_model_parallel_size ({tensor_model_parallel_size})",
        since="0.10.0",
        until="0.13.0",
    ),
    excludes(
        "moe_permute_fusion",
        equals("moe_token_dispatcher_type", "alltoall_seq"),
        DISPATCH,
        "drop one of them",
        since="0.12.1",
        until="0.13.0",
    ),
    check(
        EXPERTS,
        lambda c: c.num_moe_experts is not None and c.add_bias_linear,
        "add_bias_linear: found with experts, which have no biases in this release; add --disable-bias-linear",
        since="0.12.1",
        until="0.15.0",
    ),
    check(
        EXPERTS,
        lambda c: (
            c.num_moe_experts is not None
            and c.add_bias_linear
            and c.expert_tensor_parallel_size != 1
        ),
        "add_bias_linear: found with experts and expert_tensor_parallel_size {expert_tensor_parallel_size};"
        " expected 1; add --disable-bias-linear, or --expert-tensor-parallel-size 1",
        since="0.15.0",
    ),
    _expert_bias(("sigmoid",), "0.11.0", "0.18.0"),
    _expert_bias(("sigmoid", "sqrtsoftplus"), "0.18.0", ""),
    check(
        EXPERTS,
        lambda c: c.num_moe_experts and c.fp8 and c.moe_grouped_gemm,
        "moe_grouped_gemm: found with fp8, and this release cannot combine them; drop one of them",
        until="0.10.0",
        name="found-with-fp8-which-this",
    ),
    check(
        ROUTER,
        lambda c: (
            c.moe_router_padding_for_fp8
            and (c.fp8 is None or c.moe_token_dispatcher_type in ("allgather", "alltoall_seq"))
        ),
        "moe_router_padding_for_fp8: found with fp8 {fp8} and moe_token_dispatcher_type"
        " {moe_token_dispatcher_type}; fp8 has to be set, and the dispatcher must be neither allgather nor alltoall_seq",
        since="0.13.0",
        until="0.16.0",
    ),
    derive(
        ROUTER,
        when(lambda c: c.moe_router_padding_for_fp8, moe_router_padding_for_quantization=True),
        since="0.16.0",
    ),
    check(
        ROUTER,
        lambda c: (
            c.moe_router_padding_for_quantization
            and (
                (c.fp8 is None and c.fp4 is None)
                or c.moe_token_dispatcher_type in ("allgather", "alltoall_seq")
            )
        ),
        "moe_router_padding_for_quantization: found with fp8 {fp8}, fp4 {fp4} and moe_token_dispatcher_type"
        " {moe_token_dispatcher_type}; expected fp8 or fp4, and another dispatcher than allgather and"
        " alltoall_seq",
        since="0.16.0",
    ),
    # A softmax over one chosen expert is 1 whatever its score, so the router would get no gradient.
    check(
        ROUTER,
        lambda c: (
            c.moe_router_topk == 1
            and c.moe_router_score_function == "softmax"
            and not c.moe_router_pre_softmax
            and c.moe_router_load_balancing_type != "sinkhorn"
        ),
        "moe_router_topk: found 1 with a softmax over only the chosen expert; "
        "add --moe-router-pre-softmax",
        since="0.11.0",
        name="found-1-with-softmax-scores",
    ),
    excludes(
        "moe_router_topk_limited_devices",
        "moe_router_group_topk",
        ROUTER,
        "drop it",
        since="0.11.0",
    ),
    check(
        ROUTER,
        lambda c: c.moe_router_group_topk and not _groups_fit(c),
        "moe_router_group_topk: found {moe_router_group_topk} with moe_router_num_groups"
        " {moe_router_num_groups}; expected moe_router_num_groups to be a divisor of num_moe_experts"
        " ({num_moe_experts}) and at least moe_router_group_topk",
        since="0.11.0",
        name="found-with-moe_router_num_groups-expected-groups",
    ),
    derive(ROUTER, _by_devices, since="0.11.0"),
    excludes("flash_decode", "fp8", EXPERTS, "drop one of them", since="0.10.0", until="0.12.0"),
)


_overlap = under(OVERLAP, on("overlap_moe_expert_parallel_comm"), "0.14.0")


def _modules(c: Namespace) -> set[str]:
    # cuda_graph_scope is the name of cuda_graph_modules before 0.18.
    modules = c.cuda_graph_modules if c.cuda_graph_modules is not None else c.cuda_graph_scope
    return {member_name(module) for module in (modules if isinstance(modules, list) else [])}


OVERLAP_STEPS: tuple[Step, ...] = (
    check(
        DISPATCH,
        lambda c: (
            c.moe_token_dispatcher_type in ("allgather", "alltoall_seq")
            and c.variable_seq_lengths is True
        ),
        "variable_seq_lengths: found with moe_token_dispatcher_type {moe_token_dispatcher_type}; expected alltoall",
        since="0.10.0",
        until="0.13.0",
    ),
    check(
        DISPATCH,
        lambda c: c.moe_token_dispatcher_type == "allgather" and c.variable_seq_lengths is True,
        "variable_seq_lengths: found with moe_token_dispatcher_type allgather; expected alltoall",
        since="0.13.0",
    ),
    _overlap(
        lambda c: (
            c.pipeline_model_parallel_size > 1 and c.virtual_pipeline_model_parallel_size is None
        ),
        "overlap_moe_expert_parallel_comm: found with a pipeline without virtual stages; add"
        " --num-virtual-stages-per-pipeline-rank",
    ),
    _overlap(
        lambda c: (c.expert_model_parallel_size or 1) <= 1,
        "overlap_moe_expert_parallel_comm: found with expert_model_parallel_size"
        " {expert_model_parallel_size}; expected more than 1",
    ),
    _overlap(
        lambda c: c.moe_token_dispatcher_type not in ("alltoall", "flex"),
        "overlap_moe_expert_parallel_comm: found with moe_token_dispatcher_type {moe_token_dispatcher_type};"
        " expected alltoall or flex",
    ),
    _overlap(
        lambda c: (
            c.recompute_granularity == "full"
            or c.recompute_method is not None
            or c.recompute_num_layers is not None
        ),
        "overlap_moe_expert_parallel_comm: found with recomputation of whole layers; drop"
        " --recompute-granularity full, --recompute-method and --recompute-num-layers",
    ),
    _overlap(
        lambda c: "moe" in (c.recompute_modules or ()),
        "overlap_moe_expert_parallel_comm: found with moe in recompute_modules; drop moe from recompute_modules",
        since="0.17.0",
    ),
    _overlap(
        lambda c: not (c.bf16 or c.fp16),
        "overlap_moe_expert_parallel_comm: found in fp32 training; add --bf16 or --fp16",
    ),
    _overlap(
        lambda c: c.moe_shared_expert_overlap,
        "overlap_moe_expert_parallel_comm: found with moe_shared_expert_overlap; keep one of them",
    ),
    _overlap(
        lambda c: c.mtp_num_layers not in (None, 1),
        "overlap_moe_expert_parallel_comm: found with mtp_num_layers {mtp_num_layers}; expected at most 1",
        until="0.19.0",
    ),
    _overlap(
        lambda c: c.mtp_num_layers not in (None, 0, 1),
        "overlap_moe_expert_parallel_comm: found with mtp_num_layers {mtp_num_layers}; expected at most 1",
        since="0.19.0",
    ),
    _overlap(
        lambda c: c.mtp_num_layers == 1 and c.pipeline_model_parallel_size <= 1,
        "overlap_moe_expert_parallel_comm: found with mtp_num_layers 1 and no pipeline; use more pipeline ranks",
        since="0.16.0",
        until="0.18.0",
        name="found-with-a-prediction-layer",
    ),
    _overlap(
        lambda c: (
            c.moe_token_dispatcher_type == "flex"
            and c.moe_flex_dispatcher_backend == "ncclep"
            and c.fine_grained_activation_offloading
            and "expert_fc1" in (c.offload_modules or ())
        ),
        "overlap_moe_expert_parallel_comm: found with moe_flex_dispatcher_backend ncclep and expert_fc1 in"
        " offload_modules; drop expert_fc1 from offload_modules",
        since="0.19.0",
        name="found-with-the-ncclep-backend",
    ),
    _overlap(
        lambda c: (
            c.cuda_graph_impl != "none"
            and (c.cuda_graph_impl != "transformer_engine" or _modules(c) & {"moe", "mlp"})
        ),
        "overlap_moe_expert_parallel_comm: found with CUDA graphs of moe or mlp, or with cuda_graph_impl other than"
        " transformer_engine; drop them",
        since="0.16.0",
        until="0.18.0",
    ),
    _overlap(
        lambda c: c.cuda_graph_impl == "transformer_engine" and _modules(c) & {"moe", "mlp"},
        "overlap_moe_expert_parallel_comm: found with CUDA graphs of moe or mlp; drop them",
        since="0.18.0",
    ),
    needs(
        "delay_wgrad_compute",
        "overlap_moe_expert_parallel_comm",
        OVERLAP,
        "add --overlap-moe-expert-parallel-comm",
        since="0.14.0",
    ),
    excludes(
        "delay_wgrad_compute",
        "moe_use_legacy_grouped_gemm",
        OVERLAP,
        "drop one of them",
        since="0.14.0",
        until="0.17.0",
    ),
    check(
        OVERLAP,
        lambda c: (
            c.overlap_dispatch_backward_with_experts_wgrad
            and (c.overlap_moe_expert_parallel_comm or c.delay_wgrad_compute)
        ),
        "overlap_dispatch_backward_with_experts_wgrad: found with overlap_moe_expert_parallel_comm or"
        " delay_wgrad_compute; keep one of them",
        since="0.18.0",
    ),
    needs(
        "ep_overlap_early_attn_memory_release",
        "overlap_moe_expert_parallel_comm",
        OVERLAP,
        "drop it",
        since="0.16.0",
    ),
)
