"""Megatron's arguments that no Plan field stands for, each with the reason and the effect of losing it.

A row is a claim about Megatron's code. `Why.model` marks facts about the model; a target that takes its model from a script
does not lose them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from bridge.stack.rules import Effect, Switch, Use, Why
from compat.megatron import options

MODEL = Why("a fact about the model that stagebridge does not translate", Use.COMPUTES, True)
INSIDE = Why("a choice of how Megatron computes the model", Use.FORM, True)
KERNEL = Why("a kernel choice inside Megatron", Use.FORM)
SPEED = Why("a choice inside Megatron that saves memory or time", Use.PLACES)
OVERLAP = Why("an overlap inside Megatron", Use.PLACES)
LOW = Why("a setting of fp8 or fp4 inside Megatron", Use.COMPUTES)
DATA = Why("the target's data settings choose and mask the samples", Use.SAMPLES)
CACHE = Why("a setting of where data is cached", Use.RECORDS)
LOADER = Why("a setting of how data is read", Use.PLACES)
PLACE = Why(
    "a setting of which data is read; set the same data in the target",
    Use.RECORDS,
    other=Effect.NUMBERS,
)
TOKENIZER = Why("the tokenizer of the data", Use.RECORDS, other=Effect.NUMBERS)
BATCHES = Why(
    "stagebridge does not translate a batch size that changes during the run", Use.SAMPLES
)
START = Why("the weights or the checkpoint that a run starts from", Use.STARTS)
SAVING = Why("Megatron's training loop writes checkpoints in its own way", Use.RECORDS)
LOOP = Why("a switch of Megatron's training loop", Use.RECORDS)
LOGS = Why("Megatron's training loop writes logs in its own way", Use.RECORDS)
EVALUATION = Why("Megatron's training loop runs evaluation in its own way", Use.RECORDS)
FAMILY = Why(
    "a setting of Megatron's training scripts for other kinds of models", Use.COMPUTES, True
)
RL = Why("used by Megatron's reinforcement learning only", Use.COMPUTES)
DISTILS = Why("only Megatron distils from stored logits", Use.COMPUTES)
NEVER = Why("how long Megatron waits for another rank before it gives up", Use.CHECKS)
OPTIMIZER = Why("Megatron's own variant of the optimizer", Use.COMPUTES)

GROUPS: Mapping[str, Why] = {
    **dict.fromkeys(
        ("network size", "transformer configuration", "moe", "mla", "heterogeneous architecture"),
        MODEL,
    ),
    **dict.fromkeys(("vision", "biencoder", "retro", "experimental_attention_variant"), FAMILY),
    "regularization": OPTIMIZER,
    "learning rate and weight decay": Why(
        "Megatron's own schedule of learning rate or weight decay", Use.COMPUTES
    ),
    "mixed precision": Why("a precision switch inside Megatron", Use.FORM),
    "Transformer-Engine": Why("a Transformer Engine setting", Use.FORM),
    "kitchen": Why("a low-precision recipe inside Megatron", Use.COMPUTES),
    "training": LOOP,
    "distributed": Why("Megatron's own process groups", Use.PLACES),
    "distributed init": Why("Megatron's own communication setting", Use.PLACES),
    "RNG and initialization": Why("a setting of the random number generators", Use.SAMPLES),
    "data and dataloader": DATA,
    "tokenizer": TOKENIZER,
    "sft": DATA,
    "validation": EVALUATION,
    "checkpointing": SAVING,
    **dict.fromkeys(("logging", "one logger", "opentelemetry", "profiling"), LOGS),
    "msc": Why("a setting of Megatron's storage client", Use.RECORDS),
    **dict.fromkeys(
        ("straggler", "rerun engine", "workload inspector"),
        Why("a monitor of Megatron's training loop", Use.RECORDS),
    ),
    **dict.fromkeys(
        ("autoresume", "ft_package", "In-process restart"),
        Why("Megatron restarts a run in its own way", Use.RECORDS),
    ),
    "fault injector": Why("a setting of faults that Megatron injects for tests", Use.COMPUTES),
    "inference": Why("used for inference only", Use.UNREAD),
    "rl": RL,
    "Logits Distillation": DISTILS,
    "derived": Why("a value that Megatron derives and no user gives", Use.UNREAD),
    "experimental": Why("an experiment inside Megatron", Use.COMPUTES),
    "config class": Why("a field of Megatron's config class without a flag", Use.PLACES),
}
"""Reasons by argument group of Megatron's parser."""

SINGLE: Mapping[Why, str] = {
    BATCHES: "rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed",
    Why("a setting of steps that Megatron's training loop skips", Use.ENDS): ("iterations_to_skip"),
    Why("a setting with which Megatron ends the run early", Use.ENDS): (
        "exit_duration_in_mins phase_transition_iterations ckpt_convert_format error_injection_rate error_injection_type"
    ),
    Why("the learning-rate schedule that a resumed run uses", Use.STARTS): (
        "use_checkpoint_opt_param_scheduler override_opt_param_scheduler"
    ),
    Why("Megatron can evaluate without training", Use.ENDS): "skip_train",
    Why(
        "a choice between implementations of the optimizer on the host", Use.FORM
    ): "use_torch_optimizer_for_cpu_offload",
    Why(
        "formats of moments in Megatron's precision-aware optimizer", Use.FORM
    ): "exp_avg_dtype exp_avg_sq_dtype",
    Why("formats inside Megatron-FSDP", Use.FORM): (
        "megatron_fsdp_grad_comm_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_main_params_dtype"
    ),
    Why("a precision switch inside Megatron's layers", Use.FORM, True): (
        "fp32_residual_connection apply_query_key_layer_scaling disable_bf16_reduced_precision_matmul batch_invariant_mode "
        "deterministic_mode moe_router_dtype dsa_indexer_k_norm_fp32"
    ),
    Why(
        "weights in fp8 or fp4 inside Megatron", Use.FORM
    ): "fp8_param fp8_param_gather fp4_param fp4_param_gather",
    LOW: (
        "fp4 fp4_recipe fp4_quantizer_factory fp8_recipe fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo "
        "fp8_wgrad fp8_output_proj fp8_quantizer_factory fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red "
        "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 quant_recipe use_kitchen "
        "use_kitchen_attention kitchen_attention_backend te_precision_config_file activation_func_fp8_input_store "
        "moe_dispatch_fwd_dtype moe_combine_bwd_dtype"
    ),
    Why(
        "Megatron bounds attention logits during training", Use.COMPUTES
    ): "qk_clip qk_clip_alpha qk_clip_threshold",
    Why("torch.autocast inside Megatron's layers", Use.COMPUTES): "enable_autocast autocast_dtype",
    # core/optimizer/__init__.py: get_mup_config_overrides
    Why(
        "Megatron divides learning rates and eps by the width, in addition to how it initialises and scales the model",
        Use.COMPUTES,
    ): "use_mup mup_base_hidden_size",
    Why("a setting of how Megatron initialises weights", Use.STARTS): (
        "use_cpu_initialization perform_initialization data_parallel_random_init init_method_xavier_uniform"
    ),
    Why(
        "a part of the model that only Megatron's config class or script defines",
        Use.COMPUTES,
        True,
    ): (
        "activation_func init_method output_layer_init_method embedding_init_method gated_linear_unit softmax_scale "
        "heterogeneous_block_specs moe_token_dropping moe_router_topk_limited_devices "
        "experimental_attention_variant_loss_scale_func spec hybrid_attention_ratio hybrid_layer_pattern "
        "hybrid_mlp_ratio hybrid_override_pattern"
    ),
    Why("a function that the training script passes", Use.COMPUTES): (
        "grad_scale_func moe_grad_scale_func mtp_grad_scale_func finalize_model_grads_func"
    ),
    Why("a file with Megatron's settings", Use.COMPUTES): "yaml_cfg",
    KERNEL: (
        "attention_backend transformer_impl cross_entropy_loss_fusion cross_entropy_fusion_impl masked_softmax_fusion "
        "bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion apply_rope_fusion use_flash_attn flash_attention_version "
        "bias_activation_fusion fused_single_qkv_rope memory_efficient_layer_norm persist_layer_norm no_persist_layer_norm "
        "fused_residual_rmsnorm use_te_activation_func use_transformer_engine_op_fuser use_fused_weighted_squared_relu "
        "use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert dsa_kernel_backend disable_jit_fuser "
        "moe_permute_fusion moe_router_fusion mla_down_proj_fusion moe_permute_fusion_into_hybridep moe_grouped_gemm "
        "moe_use_legacy_grouped_gemm pipeline_dtype symmetric_ar_type use_mamba_mem_eff_path disable_mamba_mem_eff_path "
        "mamba_training_ssm_states_dtype moe_use_grouped_tensor batch_invariant_backend gdp_cutedsl_kernel muon_use_syrk"
    ),
    Why("the order in which gradients are divided and summed", Use.FORM): (
        "ddp_average_in_collective gradient_reduce_div_fusion ddp_reduce_scatter_with_fp32_accumulation "
        "ddp_param_name_patterns_for_fp32_local_accumulation gtp_remat_reduce_scatter_with_fp32_accumulation "
        "gtp_remat_nccl_ub gtp_expert_remat_nccl_ub"
    ),
    Why("a setting of how Megatron's context parallelism exchanges keys and values", Use.PLACES): (
        "cp_comm_type hierarchical_context_parallel_sizes hybrid_context_parallel max_seqlen_per_dp_cp_rank"
    ),
    Why("the encoder's own layout", Use.PLACES): (
        "encoder_tensor_model_parallel_size encoder_pipeline_model_parallel_size pipeline_model_parallel_split_rank"
    ),
    OVERLAP: (
        "wgrad_deferral_limit defer_embedding_wgrad_compute delay_wgrad_compute overlap_moe_expert_parallel_comm "
        "overlap_p2p_comm_warmup_flush ep_overlap_early_attn_memory_release moe_shared_expert_overlap "
        "overlap_dispatch_backward_with_experts_wgrad async_tensor_model_parallel_allreduce overlap_cpu_optimizer_d2h_h2d "
        "overlap_param_gather_with_optimizer_step high_priority_a2a_comm_stream use_ring_exchange_p2p"
    ),
    SPEED: (
        "activation_offload_fraction clone_scatter_output_in_embedding cpu_offloading_num_layers cuda_graph_impl "
        "cpu_offloading_retain_pinned_cpu_buffers cuda_graph_warmup_steps delay_offload_until_cuda_graph "
        "delta_offload_bytes_across_pp_ranks enable_cuda_graph external_cuda_graph fine_grained_activation_offloading "
        "fine_grained_offloading_max_inflight_offloads init_model_with_meta_device min_offloaded_tensor_size "
        "mlp_chunks_for_prefill mlp_chunks_for_training moe_deepep_num_sms moe_enable_deepep moe_extended_tp "
        "moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute "
        "moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing "
        "moe_hybridep_pad_uneven_dispatch_inputs moe_layer_recompute moe_ncclep_static_shape moe_ncclep_zero_copy "
        "moe_pad_expert_input_to_capacity moe_pad_experts_for_cuda_graph_inference moe_paged_stash "
        "moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size "
        "moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_single_grouped_bias moe_single_grouped_weight "
        "moe_token_dispatcher_type offload_modules pipeline_model_parallel_comm_backend recompute_modules "
        "tp_comm_bootstrap_backend tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards "
        "pin_cpu_grads pin_cpu_params train_sync_interval manual_gc_eval empty_unused_memory_level optimizer_cuda_graph "
        "nccl_all_reduce_for_prefill cache_mla_latents te_rng_tracker inference_rng_tracker "
        "megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer "
        "fsdp_db_use_persist_buf_on_alloc_fail reuse_grad_buf_for_mxfp8_param_ag use_gloo_process_groups "
        "enable_gloo_process_groups enable_experimental "
        "check_for_nan_in_loss_and_grad check_for_large_grads gdp_num_chunk_states_to_recompute gtp_remat_opt_in_modules "
        "mhc_recompute_layer_num"
    ),
    Why("a setting of how checkpoints are written or loaded", Use.WAITS): (
        "async_save async_strategy async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm "
        "ckpt_assume_constant_structure ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo "
        "ckpt_fully_parallel_load_process_group ckpt_fully_parallel_save ckpt_fully_parallel_save_deprecated "
        "ckpt_fully_parallel_save_process_group dist_ckpt_workers use_persistent_ckpt_worker stream_ckpt_dequant "
        "distrib_optim_fully_reshardable_mem_efficient replication replication_factor replication_jump "
        "ckpt_drop_redundant_extra_state ckpt_fully_parallel_load_per_rank_objects ckpt_pg_tensors_cache_create "
        "ckpt_pg_tensors_cache_path"
    ),
    START: (
        "load pretrained_checkpoint finetune ckpt_step load_main_params_from_ckpt use_checkpoint_args "
        "use_mp_args_from_checkpoint_args override_ckpt_iteration bert_load ict_load load_model_opt_format "
        "use_tokenizer_model_from_checkpoint_args"
    ),
    Why("the order of samples", Use.SAMPLES): "dataloader_type",
    CACHE: "data_cache_path object_storage_cache_path s3_cache_path test_data_path valid_data_path per_dataset_sequences_path",
    LOADER: (
        "dataloader_defer_npy_index_mmap dataloader_fast_cache_load mmap_bin_files num_dataset_builder_threads "
        "create_attention_mask_in_dataloader"
    ),
    PLACE: (
        "train_data_path data_path data_args_path per_split_data_args_path split mock_data "
        "mid_level_dataset_surplus allow_ambiguous_pad_tokens"
    ),
    Why("the tokenizer sets the size of the vocabulary", Use.COMPUTES, True): (
        "make_vocab_size_divisible_by padded_vocab_size pad_vocab_size vocab_extra_ids"
    ),
    RL._replace(use=Use.PLACES): (
        "refit_method rl_offload_inference_model_weights_when_idle rl_offload_kv_cache_during_training "
        "rl_offload_optimizer_during_inference rl_kv_cache_management_mode rl_remove_kv_cache_during_training "
        "rl_persist_cuda_graphs rl_reset_cuda_graphs rl_training_cuda_graphs rl_inference_model_unified_memory_level "
        "rl_max_inflight_requests rl_num_parallel_generations rl_parallel_generation_tasks"
    ),
    RL._replace(use=Use.FORM): (
        "rl_inference_tensor_model_parallel_size rl_inference_pipeline_model_parallel_size "
        "rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size"
    ),
    RL._replace(use=Use.RECORDS): (
        "rl_profile rl_profile_dir rl_calculate_intra_group_similarity rl_verify_model_weights_swap rl_durable_rollout_bank "
        "rl_rollout_bank_dir rl_rollout_bank_max_bytes"
    ),
    DISTILS._replace(use=Use.PLACES): (
        "logits_load_decode_threads logits_load_msc_prefetch_depth logits_load_prefetch_factor"
    ),
    Why("Megatron stores logits for a later run", Use.RECORDS): (
        "logits_save_dir logits_save_dtype logits_save_top_k logits_save_top_p logits_save_top_p_min_k"
    ),
    Why("the precision of the products in Muon's own iteration", Use.FORM): "muon_fp32_matmul_prec",
    NEVER: "distributed_timeout_seconds_after_init",
    Why("a record that Megatron keeps of its messages", Use.RECORDS): (
        "flight_recorder_dump_on_timeout flight_recorder_dump_path flight_recorder_extra_dump_on_exec "
        "flight_recorder_include_only_active flight_recorder_include_stack_trace"
    ),
    Why("Megatron runs without sending anything", Use.COMPUTES): "fake_process_group",
    Why("how the processes are started", Use.UNREAD): "local_rank lazy_mpu_init",
    Why("the parts of a step that run as a CUDA graph", Use.PLACES): (
        "cuda_graph_modules cuda_graph_scope cuda_graph_scope_deprecated"
    ),
    Why("a comparison that Megatron's training loop makes now and then", Use.WAITS): (
        "check_weight_hash_across_dp_replicas_interval gpu_sniff_test_interval rerun_mode"
    ),
    Why("a log that costs time or memory", Use.WAITS): (
        "timing_log_level timing_log_option barrier_with_L1_time log_max_attention_logit log_params_norm log_num_zeros_in_grad "
        "profile use_pytorch_profiler record_memory_history"
    ),
    Why("an older name of another argument", Use.UNREAD): (
        "deprecated_use_mcore_models use_legacy_models batch_size checkpoint_activations warmup model_parallel_size"
    ),
    LOGS: (
        "config_logger_dir moe_per_layer_logging moe_enable_routing_replay timers hetereogenous_dist_checkpoint"
    ),
    Why(
        "used for inference only", Use.UNREAD
    ): "flash_decode use_inference_optimized_layers onnx_safe",
    Why("the kind of scaling of rotary positions", Use.COMPUTES, True): "rope_type",
    Why("samples per evaluation", Use.RECORDS): "eval_global_batch_size eval_micro_batch_size",
    Why("Megatron can freeze all layers", Use.COMPUTES): "freeze_all_layers",
    Why(
        "the format in which attention softmax or cross entropy is computed", Use.FORM
    ): "fp16_lm_cross_entropy attention_softmax_in_fp32",
}
"""A table from reasons to the arguments that they apply to. These arguments do not have the reason
of their group.
"""

PREFIXES: tuple[tuple[str, Why], ...] = (
    ("tp_comm_", Why("an overlap inside Megatron's tensor parallelism", Use.PLACES)),
    ("cpu_offloading", Why("offload inside Megatron's layers", Use.PLACES)),
    ("recompute_", Why("the choice of modules that Megatron recomputes", Use.PLACES)),
    ("inference", GROUPS["inference"]),
    ("muon_", OPTIMIZER),
    ("batch_p2p_", Why("a setting of how Megatron sends pipeline messages", Use.PLACES)),
    ("moe_routing_trace_", LOGS),
    ("fim_", DATA),
)

SWITCHES: tuple[tuple[Switch, str], ...] = (
    (
        Switch("fp8"),
        "fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_output_proj fp8_quantizer_factory "
        "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 tp_only_amax_red",
    ),
    (Switch("fp4"), "fp4_"),
    (Switch("use_kitchen"), "use_kitchen_attention kitchen_"),
    (Switch("num_experts"), "moe_"),
    (Switch("mtp_num_layers"), "mtp_"),
    (Switch("use_mup"), "mup_"),
    (Switch("qk_clip"), "qk_clip_"),
    (Switch("qk_layernorm"), "apply_wd_to_qk_layernorm"),
    (Switch("enable_mhc_connections"), "mhc_"),
    (Switch("experimental_attention_variant"), "dsa_ linear_"),
    (Switch("position_embedding_type", ("mrope",)), "mrope_section"),
    (Switch("optimizer", ("muon", "dist_muon", "adaptive_muon")), "muon_"),
    (Switch("cpu_offloading"), "cpu_offloading_"),
    (Switch("use_megatron_fsdp"), "megatron_fsdp_"),
    (Switch("fim_data"), "fim_"),
    (Switch("perform_rl_step"), "rl_ grpo_ langrl_ refit_method"),
    (Switch("logits_load_dir"), "logits_load_"),
    (Switch("error_injection_rate"), "error_injection_type"),
)
"""Arguments, or beginnings of their names, that take no effect unless an argument is set."""
_STARTS = tuple((switch, tuple(starts.split())) for switch, starts in SWITCHES)


@cache
def _switch(dest: str) -> Switch | None:
    """Return the switch without which the argument `dest` takes no effect."""
    return next(
        (
            switch
            for switch, starts in _STARTS
            if dest.startswith(starts) and dest not in switch.paths.split()
        ),
        None,
    )


_SINGLE: Mapping[str, Why] = {dest: why for why, dests in SINGLE.items() for dest in dests.split()}


def why(dest: str) -> Why:
    """Return the reason why no plan field stands for an argument. The reason is looked up by the
    argument, then by its prefix, and finally by its group.
    """
    group = options.groups().get(dest, "")
    reason = _SINGLE.get(dest) or next(
        (why for prefix, why in PREFIXES if dest.startswith(prefix)),
        GROUPS.get(group, GROUPS["config class"]),
    )
    return reason._replace(under=_switch(dest))


def effect(dest: str) -> Effect:
    """Return the effect of losing the argument `dest`, which no plan field stands for."""
    reason = why(dest).effect
    assert isinstance(reason, Effect)  # no reason of Megatron's depends on the values
    return reason
