"""Checks and derivations for recomputation, sequence and context parallelism, weight shards,
positions and attention.
"""

from __future__ import annotations

from bridge.stack.checks import equals, excludes, needs, set_
from compat.megatron.arguments.namespace import Namespace, Predicate, Step
from compat.megatron.arguments.sizes import DENSE_SHARDS, EXPERT_SHARDS, dense_shards, expert_shards
from compat.megatron.arguments.steps import check, derive, when

RECOMPUTE = "validate_args: activation recomputing"
SEQUENCE = "validate_args: sequence parallelism"
HYBRID = "validate_args: hybrid context parallelism"
SHARDS = "validate_args: weight shards"
POSITIONS = "validate_args: position embeddings"
RETRO = "validate_args: retro"
CLIP = "validate_args: attention logits"


def _check_distribution(fails: Predicate, problem: str) -> Step:
    return check(RECOMPUTE, lambda a: a.distribute_saved_activations and fails(a), problem)


def _check_hybrid(fails: Predicate, problem: str) -> Step:
    return check(HYBRID, lambda a: a.hybrid_context_parallel and fails(a), problem, since="0.16.0")


def _check_sharding(fails: Predicate, problem: str, name: str = "") -> Step:
    def on(a: Namespace) -> object:
        return (a.gtp_weight_remat_size > 1 or a.expert_gtp_weight_remat_size > 1) and fails(a)

    return check(SHARDS, on, problem, since="0.19.0", name=name)


def _check_retro(fails: Predicate, problem: str, name: str = "") -> Step:
    return check(
        RETRO, lambda a: a.retro_add_retriever and fails(a), problem, until="0.16.0", name=name
    )


def _set_streams(a: Namespace) -> None:
    """Set the groups of ranks that get high-priority streams; torch's FSDP adds its own groups."""
    # Megatron's own FSDP has them only on Blackwell and later devices. The device is not known
    # here.
    if a.use_torch_fsdp2:
        groups = list(a.high_priority_stream_groups or ())
        fsdp_groups = ["dp_cp", "ep_dp"] if a.expert_model_parallel_size > 1 else ["dp_cp"]
        a.high_priority_stream_groups = groups + [
            name for name in fsdp_groups if name not in groups
        ]


MODEL_STEPS: tuple[Step, ...] = (
    _check_distribution(
        lambda a: a.tensor_model_parallel_size <= 1,
        "distribute_saved_activations: found with tensor_model_parallel_size {tensor_model_parallel_size};"
        " expected more than 1; drop --distribute-saved-activations",
    ),
    _check_distribution(
        lambda a: a.recompute_granularity != "full",
        "distribute_saved_activations: found with recompute_granularity {recompute_granularity}; expected full",
    ),
    _check_distribution(
        lambda a: a.recompute_method is None,
        "distribute_saved_activations: found without recompute_method; add --recompute-method uniform or block",
    ),
    excludes(
        set_("recompute_method"),
        equals("recompute_granularity", "selective"),
        RECOMPUTE,
        "drop --recompute-method, or set --recompute-granularity full",
    ),
    # Upstream switches it off on one tensor rank, where it would only change numerics.
    derive(SEQUENCE, when(lambda a: a.tensor_model_parallel_size == 1, sequence_parallel=False)),
    needs(
        "tp_comm_overlap",
        "sequence_parallel",
        SEQUENCE,
        "add --sequence-parallel, or drop --tp-comm-overlap",
        since="0.10.0",
    ),
    _check_hybrid(
        lambda a: a.pipeline_model_parallel_size > 1,
        "hybrid_context_parallel: found with pipeline_model_parallel_size {pipeline_model_parallel_size}; expected 1",
    ),
    _check_hybrid(
        # A given flag is deleted from the arguments by an earlier step; an absent flag stays there
        # as False.
        lambda a: "enable_cuda_graph" not in a.__dict__,
        "hybrid_context_parallel: found with CUDA graphs; drop one of them",
    ),
    _check_hybrid(
        lambda a: a.use_megatron_fsdp,
        "hybrid_context_parallel: found with use_megatron_fsdp; drop one of them",
    ),
    _check_hybrid(
        lambda a: a.dataloader_type != "single",
        "hybrid_context_parallel: found with dataloader_type {dataloader_type}; expected single",
    ),
    _check_hybrid(
        lambda a: not a.calculate_per_token_loss,
        "hybrid_context_parallel: found without calculate_per_token_loss; add --calculate-per-token-loss",
    ),
    derive(
        SEQUENCE,
        when(lambda a: a.sequence_parallel, async_tensor_model_parallel_allreduce=False),
        until="0.12.0",
    ),
    derive("validate_args: stream priorities", _set_streams, since="0.13.0"),
    # The same rows as in sizes.py: upstream calls the function again here, and it changes nothing
    # the second time.
    DENSE_SHARDS,
    EXPERT_SHARDS,
    derive(SHARDS, dense_shards, since="0.19.0"),
    derive(SHARDS, expert_shards, since="0.19.0"),
    _check_sharding(
        lambda a: a.fp4 and not a.fp4_param_gather,
        "fp4: found with weight shards (--tensor-parallel-num-weight-shards); add --fp4-param-gather",
        name="found-with-weight-shards-add",
    ),
    # An average over the data-parallel ranks would have to be scaled by the weight shards of each
    # buffer.
    _check_sharding(
        lambda a: a.ddp_average_in_collective,
        "ddp_average_in_collective: found with weight shards (--tensor-parallel-num-weight-shards); drop it",
        name="found-with-weight-shards-drop",
    ),
    _check_sharding(
        lambda a: a.ckpt_format not in ("torch", "torch_dist"),
        "ckpt_format: found {ckpt_format} with weight shards (--tensor-parallel-num-weight-shards); expected"
        " torch or torch_dist",
        name="found-with-weight-shards-expected",
    ),
    _check_sharding(
        lambda a: (
            a.dist_ckpt_optim_fully_reshardable and a.distrib_optim_fully_reshardable_mem_efficient
        ),
        "distrib_optim_fully_reshardable_mem_efficient: found with weight shards"
        " (--tensor-parallel-num-weight-shards) and dist_ckpt_optim_fully_reshardable; drop one of them",
        name="found-with-weight-shards-and",
    ),
    # With weight shards there are no bf16 weights beside the mxfp8 ones, so the optimizer has to
    # update those; and mxfp8 weights do not fit into the buffer of parameters, so they are gathered
    # into that of the gradients.
    _check_sharding(
        lambda a: (
            a.fp8_recipe == "mxfp8"
            and not (a.fp8_param_gather and a.reuse_grad_buf_for_mxfp8_param_ag)
        ),
        "fp8_recipe: found mxfp8 with weight shards (--tensor-parallel-num-weight-shards); add"
        " --fp8-param-gather and --reuse-grad-buf-for-mxfp8-param-ag",
    ),
    _check_sharding(
        lambda a: (
            (a.gtp_remat_nccl_ub or a.gtp_expert_remat_nccl_ub) and a.disable_symmetric_registration
        ),
        "disable_symmetric_registration: found with gtp_remat_nccl_ub or gtp_expert_remat_nccl_ub, which need"
        " symmetric memory; drop one of them",
        name="found-with-nccl-s-memory",
    ),
    # The fused kernel adds the bias of the linear layer, so it has no use without one.
    derive("validate_args: biases", when(lambda a: not a.add_bias_linear, bias_gelu_fusion=False)),
    derive(
        "validate_args: biases",
        when(lambda a: a.add_bias_linear, add_qkv_bias=True),
        since="0.10.0",
    ),
    _check_retro(
        lambda a: a.train_samples is None,
        "retro_add_retriever: found without train_samples, which the RETRO project sets; add --retro-project-dir",
        name="found-without-train_samples-which-its",
    ),
    _check_retro(
        lambda a: a.sequence_parallel,
        "retro_add_retriever: found with sequence_parallel; drop one of them",
    ),
    _check_retro(
        lambda a: a.pipeline_model_parallel_size != 1,
        "retro_add_retriever: found with pipeline_model_parallel_size {pipeline_model_parallel_size}; expected 1",
    ),
    check(
        CLIP,
        lambda a: a.qk_clip and not (0.0 < a.qk_clip_alpha < 1.0),
        "qk_clip_alpha: found {qk_clip_alpha}; expected a number between 0 and 1",
        since="0.16.0",
    ),
    check(
        CLIP,
        lambda a: a.qk_clip and a.qk_clip_threshold <= 0,
        "qk_clip_threshold: found {qk_clip_threshold}; expected a positive number",
        since="0.16.0",
    ),
    check(
        "validate_args: decoupled learning rate",
        lambda a: (
            a.use_legacy_models and (a.decoupled_lr is not None or a.decoupled_min_lr is not None)
        ),
        "decoupled_lr: found with use_legacy_models, which has no decoupled learning rate; drop one of them",
        until="0.18.0",
    ),
    derive(
        POSITIONS, when(lambda a: a.use_rotary_position_embeddings, position_embedding_type="rope")
    ),
    check(
        POSITIONS,
        lambda a: a.rotary_interleaved and a.apply_rope_fusion,
        "rotary_interleaved: found with rope fusion; add --no-rope-fusion",
        until="0.14.0",
    ),
    excludes(
        "rotary_interleaved", "use_legacy_models", POSITIONS, "drop one of them", until="0.18.0"
    ),
    derive(
        POSITIONS,
        when(lambda a: a.position_embedding_type != "rope", apply_rope_fusion=False),
        since="0.10.0",
    ),
    check(
        POSITIONS,
        lambda a: not a.add_position_embedding and a.position_embedding_type != "rope",
        "add_position_embedding: found false with position_embedding_type {position_embedding_type}; use"
        " --position-embedding-type none instead",
        name="found-false-with-position_embedding_type-say",
    ),
    check(
        POSITIONS,
        lambda a: (
            a.position_embedding_type == "relative" and a.transformer_impl != "transformer_engine"
        ),
        "position_embedding_type: found relative with transformer_impl {transformer_impl}; expected transformer_engine",
        since="0.11.0",
    ),
    needs(
        equals("position_embedding_type", "mrope"),
        set_("mrope_section"),
        POSITIONS,
        "add --mrope-section",
        since="0.12.0",
    ),
)
