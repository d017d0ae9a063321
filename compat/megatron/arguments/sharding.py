"""Checks and derivations for data parallelism: overlap, the three kinds of FSDP, optimizer dtypes,
fp8 and fp4 parameters.
"""

from __future__ import annotations

from bridge.stack.checks import excludes, needs, on
from compat.megatron.arguments.namespace import Change, Namespace, Predicate, Step
from compat.megatron.arguments.steps import check, derive, under, when
from compat.megatron.releases import MAIN

GATHER = "validate_args: overlap_param_gather"
TORCH = "validate_args: use_torch_fsdp2"
CUSTOM = "validate_args: use_custom_fsdp"
FSDP = "validate_args: use_megatron_fsdp"
STEP = "validate_args: overlap_param_gather_with_optimizer_step"
NARROW = "validate_args: fp8 and fp4"

DTYPES = {
    "fp32": "torch.float32",
    "bf16": "torch.bfloat16",
    "fp16": "torch.float16",
    "fp8": "torch.uint8",  # upstream's dtype for states in fp8, which are kept as bytes
    "auto": None,
}
OPTIMIZER_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
LATER_DTYPES = (
    "mamba_inference_conv_states_dtype",
    "mamba_inference_ssm_states_dtype",
    "megatron_fsdp_main_params_dtype",
    "megatron_fsdp_main_grads_dtype",
    "megatron_fsdp_grad_comm_dtype",
)


def dtypes(*names: str) -> Change:
    """Return a change that turns short names of dtypes (bf16) into torch's names (torch.bfloat16)."""

    def change(a: Namespace) -> None:
        for name in names:
            value = getattr(a, name)
            setattr(a, name, DTYPES.get(value, value))

    return change


_torch = under(TORCH, on("use_torch_fsdp2"), "0.10.0")


_fsdp = under(FSDP, on("use_megatron_fsdp"), "0.14.0")


_step = under(STEP, on("overlap_param_gather_with_optimizer_step"))


def _gather(without: Predicate, requirement: str, since: str, until: str) -> Step:
    """Return a check that parameters are sharded if overlap_param_gather is set."""
    return check(
        GATHER,
        lambda a: a.overlap_param_gather and not without(a),
        f"overlap_param_gather: found without {requirement}; add --use-distributed-optimizer, or drop --overlap-param-gather",
        since=since,
        until=until,
    )


OVERLAP_STEPS: tuple[Step, ...] = (
    # In 0.12 and 0.13, the strategy switches the overlap on even without an FSDP that reads it.
    derive(
        "validate_args: data_parallel_sharding_strategy",
        when(
            lambda a: a.data_parallel_sharding_strategy == "optim_grads_params",
            overlap_param_gather=True,
            overlap_grad_reduce=True,
        ),
        since="0.12.0",
        until="0.14.0",
    ),
    derive(
        "validate_args: data_parallel_sharding_strategy",
        when(
            lambda a: a.data_parallel_sharding_strategy == "optim_grads", overlap_grad_reduce=True
        ),
        since="0.12.0",
        until="0.14.0",
    ),
    _gather(lambda a: a.use_distributed_optimizer, "use_distributed_optimizer", "", "0.14.0"),
    _gather(
        lambda a: a.use_distributed_optimizer or a.use_megatron_fsdp,
        "use_distributed_optimizer or use_megatron_fsdp",
        "0.14.0",
        "0.17.0",
    ),
    _gather(
        lambda a: a.use_distributed_optimizer or a.use_megatron_fsdp or a.optimizer == "dist_muon",
        "use_distributed_optimizer, use_megatron_fsdp or optimizer dist_muon",
        "0.17.0",
        "",
    ),
    needs(
        "overlap_param_gather",
        "overlap_grad_reduce",
        GATHER,
        "add --overlap-grad-reduce, or drop --overlap-param-gather",
    ),
    check(
        GATHER,
        lambda a: a.overlap_param_gather and a.use_legacy_models,
        "overlap_param_gather: found with use_legacy_models, which cannot overlap communication; "
        "drop one of them",
        until="0.18.0",
    ),
)

TORCH_STEPS: tuple[Step, ...] = (
    _torch(
        lambda a: a.pipeline_model_parallel_size != 1,
        "use_torch_fsdp2: found with pipeline_model_parallel_size {pipeline_model_parallel_size}; expected 1",
    ),
    _torch(
        lambda a: a.expert_model_parallel_size != 1,
        "use_torch_fsdp2: found with expert_model_parallel_size {expert_model_parallel_size}; expected 1",
    ),
    _torch(
        lambda a: a.use_distributed_optimizer,
        "use_torch_fsdp2: found with use_distributed_optimizer; FSDP itself shards the optimizer; drop"
        " --use-distributed-optimizer",
        name="found-with-use_distributed_optimizer-it-shards",
    ),
    _torch(
        lambda a: a.gradient_accumulation_fusion,
        "use_torch_fsdp2: found with gradient_accumulation_fusion; add --no-gradient-accumulation-fusion",
    ),
    _torch(
        lambda a: a.ckpt_format != "torch_dist",
        "use_torch_fsdp2: found with ckpt_format {ckpt_format}; expected torch_dist",
        until="0.12.0",
    ),
    _torch(
        lambda a: a.ckpt_format not in ("torch_dist", "torch_dcp"),
        "use_torch_fsdp2: found with ckpt_format {ckpt_format}; expected torch_dist or torch_dcp",
        since="0.12.0",
    ),
    _torch(
        lambda a: not a.untie_embeddings_and_output_weights,
        "use_torch_fsdp2: found with tied embeddings; add --untie-embeddings-and-output-weights",
    ),
    _torch(lambda a: a.fp16, "use_torch_fsdp2: found with fp16; expected bf16 or fp32"),
    derive(
        TORCH,
        when(lambda a: a.use_torch_fsdp2 and a.fp8_param_gather, fp8_param_gather=False),
        since="0.14.0",
    ),
)

STEP_STEPS: tuple[Step, ...] = (
    _step(
        lambda a: not a.use_distributed_optimizer,
        "overlap_param_gather_with_optimizer_step: found without use_distributed_optimizer; add --use-distributed-optimizer",
        name="found-without-use_distributed_optimizer-add-it",
    ),
    _step(
        lambda a: not a.overlap_param_gather,
        "overlap_param_gather_with_optimizer_step: found without overlap_param_gather; add --overlap-param-gather",
        name="found-without-overlap_param_gather-add-it",
    ),
    _step(
        lambda a: a.virtual_pipeline_model_parallel_size is None,
        "overlap_param_gather_with_optimizer_step: found without an interleaved schedule; add virtual stages",
    ),
    _step(
        lambda a: a.use_dist_ckpt,
        "overlap_param_gather_with_optimizer_step: found with ckpt_format {ckpt_format}; expected torch",
    ),
)


NARROW_STEPS: tuple[Step, ...] = (
    derive("validate_args: dtypes of the optimizer", dtypes(*OPTIMIZER_DTYPES), since="0.11.0"),
    derive("validate_args: dtypes", dtypes(*LATER_DTYPES), since="0.17.0"),
    derive("validate_args: dtypes", dtypes("mamba_training_ssm_states_dtype"), since="0.19.0"),
    derive("validate_args: dtypes", dtypes("logit_dtype"), since=MAIN),
    derive(
        "validate_args: dtypes",
        when(lambda a: a.grad_reduce_in_bf16, megatron_fsdp_grad_comm_dtype="torch.bfloat16"),
        since="0.17.0",
        until="0.19.0",
    ),
    needs(
        "fp8_param_gather",
        "use_distributed_optimizer",
        NARROW,
        "add --use-distributed-optimizer",
        until="0.12.0",
    ),
    check(
        NARROW,
        lambda a: (
            a.fp8_param_gather
            and not (a.use_distributed_optimizer or a.use_torch_fsdp2 or a.use_megatron_fsdp)
        ),
        "fp8_param_gather: found without a sharded optimizer; expected use_distributed_optimizer or FSDP; add"
        " --use-distributed-optimizer",
        since="0.12.0",
        name="found-with-a-replicated-optimizer",
    ),
    excludes("fp4", "fp8", NARROW, since="0.15.0"),
    needs("fp4_param", "fp4", NARROW, "add --fp4-format", since="0.15.0", until="0.17.1"),
    needs("fp4_param_gather", "fp4", NARROW, "add --fp4-format", since="0.17.1"),
    # Dequantization slice by slice computes a scale for each slice, but a tensorwise recipe has one
    # scale for each tensor: a tensor that is loaded in several slices would be corrupt.
    derive(
        "validate_args: checkpoint dequantization",
        when(
            lambda a: a.fp8 and a.fp8_recipe == "tensorwise" and a.stream_ckpt_dequant,
            stream_ckpt_dequant=False,
        ),
        since="0.19.0",
        until=MAIN,
    ),
)


def _hashes(a: Namespace) -> bool:
    has_interval = a.check_weight_hash_across_dp_replicas_interval is not None
    return bool(has_interval and a.data_parallel_sharding_strategy == "optim_grads_params")


HASHES = (
    "check_weight_hash_across_dp_replicas_interval: found with sharded parameters (optim_grads_params), which"
    " have no replicas to compare; drop it"
)

FSDP_STEPS: tuple[Step, ...] = (
    needs(
        "use_custom_fsdp",
        "use_distributed_optimizer",
        CUSTOM,
        "add --use-distributed-optimizer",
        since="0.12.0",
        until="0.14.0",
    ),
    check(
        CUSTOM,
        lambda a: (
            a.use_custom_fsdp
            and a.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params")
            and a.gradient_accumulation_fusion is not False
        ),
        "use_custom_fsdp: found with sharded gradients ({data_parallel_sharding_strategy}) and"
        " gradient_accumulation_fusion; add --no-gradient-accumulation-fusion",
        since="0.12.0",
        until="0.14.0",
        name="found-sharded-gradients-with-gradient_accumulation_fusion",
    ),
    check(
        CUSTOM, lambda a: a.use_custom_fsdp and _hashes(a), HASHES, since="0.12.0", until="0.14.0"
    ),
    # Upstream sets the deprecated name too.
    derive(FSDP, when(lambda a: a.use_megatron_fsdp, use_custom_fsdp=True), since="0.14.0"),
    derive(
        FSDP,
        when(
            lambda a: a.use_megatron_fsdp and a.megatron_fsdp_version != 2,
            use_distributed_optimizer=True,
        ),
        since="0.18.0",
    ),
    derive(
        FSDP,
        when(lambda a: a.use_megatron_fsdp, reuse_grad_buf_for_mxfp8_param_ag=False),
        since="0.18.0",
    ),
    _fsdp(
        lambda a: a.megatron_fsdp_version == 2 and a.use_distributed_optimizer,
        "megatron_fsdp_version: found 2 with use_distributed_optimizer; drop --use-distributed-optimizer",
        since=MAIN,
    ),
    # Megatron-FSDP moves the storage of each parameter; Transformer Engine's grouped parameters
    # share one.
    _fsdp(
        lambda a: a.moe_single_grouped_weight or a.moe_single_grouped_bias,
        "use_megatron_fsdp: found with moe_single_grouped_weight or moe_single_grouped_bias; drop them",
        since="0.19.0",
    ),
    _fsdp(
        lambda a: a.optimizer not in ("sgd", "adam"),
        "use_megatron_fsdp: found with optimizer {optimizer}; expected sgd or adam",
        since="0.18.0",
    ),
    _fsdp(_hashes, HASHES),
    _fsdp(
        lambda a: a.ckpt_format != "fsdp_dtensor",
        "use_megatron_fsdp: found with ckpt_format {ckpt_format}; expected fsdp_dtensor; set --ckpt-format fsdp_dtensor",
    ),
    derive(
        FSDP,
        when(lambda a: a.use_megatron_fsdp and a.nccl_ub, fsdp_manual_registration=True),
        since="0.18.0",
    ),
    derive(
        FSDP,
        when(
            lambda a: a.use_megatron_fsdp and (a.nccl_ub or a.megatron_fsdp_max_pool_double_buffer),
            fsdp_double_buffer=True,
        ),
        since="0.19.0",
    ),
    _fsdp(
        lambda a: a.init_model_with_meta_device and a.data_parallel_sharding_strategy == "no_shard",
        "init_model_with_meta_device: found with data_parallel_sharding_strategy no_shard; "
        "drop it, or choose a strategy that shards",
        since="0.18.0",
    ),
    check(
        FSDP,
        lambda a: a.fsdp_manual_registration and not (a.use_megatron_fsdp and a.nccl_ub),
        "fsdp_manual_registration: found without both use_megatron_fsdp and nccl_ub; add --use-megatron-fsdp"
        " and --use-nccl-ub, or drop it",
        since="0.16.0",
    ),
    derive(
        FSDP,
        when(
            lambda a: a.fsdp_manual_registration and a.use_megatron_fsdp,
            reuse_grad_buf_for_mxfp8_param_ag=False,
        ),
        since="0.16.0",
        until="0.18.0",
    ),
)
