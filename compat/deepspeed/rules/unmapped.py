"""DeepSpeed's keys that no plan field stands for, each with what DeepSpeed's code does with it. The
effect of losing a key follows from that (`bridge.stack.effects.Use`).
"""

from __future__ import annotations

from collections.abc import Mapping

from bridge.stack.rules import Effect, Group, Switch, Use, Why, longest

Row = tuple[Use, str, str, str]
"""What DeepSpeed does with some keys, the reason why a plan has no field for them, the place in
DeepSpeed's source that reads them, and the keys; a section stands for all keys in it.
"""


def _paths_in(section: str, names: str) -> str:
    """Return the paths of keys in a section, separated by spaces."""
    return " ".join(f"{section}.{name}" for name in names.split())


ZERO, PARAMS, EXPERTS = "zero_optimization", "optimizer.params", "expert_parallel"
READ: tuple[Row, ...] = (
    # Optimizers and schedules
    (
        Use.COMPUTES,
        "a setting of DeepSpeed's own optimizer",
        "runtime/engine.py: _configure_basic_optimizer",
        "optimizer",
    ),
    (
        Use.FORM,
        "the kernels of the optimizer's step",
        "torch/optim/adamw.py: adamw, _multi_tensor_adamw, _fused_adamw",
        _paths_in(PARAMS, "foreach fused capturable"),
    ),
    (
        Use.UNREAD,
        "torch records the step for a second derivative, which no training step takes",
        "torch/optim/optimizer.py: _use_grad_for_differentiable",
        _paths_in(PARAMS, "differentiable"),
    ),
    (
        Use.FORM,
        "the format of the moments of DeepSpeed's CPU optimizers",
        "ops/adam/cpu_adam.py: DeepSpeedCPUAdam.step",
        _paths_in(PARAMS, "fp32_optimizer_states"),
    ),
    (
        Use.PLACES,
        "the memory of gradients is freed or set to zero",
        "ops/adam/fused_adam.py: zero_grad",
        _paths_in(PARAMS, "set_grad_none"),
    ),
    (
        Use.PLACES,
        "the library of the optimizer's own messages",
        "runtime/fp16/onebit/adam.py: comm_backend_handle",
        _paths_in(PARAMS, "cuda_aware comm_backend_name"),
    ),
    (
        Use.FORM,
        "the form of the fp16 optimizer that wraps Adam",
        "runtime/engine.py: _configure_fp16_optimizer, fused_adam_legacy",
        "optimizer.legacy_fusion",
    ),
    (
        Use.COMPUTES,
        "a setting of DeepSpeed's own scheduler",
        "runtime/lr_schedules.py",
        "scheduler",
    ),
    # Hugging Face's Trainer
    (
        Use.COMPUTES,
        "the Trainer computes by it, and only the Trainer",
        "transformers: trainer.py, integrations/neftune.py, trainer_optimizer.py",
        _paths_in(
            "code.trainer",
            "label_smoothing_factor neftune_noise_alpha optim_args optim_target_modules"
            " average_tokens_across_devices",
        ),
    ),
    (
        Use.SAMPLES,
        "the Trainer orders samples by it",
        "transformers: trainer.py: _get_train_sampler",
        _paths_in("code.trainer", "data_seed group_by_length train_sampling_strategy"),
    ),
    (
        Use.PLACES,
        "the model of the script recomputes activations",
        "transformers: modeling_utils.py: gradient_checkpointing_enable",
        _paths_in("code.trainer", "gradient_checkpointing"),
    ),
    (
        Use.FORM,
        "the kernels of the script's model",
        "transformers: training_args.py, trainer.py",
        _paths_in("code.trainer", "torch_compile tf32 use_liger_kernel"),
    ),
    # Formats
    (
        Use.COMPUTES,
        "a setting inside DeepSpeed's fp16 optimizer",
        "runtime/fp16/loss_scaler.py",
        "fp16",
    ),
    (
        Use.FORM,
        "DeepSpeed casts the inputs of the model",
        "runtime/engine.py: forward, fp16_auto_cast",
        "fp16.auto_cast",
    ),
    (Use.FORM, "a setting inside DeepSpeed's bf16 optimizer", "runtime/bf16_optimizer.py", "bf16"),
    (
        Use.CHECKS,
        "a step with gradients that are not finite is left out",
        "runtime/zero/stage_1_and_2.py: step, check_grad_overflow",
        "bf16.check_grad_overflow",
    ),
    (
        Use.COMPUTES,
        "torch.autocast inside DeepSpeed's engine",
        "runtime/torch_autocast.py: init_autocast_params",
        "torch_autocast",
    ),
    (
        Use.FORM,
        "formats inside DeepSpeed's engine",
        "runtime/engine.py: get_data_types",
        "data_types",
    ),
    (
        Use.FORM,
        "a number format inside DeepSpeed's engine",
        "runtime/engine.py: seq_parallel_communication_data_type",
        "seq_parallel_communication_data_type seq_parallel_comm_data_type",
    ),
    (
        Use.COMPUTES,
        "Apex mixed precision",
        "runtime/engine.py: _configure_distributed_model, amp",
        "amp",
    ),
    (
        Use.FORM,
        "gradients are summed in fp32, in releases that read the key",
        "runtime/engine.py: allreduce_bucket",
        "fp32_allreduce",
    ),
    (
        Use.UNREAD,
        "DeepSpeed's inference quantises weights",
        "inference/quantization",
        "weight_quantization",
    ),
    (
        Use.COMPUTES,
        "DeepSpeed's quantised weights",
        "runtime/zero/partition_parameters.py: Init, quantized_initialization",
        "weight_quantization.quantized_initialization",
    ),
    (
        Use.COMPUTES,
        "a setting of quantised training, which DeepSpeed removed",
        "runtime/config.py: get_quantize_enabled",
        "quantize_training",
    ),
    (
        Use.COMPUTES,
        "a setting of DeepSpeed's compression, which 0.19.7 removed",
        "compression/compress.py: init_compression",
        "compression_training",
    ),
    (
        Use.COMPUTES,
        "a setting of sparse attention, which DeepSpeed removed",
        "runtime/config.py: get_sparse_attention",
        "sparse_attention",
    ),
    # Gradients and batches
    (
        Use.COMPUTES,
        "DeepSpeed sums gradients instead of averaging them",
        "runtime/engine.py: gradient_allreduce_op",
        "gradient_allreduce_op",
    ),
    (
        Use.COMPUTES,
        "the setting decides whether DeepSpeed's engine or the script counts micro batches",
        "runtime/engine.py: is_gradient_accumulation_boundary",
        "managed_gradient_accumulation",
    ),
    (
        Use.PLACES,
        "only DeepSpeed has sparse embedding gradients",
        "runtime/engine.py: sparse_allreduce_bucket",
        "sparse_gradients",
    ),
    (
        Use.SAMPLES,
        "the setting decides whether the last, incomplete batch is dropped",
        "runtime/dataloader.py: DeepSpeedDataLoader",
        "dataloader_drop_last",
    ),
    (
        Use.COMPUTES,
        "DeepSpeed's elastic batch sizes",
        "elasticity/elasticity.py: compute_elastic_config",
        "elasticity",
    ),
    (
        Use.SAMPLES,
        "a setting of DeepSpeed's data sampling or layer dropping",
        "runtime/data_pipeline/data_sampling/data_sampler.py; runtime/data_pipeline/data_routing",
        "data_efficiency",
    ),
    (
        Use.PLACES,
        "how data is loaded",
        "runtime/dataloader.py: DeepSpeedDataLoader",
        _paths_in("data_efficiency.data_sampling", "num_workers pin_memory"),
    ),
    (
        Use.SAMPLES,
        "DeepSpeed's curriculum",
        "runtime/data_pipeline/curriculum_scheduler.py",
        "curriculum_learning",
    ),
    (
        Use.COMPUTES,
        "DeepSpeed's layer dropping",
        "runtime/progressive_layer_drop.py",
        "progressive_layer_drop",
    ),
    # ZeRO
    (
        Use.PLACES,
        "a setting inside DeepSpeed's ZeRO",
        "runtime/zero/config.py: DeepSpeedZeroConfig",
        ZERO,
    ),
    (
        Use.PLACES,
        "the setting decides which rank reduces which gradient",
        "runtime/zero/stage_1_and_2.py: _round_robin_reorder",
        f"{ZERO}.round_robin_gradients",
    ),
    (
        Use.COMPUTES,
        "DeepSpeed gathers weights in fewer bits",
        "runtime/zero/partition_parameters.py: all_gather_coalesced, quantize",
        f"{ZERO}.zero_quantized_weights",
    ),
    (
        Use.COMPUTES,
        "DeepSpeed gathers frozen weights in fewer bits",
        "runtime/zero/partition_parameters.py: quantized_nontrainable_weights",
        f"{ZERO}.zero_quantized_nontrainable_weights",
    ),
    (
        Use.COMPUTES,
        "DeepSpeed reduces gradients in fewer bits",
        "runtime/zero/stage3.py: __avg_scatter_grads; runtime/comm/coalesced_collectives.py: all_to_all_loco_quant_reduce",
        _paths_in(ZERO, "zero_quantized_gradients zeropp_loco_param"),
    ),
    (
        Use.COMPUTES,
        "DeepSpeed applies the most important gradients first, and all others later",
        "runtime/zenflow/zenflow_stage_1_and_2.py",
        f"{ZERO}.zenflow",
    ),
    (
        Use.PLACES,
        "ZenFlow's state on the host and its cores",
        "runtime/zenflow/zenflow_utils.py: start_optimizer_process",
        _paths_in(f"{ZERO}.zenflow", "offload pt_reserved_cores_perc"),
    ),
    (
        Use.CHECKS,
        "an internal check of DeepSpeed's engine",
        "runtime/zero/stage_1_and_2.py: _update_model_fp16_weights; runtime/zero/stage3.py: enable_sanity_checks",
        _paths_in(ZERO, "ignore_unused_parameters enable_sanity_checks"),
    ),
    (
        Use.FORM,
        "which copy of the weights a resumed run reads",
        "runtime/zero/stage_1_and_2.py: _load_legacy_checkpoint, load_from_fp32_weights",
        f"{ZERO}.load_from_fp32_weights",
    ),
    (
        Use.RECORDS,
        "a setting of the checkpoints that DeepSpeed's engine writes",
        "runtime/zero/stage_1_and_2.py: state_dict; runtime/engine.py: save_16bit_model",
        _paths_in(
            ZERO,
            "elastic_checkpoint stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
        ),
    ),
    (
        Use.UNREAD,
        "nothing in DeepSpeed reads this key",
        "runtime/zero/config.py: allgather_partitions, legacy_stage1; cpu_offload_use_pin_memory has no reader",
        _paths_in(ZERO, "allgather_partitions legacy_stage1 cpu_offload_use_pin_memory"),
    ),
    # Splits of the model
    (
        Use.FORM,
        "a setting of AutoTP, which replaces layers of the model",
        "module_inject/auto_tp.py",
        "tensor_parallel",
    ),
    (
        Use.PLACES,
        "AutoTP leaves the whole module on the host",
        "module_inject/replace_module.py: keep_module_on_host",
        "tensor_parallel.keep_module_on_host",
    ),
    (
        Use.UNREAD,
        "kernels of DeepSpeed's inference",
        "inference/engine.py: _apply_injection_policy",
        "tensor_parallel.kernel_inject",
    ),
    (
        Use.FORM,
        "how AutoEP multiplies, weighs and sums the rows of the experts",
        "module_inject/auto_ep_layer.py",
        _paths_in(
            EXPERTS,
            "expert_tensor_parallel_size use_grouped_mm disable_triton_grouped_mm combine_impl row_weighting_impl gate_up_impl",
        ),
    ),
    (
        Use.PLACES,
        "how AutoEP exchanges tokens",
        "moe/ep_comm.py; module_inject/auto_ep_layer.py: async_split_plan",
        _paths_in(
            EXPERTS,
            "async_split_plan comm_backend comm_num_sm comm_qp_margin comm_max_tokens_per_rank",
        ),
    ),
    (
        Use.CHECKS,
        "AutoEP checks that tensor ranks route tokens alike",
        "module_inject/auto_ep_layer.py: validate_folding_routing",
        f"{EXPERTS}.validate_folding_routing",
    ),
    (
        Use.COMPUTES,
        "the setting decides how AutoEP routes tokens to experts",
        "moe/ep_router.py; module_inject/auto_ep_config.py",
        _paths_in(
            EXPERTS,
            "top_k score_func score_apply route_norm route_scale routed_scaling_factor num_expert_groups num_limited_groups"
            " load_balance_coeff",
        ),
    ),
    # A key of AutoEP without a row here may decide what the layers that it puts in compute.
    (
        Use.COMPUTES,
        "the setting decides which layers AutoEP replaces, and with what",
        "module_inject/auto_ep_config.py: parse_autoep_config; module_inject/auto_ep_layer.py",
        EXPERTS,
    ),
    (
        Use.PLACES,
        "the order of data ranks and expert ranks",
        "utils/groups.py: _create_expert_and_data_parallel",
        "use_data_before_expert_parallelism",
    ),
    (
        Use.PLACES,
        "a setting inside DeepSpeed's pipeline engine",
        "runtime/pipe/engine.py: is_pipe_partitioned, is_grad_partitioned",
        "pipeline",
    ),
    (
        Use.UNREAD,
        "nothing in DeepSpeed reads this key; the script passes the value to PipelineModule",
        "runtime/config.py: get_pipeline_config has the only mention",
        _paths_in("pipeline", "stages partition"),
    ),
    (
        Use.COMPUTES,
        "DeepSpeed seeds the layers one by one",
        "runtime/pipe/module.py: _build, seed_layers",
        "pipeline.seed_layers",
    ),
    (
        Use.PLACES,
        "a setting of DeepSpeed's checkpointing functions",
        "runtime/activation_checkpointing/checkpointing.py: configure",
        "activation_checkpointing",
    ),
    # Compilation, offload, loops of the host
    (
        Use.PLACES,
        "DeepCompile is DeepSpeed's own",
        "compile/config.py; compile/init_z3.py",
        "compile",
    ),
    (
        Use.FORM,
        "DeepCompile compiles the model with torch.compile",
        "runtime/engine.py: compile; compile/backend.py",
        _paths_in("compile", "deepcompile passes"),
    ),
    (Use.RECORDS, "logs of DeepCompile", "compile/config.py: debug_log", "compile.debug_log"),
    (Use.PLACES, "I/O of DeepSpeed's offload", "runtime/swap_tensor/aio_config.py", "aio"),
    (Use.PLACES, "DeepSpeed's engine for generation", "runtime/hybrid_engine.py", "hybrid_engine"),
    (
        Use.PLACES,
        "DeepSpeed runs the step as a CUDA graph",
        "runtime/engine.py: graph_harvesting",
        "graph_harvesting",
    ),
    (
        Use.WAITS,
        "when Python collects garbage",
        "runtime/engine.py: gc.disable",
        "disable_python_gc",
    ),
    # Reports and files
    (
        Use.WAITS,
        "DeepSpeed logs memory, which takes time",
        "runtime/engine.py: see_memory_usage",
        "memory_breakdown",
    ),
    (
        Use.RECORDS,
        "logs of DeepSpeed's engine",
        "monitor/monitor.py",
        "tensorboard wandb csv_monitor comet",
    ),
    (
        Use.RECORDS,
        "logs of DeepSpeed's engine",
        "utils/comms_logging.py: append; utils/logging.py",
        "comms_logger dump_state log_level",
    ),
    (
        Use.WAITS,
        "DeepSpeed measures its messages, and waits for each of them",
        "comm/comm.py: timed_op",
        _paths_in("comms_logger", "enabled prof_all prof_ops"),
    ),
    (
        Use.RECORDS,
        "logs of DeepSpeed's engine",
        "runtime/zero/partitioned_param_coordinator.py",
        f"{ZERO}.log_trace_cache_warnings",
    ),
    (
        Use.RECORDS,
        "profiling by DeepSpeed's engine",
        "profiling/flops_profiler/profiler.py: print_model_profile",
        "flops_profiler",
    ),
    (
        Use.WAITS,
        "DeepSpeed measures a step with hooks on every module",
        "profiling/flops_profiler/profiler.py: start_profile",
        _paths_in("flops_profiler", "enabled profile_step"),
    ),
    (Use.WAITS, "DeepSpeed measures each step", "utils/timer.py: ThroughputTimer", "timers"),
    (
        Use.RECORDS,
        "a setting of the checkpoints that DeepSpeed's engine writes",
        "runtime/engine.py: save_checkpoint; runtime/checkpoint_engine",
        "checkpoint datastates_ckpt nebula",
    ),
    (
        Use.WAITS,
        "how DeepSpeed's engine writes its checkpoints",
        "runtime/checkpoint_engine/fast_checkpoint_engine.py; runtime/engine.py: _save_zero_checkpoint",
        _paths_in("checkpoint", "writer parallel_write use_node_local_storage"),
    ),
    (
        Use.RECORDS,
        "DeepSpeed's autotuner",
        "autotuning/autotuner.py, started by the launcher",
        "autotuning",
    ),
    (
        Use.ENDS,
        "a run that DeepSpeed's autotuner measures ends after some steps",
        "runtime/engine.py: _autotuning_exit; backward, autotuning_profile_model_info",
        _paths_in("autotuning", "enabled end_profile_step model_info"),
    ),
    (
        Use.CHECKS,
        "DeepSpeed refuses or accepts the script's optimizer",
        "runtime/engine.py: _configure_optimizer, zero_force_ds_cpu_optimizer",
        "zero_force_ds_cpu_optimizer",
    ),
    (
        Use.CHECKS,
        "DeepSpeed warns of a size that is slow",
        "runtime/config.py: _do_warning_check",
        "vocabulary_size",
    ),
    (Use.UNREAD, "removed from DeepSpeed", "runtime/config.py", "eigenvalue"),
    (
        Use.UNREAD,
        "nothing in DeepSpeed's engine reads this key",
        "runtime/config.py: disable_allgather; data_parallel_size has no reader",
        "disable_allgather data_parallel_size",
    ),
    (
        Use.UNREAD,
        "an older name; DeepSpeed reads the value under the newer one",
        "runtime/precision_config.py: get_bfloat16_config",
        "bfloat16",
    ),
    # The script
    (
        Use.RECORDS,
        "a setting of the training script",
        "the key `code` is stagebridge's own",
        "code",
    ),
    (
        Use.COMPUTES,
        "only the script determines the number of backward calls before a step; multiply the number of micro batches"
        " in a step by this number",
        "the key `code` is stagebridge's own",
        "code.manual_accumulation",
    ),
)
"""Keys by what reads them. If several rows match a key, the longest one applies."""
READERS: Mapping[str, Row] = {path: row for row in READ for path in row[3].split()}

CURRICULUM, SKIPPING = (
    "data_efficiency.data_sampling.curriculum_learning",
    "data_efficiency.data_routing.random_ltd",
)
"""The two sections through which `data_efficiency` acts (runtime/engine.py)."""
ENABLED = f"fp16 bf16 torch_autocast flops_profiler comms_logger hybrid_engine {EXPERTS}"
SHARDED = (1, 2, 3)
SWITCHES: Mapping[str, Switch] = {
    **{section: Switch(f"{section}.enabled") for section in ENABLED.split()},
    ZERO: Switch(f"{ZERO}.stage", SHARDED),
    **dict.fromkeys(
        _paths_in(
            ZERO,
            "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold"
            " stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold"
            " stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential sub_group_size offload_param"
            " zero_quantized_weights zero_quantized_nontrainable_weights zero_hpz_partition_size memory_efficient_linear"
            " leaf_module mics_hierarchical_params_gather",
        ).split(),
        Switch(f"{ZERO}.stage", (3,)),
    ),
    "compile": Switch("compile.deepcompile"),
    "autotuning": Switch("autotuning.enabled"),
    **dict.fromkeys(
        ("data_efficiency.enabled", "data_efficiency.seed"), Switch(f"{CURRICULUM} {SKIPPING}")
    ),
    **dict.fromkeys(
        ("data_efficiency.data_sampling.enabled", "data_efficiency.data_sampling.num_epochs"),
        Switch(CURRICULUM),
    ),
    "data_efficiency.data_routing": Switch(SKIPPING),
    # An optimizer or a scheduler of another type stops at an argument that it does not have.
    "optimizer": Switch("optimizer.type"),
    "scheduler": Switch("scheduler.type"),
    # lr_schedules.py: OneCycle skips the decay after the cycle if no steps are between two decays.
    **dict.fromkeys(
        ("scheduler.params.decay_lr_rate", "scheduler.params.decay_mom_rate"),
        Switch("scheduler.params.decay_step_size"),
    ),
}
"""For each section, the key without which its other keys take no effect; the longest entry applies.
"""
SELF_SWITCHED = (
    "amp",
    "elasticity",
    "curriculum_learning",
    "progressive_layer_drop",
    "compression_training",
    "quantize_training",
    "eigenvalue",
    CURRICULUM,
    "data_efficiency.data_sampling.dynamic_batching",
    SKIPPING,
)
"""Keys whose value is a section of its own, with its switch inside."""
AVERAGED = ("mean", None)


def why(path: str) -> Why:
    """Return the reason why no plan field stands for a key, with the key's use. A key that no row
    names may do anything.
    """
    use, note, _, _ = longest(path, READERS, UNKNOWN)
    switch = longest(path, SWITCHES, None)
    under = None if switch is None or path in switch.paths.split() else switch
    if path in SELF_SWITCHED:
        return Why(note, lambda values: _effect_if_on(values, path, use.effect), under=under)
    if path == "gradient_allreduce_op":
        return Why(note, lambda values: Effect.NONE if values.get(path) in AVERAGED else use.effect)
    return Why(note, use, under=under)


UNKNOWN: Row = (Use.COMPUTES, "stagebridge does not know what DeepSpeed does with this key", "", "")


def _effect_if_on(values: Group, path: str, effect: Effect) -> Effect:
    section = values.get(path)
    off = isinstance(section, Mapping) and not section.get("enabled")
    return Effect.NONE if off or section is None else effect
