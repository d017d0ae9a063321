"""Maps Megatron's arguments to the fields of its config classes, release by release."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from compat.megatron import releases
from compat.megatron.arguments.namespace import Namespace

PARALLEL, TRANSFORMER, LATENT = "ModelParallelConfig", "TransformerConfig", "MLATransformerConfig"
DDP, OPTIMIZER = "DistributedDataParallelConfig", "OptimizerConfig"
PARENTS = {TRANSFORMER: PARALLEL, LATENT: TRANSFORMER}


@dataclass(frozen=True, slots=True)
class Feed:
    """A field that does not get its value from the argument of the same name, in releases [since,
    until).
    """

    field: str
    value: Callable[[Namespace], Any]
    since: str = ""
    until: str = ""


def argument(name: str) -> Callable[[Namespace], Any]:
    """Return a function that returns the value of the argument `name`."""
    return lambda a: getattr(a, name)


ACTIVATIONS = {"squared_relu": "squared_relu", "quick_geglu": "quick_gelu", "swiglu": "silu"}
"""The activation function of each switch; the first switch that is on takes precedence."""


TRANSFORMER_FEEDS = (
    Feed("persist_layer_norm", lambda a: not a.no_persist_layer_norm),
    Feed("layernorm_zero_centered_gamma", argument("apply_layernorm_1p"), until="0.16.0"),
    Feed("layernorm_epsilon", argument("norm_epsilon"), until="0.16.0"),
    Feed("deallocate_pipeline_outputs", lambda a: True),  # the class's own default is false
    Feed("pipeline_dtype", argument("params_dtype")),
    Feed("batch_p2p_comm", lambda a: not a.overlap_p2p_comm),
    Feed("num_moe_experts", argument("num_experts")),
    Feed(
        "first_pipeline_num_layers", argument("decoder_first_pipeline_num_layers"), until="0.11.0"
    ),
    Feed("last_pipeline_num_layers", argument("decoder_last_pipeline_num_layers"), until="0.11.0"),
    Feed(
        "num_layers_in_first_pipeline_stage",
        argument("decoder_first_pipeline_num_layers"),
        since="0.11.0",
    ),
    Feed(
        "num_layers_in_last_pipeline_stage",
        argument("decoder_last_pipeline_num_layers"),
        since="0.11.0",
    ),
    Feed("fp8_param", argument("fp8_param_gather"), since="0.12.0"),
    Feed("fp4_param", argument("fp4_param_gather"), since="0.17.1"),
    Feed(
        "activation_func",
        lambda a: next(
            (name for switch, name in ACTIVATIONS.items() if getattr(a, switch)), "gelu"
        ),
    ),
    Feed("gated_linear_unit", lambda a: bool(a.swiglu or (a.quick_geglu and not a.squared_relu))),
    Feed(
        "bias_activation_fusion", lambda a: a.bias_swiglu_fusion if a.swiglu else a.bias_gelu_fusion
    ),
    Feed("num_query_groups", lambda a: a.num_query_groups if a.group_query_attention else None),
    # The flag takes one type for each layer; upstream passes a single one on as it is, not as a
    # list.
    Feed(
        "cp_comm_type",
        lambda a: (
            a.cp_comm_type[0]
            if isinstance(a.cp_comm_type, list) and len(a.cp_comm_type) == 1
            else a.cp_comm_type
        ),
        since="0.10.0",
    ),
    Feed(
        "is_hybrid_model",
        lambda a: a.hybrid_layer_pattern is not None or bool(a.is_hybrid_model),
        since="0.17.0",
    ),
    Feed("inference_sampling_seed", argument("seed"), since="0.15.0"),
    # D in a hybrid pattern is a layer of sparse attention.
    Feed(
        "experimental_attention_variant",
        lambda a: (
            "dsa" if "D" in (a.hybrid_layer_pattern or "") else a.experimental_attention_variant
        ),
        since="0.18.0",
    ),
)
"""Fields that core_transformer_config_from_args does not copy from the argument of the same name."""

OWN_DEFAULT = ("rope_type",)
"""Names of fields that keep the default of their class if the argument was not given."""

DDP_FEEDS = (
    Feed("grad_reduce_in_fp32", argument("accumulate_allreduce_grads_in_fp32")),
    Feed("check_for_nan_in_grad", argument("check_for_nan_in_loss_and_grad")),
    Feed("bucket_size", argument("ddp_bucket_size")),
    Feed("average_in_collective", argument("ddp_average_in_collective")),
    Feed(
        "pad_buckets_for_high_nccl_busbw",
        argument("ddp_pad_buckets_for_high_nccl_busbw"),
        since="0.12.0",
    ),
    Feed(
        "preserve_fp32_weights",
        lambda a: (
            not ((a.use_custom_fsdp or a.use_megatron_fsdp) and a.use_precision_aware_optimizer)
        ),
        since="0.12.0",
        until="0.16.0",
    ),
    Feed(
        "reduce_scatter_with_fp32_accumulation",
        argument("ddp_reduce_scatter_with_fp32_accumulation"),
        since="0.16.0",
    ),
    Feed(
        "param_name_patterns_for_fp32_local_accumulation",
        lambda a: list(a.ddp_param_name_patterns_for_fp32_local_accumulation or ()),
        since="0.17.0",
    ),
    Feed("num_buckets", argument("ddp_num_buckets"), since="0.18.0"),
    Feed(
        "megatron_fsdp_use_decoupled_grad",
        argument("use_precision_aware_optimizer"),
        since="0.18.0",
        until=releases.MAIN,
    ),
    Feed(
        "megatron_fsdp_use_decoupled_grad",
        lambda a: bool(
            a.use_megatron_fsdp and a.megatron_fsdp_version == 1 and a.use_precision_aware_optimizer
        ),
        since=releases.MAIN,
    ),
    Feed(
        "megatron_fsdp_cuda_graph_mode",
        lambda a: bool(a.use_megatron_fsdp and a.cuda_graph_impl != "none"),
        since="0.18.0",
    ),
    Feed(
        "fsdp_all_gather_in_start_param_sync",
        lambda a: not (a.use_megatron_fsdp and a.cuda_graph_impl == "full_iteration"),
        since="0.18.0",
    ),
)
"""Fields that get_model does not copy from the argument of the same name.

Since 0.18, get_megatron_ddp_config sets them.
"""


@cache
def defaults(version: str, cls: str) -> Mapping[str, Any]:
    """Return the defaults of all fields of a class. Inherited fields come first."""
    # A table of a release has the fields that a class declares itself; an overridden one keeps the
    # place of the parent's.
    parent = PARENTS.get(cls)
    parent_defaults = dict(defaults(version, parent)) if parent else {}
    return {
        **parent_defaults,
        **{name: field.default for name, field in releases.fields(version, cls).items()},
    }


@cache
def feeds(table: tuple[Feed, ...], version: str, cls: str) -> tuple[Feed, ...]:
    """Return the rows of `table` whose fields the class has in the release."""
    names = defaults(version, cls)
    return tuple(row for row in releases.RELEASES.having(version, table) if row.field in names)


def fed(args: Mapping[str, Any], version: str, cls: str, table: tuple[Feed, ...]) -> dict[str, Any]:
    """Return the fields of `cls`, each from the argument of the same name. For a field with a row
    in `table`, the row computes the value instead.
    """
    values = {name: args.get(name, default) for name, default in defaults(version, cls).items()}
    for name in OWN_DEFAULT:
        if name in values and values[name] is None:
            values[name] = defaults(version, cls)[name]
    a = Namespace(args)
    values.update((row.field, row.value(a)) for row in feeds(table, version, cls))
    return values
