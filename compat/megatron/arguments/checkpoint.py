"""Checks and derivations for kinds of optimizers, checkpoints, inference, offloading, and the end
of `validate_args`.
"""

from __future__ import annotations

from bridge.stack.checks import equals, excludes, needs, on, positive, set_
from compat.megatron.arguments.namespace import Namespace, Step, member_name
from compat.megatron.arguments.steps import check, derive, inherit, under, when
from compat.megatron.releases import MAIN

OPTIMIZER = "validate_args: optimizer kinds"
GLOO = "validate_args: gloo process groups"
FAKE = "validate_args: fake process group"
SAVING = "validate_args: checkpoints"
INFERENCE = "validate_args: inference"
OFFLOAD = "validate_args: optimizer offload"
WGRAD = "validate_args: delayed weight gradients"
LATENT = "validate_args: latent experts"
FORMATS = ("torch", "torch_dist")


def _other(a: Namespace) -> bool:
    return a.optimizer not in ("sgd", "adam")


def _layer_wise(a: Namespace) -> None:
    """Switch on sharding by layer for optimizers other than adam and sgd, as Megatron does since
    0.18.
    """
    # dist_muon is the deprecated name of muon with --use-distributed-optimizer.
    layer_wise = _other(a) and (a.optimizer == "dist_muon" or bool(a.use_distributed_optimizer))
    a.use_layer_wise_distributed_optimizer = layer_wise
    if layer_wise:
        a.use_distributed_optimizer = False
    if a.optimizer == "dist_muon":
        a.optimizer = "muon"


# 0.18 took these checks into those of all other optimizers (OPTIMIZER_STEPS).
_muon = under(OPTIMIZER, lambda a: "muon" in a.optimizer, "0.16.0", "0.18.0")


def _gloo(flag: str, since: str, until: str) -> tuple[Step, ...]:
    """Return the checks of runs without gloo process groups; `flag` is the argument that creates
    these groups.
    """
    return (
        # The older format gathers the sharded state of the optimizer in host memory, by gloo.
        check(
            GLOO,
            lambda a: not getattr(a, flag) and a.use_distributed_optimizer and not a.use_dist_ckpt,
            f"{flag}: found false with use_distributed_optimizer and ckpt_format {{ckpt_format}}; expected a"
            " distributed checkpoint format such as torch_dist",
            since=since,
            until=until,
        ),
        check(
            GLOO,
            lambda a: (
                not getattr(a, flag)
                and a.use_distributed_optimizer
                and a.dist_ckpt_optim_fully_reshardable
                and a.distrib_optim_fully_reshardable_mem_efficient
            ),
            "distrib_optim_fully_reshardable_mem_efficient: found without gloo process groups; drop it",
            since=max(since, "0.15.0"),
            until=until,
        ),
        excludes(
            "fake_process_group",
            equals("moe_token_dispatcher_type", "flex"),
            FAKE,
            "choose another dispatcher",
            since=max(since, "0.16.0"),
            until=until,
        ),
        derive(
            FAKE,
            when(
                lambda a: a.fake_process_group,
                check_for_nan_in_loss_and_grad=False,
                **{flag: False},
            ),
            since=max(since, "0.16.0"),
            until=until,
        ),
    )


OPTIMIZER_STEPS: tuple[Step, ...] = (
    check(
        OPTIMIZER,
        lambda a: _other(a) and (a.use_torch_fsdp2 or a.use_megatron_fsdp),
        "optimizer: found {optimizer} with FSDP; expected sgd or adam",
        since="0.18.0",
    ),
    check(
        OPTIMIZER,
        lambda a: _other(a) and a.ckpt_format not in FORMATS,
        "ckpt_format: found {ckpt_format} with optimizer {optimizer}; expected torch or torch_dist",
        since="0.18.0",
    ),
    derive(OPTIMIZER, _layer_wise, since="0.18.0"),
    *_gloo("enable_gloo_process_groups", "0.12.0", "0.17.0"),
    *_gloo("use_gloo_process_groups", "0.17.0", ""),
)


def _graph_modules(a: Namespace) -> set[str]:
    """Return the names of the modules in CUDA graphs."""
    return {member_name(module) for module in (a.cuda_graph_modules or a.cuda_graph_scope or ())}


def _reduces_inside_graphs(a: Namespace) -> bool:
    """Whether weight gradients are computed inside CUDA graphs and their reduction is overlapped."""
    # A graph of the router holds the shared experts too, unless they overlap the exchange of
    # tokens.
    shared = a.moe_shared_expert_intermediate_size is not None and not a.moe_shared_expert_overlap
    modules = _graph_modules(a)
    return bool(
        a.overlap_grad_reduce and ("attn" in modules or ("moe_router" in modules and shared))
    )


_wgrad = under(WGRAD, on("delay_wgrad_compute"), "0.13.0")


SAVING_STEPS: tuple[Step, ...] = (
    needs(
        "load_main_params_from_ckpt", "no_load_optim", SAVING, "add --no-load-optim", since="0.14.0"
    ),
    derive(
        SAVING,
        when(
            lambda a: a.use_dist_ckpt and a.async_save and not a.use_persistent_ckpt_worker,
            async_save=False,
        ),
        since="0.16.0",
    ),
    # The row above may have switched async_save off.
    derive(SAVING, when(lambda a: not a.async_save, async_strategy="mcore"), since="0.17.1"),
    check(
        SAVING,
        lambda a: (
            a.logits_save_dir is not None and (a.logits_save_top_k is None or not a.async_save)
        ),
        "logits_save_dir: found without logits_save_top_k ({logits_save_top_k}) or async_save"
        " ({async_save}); add --logits-save-top-k, --async-save and --use-persistent-ckpt-worker",
        since="0.19.0",
    ),
    check(
        SAVING,
        lambda a: (
            a.ckpt_pg_tensors_cache_path is not None
            and a.ckpt_fully_parallel_save_process_group != a.ckpt_fully_parallel_load_process_group
        ),
        "ckpt_pg_tensors_cache_path: found with other groups to save"
        " ({ckpt_fully_parallel_save_process_group}) than to load"
        " ({ckpt_fully_parallel_load_process_group}); use the same groups for both",
        since=MAIN,
    ),
    derive(
        "validate_args: frozen layers",
        when(
            lambda a: a.freeze_all_layers,
            use_distributed_optimizer=False,
            overlap_param_gather=False,
        ),
        since="0.19.0",
    ),
    excludes(set_("override_ckpt_iteration"), "finetune", SAVING, since="0.19.0"),
)

INFERENCE_STEPS: tuple[Step, ...] = (
    # The default of the threshold is -1: batches are not pipelined.
    check(
        INFERENCE,
        lambda a: (
            a.inference_batch_times_seqlen_threshold > -1 and a.pipeline_model_parallel_size <= 1
        ),
        "inference_batch_times_seqlen_threshold: found {inference_batch_times_seqlen_threshold}; expected a"
        " pipeline; use more pipeline ranks, or drop it",
        since="0.10.0",
    ),
    check(
        INFERENCE,
        lambda a: a.inference_batch_times_seqlen_threshold > -1 and a.enable_cuda_graph,
        "inference_batch_times_seqlen_threshold: found with enable_cuda_graph; keep one of them",
        since="0.13.0",
        until="0.15.0",
    ),
    check(
        INFERENCE,
        lambda a: a.inference_batch_times_seqlen_threshold > -1 and a.cuda_graph_impl != "none",
        "inference_batch_times_seqlen_threshold: found with cuda_graph_impl {cuda_graph_impl}; keep one of them",
        since="0.15.0",
    ),
    check(
        INFERENCE,
        lambda a: (
            a.inference_dynamic_batching and a.inference_dynamic_batching_buffer_size_gb is None
        ),
        "inference_dynamic_batching_buffer_size_gb: missing; inference_dynamic_batching needs it",
        since="0.12.0",
        until="0.18.0",
    ),
    check(
        INFERENCE,
        lambda a: a.inference_dynamic_batching and a.inference_dynamic_batching_chunk_size % 256,
        "inference_dynamic_batching_chunk_size: found {inference_dynamic_batching_chunk_size}; expected a multiple of 256",
        since="0.13.0",
        until="0.15.0",
    ),
    check(
        INFERENCE,
        lambda a: a.inference_dynamic_batching and a.inference_dynamic_batching_block_size % 256,
        "inference_dynamic_batching_block_size: found {inference_dynamic_batching_block_size}; expected a multiple of 256",
        since="0.15.0",
        until="0.18.0",
    ),
    check(
        INFERENCE,
        lambda a: (
            a.inference_dynamic_batching
            and a.inference_dynamic_batching_buffer_guaranteed_fraction is None
        ),
        "inference_dynamic_batching_buffer_guaranteed_fraction: missing; inference_dynamic_batching needs it",
        since="0.12.0",
        until="0.16.0",
    ),
    check(
        INFERENCE,
        lambda a: (
            a.cuda_graph_impl == "local"
            and a.expert_model_parallel_size > 1
            and not a.moe_pad_experts_for_cuda_graph_inference
        ),
        "moe_pad_experts_for_cuda_graph_inference: missing; CUDA graphs with expert parallelism need it; add it",
        since="0.16.0",
        until="0.17.0",
    ),
    check(
        INFERENCE,
        lambda a: (
            a.cuda_graph_impl == "local"
            and a.expert_model_parallel_size > 1
            and a.transformer_impl != "inference_optimized"
            and not a.moe_pad_experts_for_cuda_graph_inference
        ),
        "moe_pad_experts_for_cuda_graph_inference: missing; CUDA graphs with expert parallelism need it; add it",
        since="0.17.0",
        until="0.18.0",
    ),
    needs("moe_use_upcycling", set_("save"), "validate_args: upcycling", "add --save"),
    derive(
        "validate_args: upcycling",
        when(lambda a: a.moe_use_upcycling, no_load_optim=True, no_load_rng=True),
    ),
    derive(
        "validate_args: skipped training",
        when(lambda a: a.skip_train and not a.no_load_optim, no_load_optim=True),
        since="0.16.0",
        until="0.17.0",
    ),
    # In reinforcement learning that only generates, the user decides whether there is an optimizer.
    derive(
        "validate_args: skipped training",
        when(
            lambda a: a.skip_train and not a.perform_rl_step and not a.no_load_optim,
            no_load_optim=True,
        ),
        since="0.17.0",
    ),
    check(
        "validate_args: skipped training",
        lambda a: (
            a.skip_train
            and a.perform_rl_step
            and a.no_load_optim
            and a.rl_offload_optimizer_during_inference
        ),
        "rl_offload_optimizer_during_inference: found with no_load_optim and skip_train, so the run has no optimizer"
        " to offload; drop it",
        since="0.17.0",
    ),
)

LAST_STEPS: tuple[Step, ...] = (
    _muon(
        lambda a: a.overlap_grad_reduce or a.overlap_param_gather,
        "optimizer: found {optimizer} with overlap_grad_reduce or overlap_param_gather; drop them",
        until="0.17.0",
    ),
    _muon(
        lambda a: a.optimizer == "muon" and (a.overlap_grad_reduce or a.overlap_param_gather),
        "optimizer: found muon with overlap_grad_reduce or overlap_param_gather; drop them, or use dist_muon",
        since="0.17.0",
    ),
    _muon(
        lambda a: a.use_distributed_optimizer or a.use_torch_fsdp2 or a.use_megatron_fsdp,
        "optimizer: found {optimizer} with a sharded optimizer or FSDP; drop --use-distributed-optimizer and FSDP",
    ),
    _muon(
        lambda a: a.ckpt_format not in FORMATS,
        "ckpt_format: found {ckpt_format} with optimizer {optimizer}; expected torch or torch_dist",
    ),
    # The optimizer on the host reuses the code of the precision-aware one.
    needs(
        "optimizer_cpu_offload",
        "use_precision_aware_optimizer",
        OFFLOAD,
        "add --use-precision-aware-optimizer",
        since="0.12.0",
    ),
    check(
        OFFLOAD,
        lambda a: a.optimizer_cpu_offload and a.fp8_param_gather and a.fp8_recipe != "delayed",
        "optimizer_cpu_offload: found with fp8_param_gather and fp8_recipe {fp8_recipe}; expected"
        " fp8_recipe delayed",
        since="0.14.0",
    ),
    _wgrad(
        lambda a: a.moe_use_legacy_grouped_gemm,
        "delay_wgrad_compute: found with moe_use_legacy_grouped_gemm; drop one of them",
        until="0.14.0",
    ),
    _wgrad(
        lambda a: a.overlap_grad_reduce,
        "delay_wgrad_compute: found with overlap_grad_reduce; this release supports only one of them; drop one",
        until="0.14.0",
    ),
    check(
        "validate_args: local checkpoints",
        lambda a: a.non_persistent_ckpt_type == "local" and a.non_persistent_local_ckpt_dir is None,
        "non_persistent_ckpt_type: found local without a folder; add --non-persistent-local-ckpt-dir",
        since="0.11.0",
    ),
    check(
        "validate_args: local checkpoints",
        lambda a: (
            a.replication and (a.replication_jump is None or a.non_persistent_ckpt_type != "local")
        ),
        "replication: found with replication_jump {replication_jump} and non_persistent_ckpt_type"
        " {non_persistent_ckpt_type}; expected a number for replication_jump, and"
        " non_persistent_ckpt_type local",
        since="0.11.0",
    ),
    derive(
        "validate_args: local checkpoints",
        when(lambda a: not a.replication and a.replication_jump, replication_jump=None),
        since="0.11.0",
    ),
    _wgrad(
        lambda a: a.transformer_impl != "transformer_engine",
        "delay_wgrad_compute: found with transformer_impl {transformer_impl}; expected transformer_engine",
    ),
    # Without the fusion, gradients have no fixed place in memory, and CUDA graphs need one.
    _wgrad(
        lambda a: _reduces_inside_graphs(a) and not a.gradient_accumulation_fusion,
        "delay_wgrad_compute: found with CUDA graphs and without gradient_accumulation_fusion; drop"
        " --no-gradient-accumulation-fusion",
        since="0.17.0",
    ),
    _wgrad(
        lambda a: (
            a.overlap_grad_reduce
            and "attn" in _graph_modules(a)
            and (a.add_bias_linear or a.add_qkv_bias)
        ),
        "delay_wgrad_compute: found with CUDA graphs of attention and with biases; "
        "add --disable-bias-linear",
        since="0.17.0",
    ),
    check(
        "validate_args: balancing loss",
        lambda a: (
            a.num_experts is not None
            and (a.moe_router_load_balancing_type != "none" or a.moe_z_loss_coeff is not None)
            and (a.account_for_embedding_in_pipeline_split or a.account_for_loss_in_pipeline_split)
        ),
        "account_for_embedding_in_pipeline_split: found (or account_for_loss_in_pipeline_split) with a"
        " load-balancing loss or a z-loss of experts; this release expects moe_router_load_balancing_type"
        " none and no moe_z_loss_coeff",
        name="found-with-a-balancing-loss",
        since="0.11.0",
        until="0.12.0",
    ),
    check(
        "validate_args: activation offload",
        lambda a: (
            a.fine_grained_activation_offloading and a.transformer_impl != "transformer_engine"
        ),
        "fine_grained_activation_offloading: found with transformer_impl {transformer_impl}; expected transformer_engine",
        since="0.16.0",
    ),
)


END_STEPS: tuple[Step, ...] = (
    check(
        "validate_args: multi-token prediction",
        lambda a: (
            a.mtp_num_layers
            and a.position_embedding_type not in ("learned_absolute", "rope", "mrope", "none")
        ),
        "position_embedding_type: found {position_embedding_type}; multi-token prediction expects"
        " learned_absolute, rope, mrope or none",
        since="0.17.0",
    ),
    derive(
        "validate_args: activation offload",
        when(lambda a: a.cpu_offloading_num_layers > 0, cpu_offloading=True),
        since="0.16.0",
    ),
    needs(
        "external_cuda_graph",
        "te_rng_tracker",
        "validate_args: CUDA graphs",
        "add --te-rng-tracker",
        since="0.13.0",
        until="0.14.0",
    ),
    excludes(
        "enable_cuda_graph",
        "external_cuda_graph",
        "validate_args: CUDA graphs",
        since="0.14.0",
        until="0.15.0",
    ),
    derive(
        "validate_args: CUDA graphs",
        when(
            lambda a: (
                (a.enable_cuda_graph or a.external_cuda_graph)
                and a.transformer_impl == "transformer_engine"
            ),
            te_rng_tracker=True,
        ),
        since="0.14.0",
        until="0.15.0",
    ),
    check(
        "validate_args: CUDA graphs",
        lambda a: a.external_cuda_graph and a.recompute_granularity == "full",
        "recompute_granularity: found full with CUDA graphs; drop one of them",
        since="0.14.0",
        until="0.15.0",
    ),
    derive(
        "validate_args: CUDA graphs",
        when(
            lambda a: a.cuda_graph_impl != "none" and a.transformer_impl == "transformer_engine",
            te_rng_tracker=True,
        ),
        since="0.15.0",
        until="0.16.0",
    ),
    check(
        "validate_args: CUDA graphs",
        lambda a: a.cuda_graph_impl != "none" and a.recompute_granularity == "full",
        "recompute_granularity: found full with CUDA graphs; drop one of them",
        since="0.15.0",
        until="0.16.0",
    ),
    # 0.13 refuses a run without this tracker of random states; since 0.14, Megatron warns and
    # switches it on.
    derive(
        "validate_args: CUDA graphs",
        when(
            lambda a: (
                a.cuda_graph_impl not in (None, "none")
                and "transformer_engine" in (a.transformer_impl, a.cuda_graph_impl)
            ),
            te_rng_tracker=True,
        ),
        since="0.16.0",
    ),
    check(
        "validate_args: CUDA graphs",
        lambda a: "full" in (a.cuda_graph_scope or ()) and len(a.cuda_graph_scope) > 1,
        "cuda_graph_scope: found full beside other modules; drop the others",
        since="0.16.0",
        until="0.18.0",
        name="found-full-beside-others-drop",
    ),
    derive(
        "validate_args: CUDA graphs",
        when(lambda a: "full" in (a.cuda_graph_scope or ()), cuda_graph_scope=[]),
        since="0.16.0",
        until="0.18.0",
    ),
    excludes(
        "cuda_graph_modules",
        equals("cuda_graph_impl", "full_iteration"),
        "validate_args: CUDA graphs",
        "drop --cuda-graph-modules",
        since="0.18.0",
    ),
    excludes(
        "group_query_attention",
        "multi_latent_attention",
        "validate_args: latent attention",
        since="0.16.0",
    ),
    needs(
        "mla_down_proj_fusion",
        "multi_latent_attention",
        "validate_args: latent attention",
        "add --multi-latent-attention",
        since="0.17.0",
    ),
    positive("moe_latent_size", LATENT, since="0.16.0"),
    check(
        LATENT,
        lambda a: a.moe_latent_size is not None and a.num_experts is None,
        "moe_latent_size: found {moe_latent_size} without experts; add --num-experts",
        since="0.16.0",
    ),
    excludes(
        set_("moe_latent_size"),
        "use_legacy_models",
        LATENT,
        "drop one of them",
        since="0.16.0",
        until="0.18.0",
    ),
    excludes(
        set_("moe_latent_size"),
        "moe_use_legacy_grouped_gemm",
        LATENT,
        "drop one of them",
        since="0.16.0",
        until="0.17.0",
    ),
    derive(
        "validate_args: special tokens",
        inherit("tokenizer_special_tokens", "tiktoken_special_tokens"),
        since="0.16.0",
        until="0.18.0",
    ),
)
