"""Settings that Megatron's parser accepts, but that a run then ignores or stops at; one row for
each.
"""

from __future__ import annotations

from collections.abc import Mapping

from bridge.stack.check_tables import Checks
from bridge.stack.checks import Check, Condition, Seen
from bridge.stack.rules import Effect
from compat.megatron.arguments.namespace import Namespace
from compat.megatron.arguments.sizes import decoder_size, encoder_size, expert_size
from compat.megatron.habits import MASKING, RESET, uses_mask
from compat.megatron.patterns import values_as_list
from compat.megatron.releases import MAIN, RELEASES


def _ignore_without(
    path: str,
    without: Condition,
    message: str,
    place: str,
    effect: Effect = Effect.NONE,
    name: str = "",
) -> Check:
    """Return a check for an argument that takes no effect if `without` is true. `effect` is the
    effect on the run.
    """
    return Check(
        path,
        lambda view: path in view.given and without(view),
        message,
        effect,
        place,
        name=name,
        surprising=True,
    )


def _no_fsdp(args: Seen) -> bool:
    return not (args["use_megatron_fsdp"] or args["use_custom_fsdp"])


CHANGING = ("rampup_batch_size", "decrease_batch_size_if_needed", "step_batch_size_schedule")
"""Arguments with which the batch size changes during the run. Other checks of Megatron apply to a
changing batch size.
"""


def _rest(args: Seen) -> int:
    """Return the remainder of the global batch size divided by the number of samples in one
    microbatch on all data ranks. The remainder is 0 if the batch size changes during the run.
    """
    whole, micro, ranks = (
        args[name] for name in ("global_batch_size", "micro_batch_size", "data_parallel_size")
    )
    if any(args[name] for name in CHANGING) or not (whole and micro and ranks):
        return 0
    return int(whole % (micro * ranks))


def _sizes(args: Seen) -> tuple[int, ...]:
    """Return the sizes that the global batch has during the run: one, or each step of a ramp."""
    whole = args["global_batch_size"]
    if not whole or args["step_batch_size_schedule"]:
        return ()
    ramp = _ramp(args)
    if ramp is None or not _ramps(args):
        return (int(whole),)
    start, step, _ = ramp
    return (*range(start, whole, step), int(whole)) if 0 < start < whole and step > 0 else ()


def _ramps(args: Seen) -> bool:
    return _ramp(args) is not None and not args.context.since(NO_RAMP)


def _ramp(args: Seen) -> tuple[int, int, int] | None:
    """Return start, step and samples of a batch ramp; None if it is not three whole numbers."""
    try:
        start, step, samples = map(int, args["rampup_batch_size"] or ())
    except ValueError:
        return None
    return start, step, samples


def _microbatches(args: Seen) -> tuple[int, ...]:
    """Return the numbers of microbatches that the run has, if its batches divide into microbatches."""
    share = (args["micro_batch_size"] or 0) * (args["data_parallel_size"] or 0)
    sizes = _sizes(args) if share else ()
    return tuple(size // share for size in sizes if size % share == 0 and size >= share)


def _uneven_ramp(args: Seen) -> bool:
    share = (args["micro_batch_size"] or 0) * (args["data_parallel_size"] or 0)
    uneven = bool(share) and any(size % share for size in _sizes(args))
    return _ramps(args) and not args["decrease_batch_size_if_needed"] and uneven


def _broken_ramp(args: Seen) -> bool:
    """Return whether a batch ramp is not three whole numbers, or has no steps from its start to the
    global batch size.
    """
    if not args["rampup_batch_size"] or not args["global_batch_size"]:
        return False
    ramp = _ramp(args)
    if ramp is None:
        return True
    start, step, samples = ramp
    way = args["global_batch_size"] - start
    return start <= 0 or step <= 0 or samples < 0 or way <= 0 or way % step != 0


def _groups(args: Seen) -> tuple[int, int] | None:
    """Return the size of a group of microbatches under interleaving, and of the pipeline; None
    without interleaving.
    """
    stages = args["pipeline_model_parallel_size"] or 1
    if stages < 2 or args["virtual_pipeline_model_parallel_size"] is None:
        return None
    return args["microbatch_group_size_per_vp_stage"] or stages, stages


def _short_of_a_group(args: Seen) -> bool:
    sizes = _groups(args)
    return sizes is not None and any(count < sizes[0] for count in _microbatches(args))


def _leaves_a_rest(args: Seen) -> bool:
    sizes = _groups(args)
    # Too few for one group have a row of their own.
    least = sizes[0] if sizes and args.context.since("0.10.0") else 0
    return sizes is not None and any(
        count >= least and 0 < count % sizes[0] < sizes[1] for count in _microbatches(args)
    )


def _ranks_of_experts(args: Seen) -> int:
    """Return the number of ranks over which the experts' own layers are split by tensor."""
    return int(args["expert_tensor_parallel_size"] or args["tensor_model_parallel_size"] or 1)


def _split(path: str, message: str, place: str, name: str, experts: bool = False) -> Check:
    """Return a check that holds if the size at `path` cannot be split over the tensor ranks."""

    def uneven(args: Seen) -> bool:
        ranks = _ranks_of_experts(args) if experts else args["tensor_model_parallel_size"] or 1
        return args[path] % ranks != 0 and (bool(args["num_experts"]) or not experts)

    text = f"found {{{path}}}, which the tensor ranks cannot split: {message}"
    return Check(path, uneven, text, Effect.STOPS, place, needs=(path,), name=name)


def _has_uneven_stages(args: Seen) -> bool:
    """Return whether a rank cannot cut its layers into stages of one size, or the ranks cannot share the layers."""
    ranks, chunks = args["pipeline_model_parallel_size"] or 1, args[VIRTUAL] or 1
    if ranks == 1 or args["pipeline_model_parallel_layout"] or args["hybrid_layer_pattern"]:
        return False
    ends = [args[f"decoder_{end}_pipeline_num_layers"] for end in ("first", "last")]
    sizes = [layers for layers in ends if layers is not None]
    kinds = ("embedding", "loss")
    extra = sum(bool(args[f"account_for_{kind}_in_pipeline_split"]) for kind in kinds)
    layers = args["num_layers"] - sum(sizes) + (0 if sizes else extra)
    share, rest = divmod(layers, ranks - len(sizes)) if ranks > len(sizes) else (0, 0)
    return bool(rest or any(size % chunks for size in (share, *sizes)))


VIRTUAL = "virtual_pipeline_model_parallel_size"
NO_RAMP = "0.18.0"
"""The release that dropped batch ramps; it still has the flag."""
BUILDS = "training stops when it builds the model; use a multiple of"
TENSOR, EXPERT = (
    "tensor_model_parallel_size ({tensor_model_parallel_size})",
    "the experts' tensor parallel size",
)
RAMP = "core/num_microbatches_calculator.py: RampupBatchsizeNumMicroBatchesCalculator"
INTERLEAVED = "core/pipeline_parallel/schedules.py: forward_backward_pipelining_with_interleaving"
CORE = (
    Check(
        "num_layers",
        _has_uneven_stages,
        "found {num_layers}, which the {pipeline_model_parallel_size} pipeline ranks cannot share evenly in stages:"
        " training stops when it builds the model; change one of them, or add"
        " --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers",
        Effect.STOPS,
        "core/transformer/transformer_block.py: get_num_layers_to_build",
        needs=("num_layers",),
        since="0.11.0",
        name="layers-no-multiple-of-the-stages",
    ),
    _split(
        "padded_vocab_size",
        f"{BUILDS} {TENSOR}",
        "core/tensor_parallel/utils.py: VocabUtility.vocab_range_from_global_vocab_size",
        "vocabulary-no-multiple-of-the-tensor-ranks",
    ),
    _split(
        "ffn_hidden_size",
        f"{BUILDS} {TENSOR}",
        "core/tensor_parallel/layers.py: ColumnParallelLinear.__init__",
        "mlp-no-multiple-of-the-tensor-ranks",
    ),
    _split(
        "moe_shared_expert_intermediate_size",
        f"{BUILDS} {TENSOR}",
        "core/tensor_parallel/layers.py: ColumnParallelLinear.__init__",
        "shared-expert-no-multiple-of-the-tensor-ranks",
    ),
    _split(
        "moe_ffn_hidden_size",
        f"{BUILDS} {EXPERT}",
        "core/tensor_parallel/layers.py: ColumnParallelLinear.__init__",
        "expert-no-multiple-of-the-tensor-ranks",
        experts=True,
    ),
    Check(
        "seq_length",
        lambda args: (
            bool(args["sequence_parallel"])
            and args["seq_length"]
            // (args["context_parallel_size"] or 1)
            % (args["tensor_model_parallel_size"] or 1)
            != 0
        ),
        "found {seq_length} with sequence_parallel: the first step stops, because the tensor ranks"
        " cannot split a sequence; use a multiple of tensor_model_parallel_size"
        " ({tensor_model_parallel_size}) x context_parallel_size ({context_parallel_size})",
        Effect.STOPS,
        "core/tensor_parallel/mappings.py: _split_along_first_dim, _reduce_scatter_along_first_dim",
        needs=("seq_length",),
        name="sequence-no-multiple-of-the-tensor-ranks",
    ),
    Check(
        "num_experts",
        lambda args: (
            bool(args["num_experts"])
            and (args["tensor_model_parallel_size"] or 1) > 1
            and not args["sequence_parallel"]
        ),
        "found with tensor_model_parallel_size {tensor_model_parallel_size} and without"
        " sequence_parallel: the first step stops; add --sequence-parallel",
        Effect.STOPS,
        "core/transformer/moe/moe_layer.py: MoELayer.forward",
        name="experts-with-tensor-ranks-need-sequence-parallelism",
    ),
    Check(
        "moe_router_topk",
        lambda args: bool(args["num_experts"]) and args["moe_router_topk"] > args["num_experts"],
        "found {moe_router_topk}, more than num_experts ({num_experts}): the first step stops;"
        " expected at most that number",
        Effect.STOPS,
        "core/transformer/moe/moe_utils.py: topk_routing_with_score_function",
        needs=("moe_router_topk",),
        name="more-than-the-experts",
    ),
    Check(
        "moe_aux_loss_coeff",
        lambda args: (
            bool(args["num_experts"])
            and values_as_list(args.values, "moe_router_load_balancing_type") == ["sinkhorn"]
            and any(values_as_list(args.values, "moe_aux_loss_coeff"))
        ),
        "found {moe_aux_loss_coeff} with moe_router_load_balancing_type sinkhorn, which has no loss: the first"
        " step stops; expected 0",
        Effect.STOPS,
        "core/transformer/moe/router.py: TopKRouter.sinkhorn_load_balancing",
        name="sinkhorn-has-no-loss",
    ),
    Check(
        "mtp_loss_scaling_factor",
        lambda args: bool(args["mtp_num_layers"]) and args["mtp_loss_scaling_factor"] is None,
        "not set with mtp_num_layers {mtp_num_layers}: the first step stops, because it divides the factor"
        " by that number; set it (flags have 0.1)",
        Effect.STOPS,
        "core/models/gpt/gpt_model.py: GPTModel._postprocess",
        since="0.12.0",
        name="no-factor-to-divide",
    ),
    Check(
        "moe_shared_expert_intermediate_size",
        lambda args: (
            bool(args["num_experts"])
            and bool(args["moe_shared_expert_intermediate_size"])
            and bool(args["add_bias_linear"])
        ),
        "found with biases, which shared experts do not have: training stops when it builds the model;"
        " add --disable-bias-linear",
        Effect.STOPS,
        "core/transformer/moe/shared_experts.py: SharedExpertMLP.__init__",
        since="0.10.0",
        name="shared-experts-have-no-bias",
    ),
    Check(
        "context_parallel_size",
        lambda args: (
            (args["context_parallel_size"] or 1) > 1 and args["transformer_impl"] == "local"
        ),
        "found {context_parallel_size} with transformer_impl local, whose attention cannot split a"
        " sequence: training stops when it builds the model; use transformer_engine",
        Effect.STOPS,
        "core/transformer/dot_product_attention.py: DotProductAttention.__init__",
        name="local-attention-splits-no-sequence",
    ),
    Check(
        MASKING,
        lambda args: bool(args[MASKING]) and args["transformer_impl"] == "local",
        "found with transformer_impl local, whose attention takes no packed sequences: the first step"
        " stops; use transformer_engine",
        Effect.STOPS,
        "core/transformer/dot_product_attention.py: DotProductAttention.forward",
        name="local-attention-takes-no-documents",
    ),
    _ignore_without(
        RESET,
        lambda args: bool(args[RESET]) and not args[MASKING] and not uses_mask(args.values),
        "has no effect with these layers, which make a causal mask of their own: documents attend to each other;"
        " use --dataloader-inter-document-masking (since 0.19), or --transformer-impl local with"
        " --no-masked-softmax-fusion and a mask from the data",
        "core/models/gpt/gpt_layer_specs.py: attn_mask_type; core/fusions/fused_softmax.py: is_kernel_available",
        name="layers-make-their-own-mask",
    ),
    Check(
        "moe_token_dispatcher_type",
        lambda args: (
            bool(args["num_experts"])
            and args["moe_token_dispatcher_type"] == "flex"
            and args["moe_flex_dispatcher_backend"] in (None, "deepep")
            and _ranks_of_experts(args) * (args["expert_model_parallel_size"] or 1) == 1
        ),
        "found flex on one rank for all experts: training stops when it builds the model; use"
        " alltoall, or more ranks for the experts",
        Effect.STOPS,
        "core/transformer/moe/token_dispatcher.py: MoEFlexTokenDispatcher.__init__",
        name="flex-needs-several-ranks",
    ),
    Check(
        "global_batch_size",
        _short_of_a_group,
        "found {global_batch_size} with virtual pipeline stages: the first step stops, because a step"
        " has fewer microbatches than one group of them; use more microbatches, or a smaller"
        " --microbatch-group-size-per-virtual-pipeline-stage",
        Effect.STOPS,
        INTERLEAVED,
        since="0.10.0",
        name="fewer-microbatches-than-a-group",
    ),
    Check(
        "microbatch_group_size_per_vp_stage",
        lambda args: (sizes := _groups(args)) is not None and sizes[0] < sizes[1],
        "found {microbatch_group_size_per_vp_stage}, below pipeline_model_parallel_size"
        " ({pipeline_model_parallel_size}): the first step stops; expected at least that number",
        Effect.STOPS,
        INTERLEAVED,
        since="0.10.0",
        name="group-smaller-than-the-pipeline",
    ),
    Check(
        "global_batch_size",
        _leaves_a_rest,
        "found {global_batch_size} with virtual pipeline stages: the step stops, because its last"
        " group has fewer microbatches than the pipeline has ranks; use a number of microbatches that"
        " leaves no such rest",
        Effect.STOPS,
        INTERLEAVED,
        name="last-group-shorter-than-the-pipeline",
    ),
    Check(
        "rampup_batch_size",
        _broken_ramp,
        "found {rampup_batch_size}, whose steps do not lead to global_batch_size"
        " ({global_batch_size}): training stops at the start; expected START INCREMENT SAMPLES with"
        " START below it, and a multiple of INCREMENT between them",
        Effect.STOPS,
        RAMP + ".__init__",
        until=NO_RAMP,
        name="steps-do-not-lead-to-the-global-batch",
    ),
    Check(
        "rampup_batch_size",
        _uneven_ramp,
        "found {rampup_batch_size}, some of whose batches are no multiple of micro_batch_size"
        " ({micro_batch_size}) x data_parallel_size ({data_parallel_size}): training stops at the"
        " first of them; change one of these, or add --decrease-batch-size-if-needed",
        Effect.STOPS,
        RAMP + ".update",
        until=NO_RAMP,
        name="a-batch-of-the-ramp-does-not-divide",
    ),
    Check(
        "rampup_batch_size",
        lambda args: bool(args["rampup_batch_size"]),
        "has no effect since 0.18: the batch has its full size from the start; use"
        " --step-batch-size-schedule",
        Effect.NUMBERS,
        "core/num_microbatches_calculator.py: init_num_microbatches_calculator",
        since=NO_RAMP,
        name="has-no-effect-since-0-18",
        surprising=True,
    ),
    Check(
        "override_opt_param_scheduler",
        lambda args: (
            bool(args["override_opt_param_scheduler"])
            and bool(args["use_checkpoint_opt_param_scheduler"])
        ),
        "found with use_checkpoint_opt_param_scheduler: training stops at the start; keep one of them",
        Effect.STOPS,
        "core/optimizer_param_scheduler.py: OptimizerParamScheduler.__init__",
        name="both-schedules-are-asked-for",
    ),
    Check(
        "optimizer",
        lambda args: "muon" in str(args["optimizer"]) and bool(args["fp16"]),
        "found {optimizer} with fp16, which this optimizer refuses when it is built; use bf16",
        Effect.STOPS,
        "core/optimizer/muon.py, __init__.py: get_megatron_muon_optimizer and its successors",
        since="0.16.0",
        name="muon-refuses-fp16",
    ),
)
"""Assertions of Megatron's core modules that run after its parser and its config classes."""


def _horizon(args: Seen) -> tuple[float, float] | None:
    """Return the lengths of warmup and decay, both in steps or both in samples. None if there is no
    decay.
    """
    # As get_optimizer_param_scheduler does: iterations first, and training's length if the decay
    # has none.
    unit = "iters" if args["train_iters"] else "samples"
    decay = args[f"lr_decay_{unit}"] or args[f"train_{unit}"]
    if not decay:
        return None
    share = args["lr_warmup_fraction"]
    return (args[f"lr_warmup_{unit}"] or 0) if share is None else share * decay, decay


GRID = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "expert_gtp_weight_remat_size",
    "gtp_weight_remat_size",
    "encoder_tensor_model_parallel_size",
    "encoder_pipeline_model_parallel_size",
)
"""Arguments that set the sizes of three grids of ranks: of the decoder, the experts and the encoder.
"""


def _uneven_experts(args: Seen) -> bool:
    """Return whether the number of ranks is no multiple of the size of the experts' grid. False for
    a model with a separate encoder, whose ranks are outside this grid.
    """
    sizes = Namespace({name: args[name] for name in GRID})
    ranks = args["world_size"]
    return bool(ranks) and not encoder_size(sizes) and ranks % expert_size(sizes) != 0


def _stages_apart(args: Seen) -> bool:
    """Return whether the grids of the layers and of the experts put stages on different ranks."""
    sizes = Namespace({name: args[name] for name in GRID})
    several = bool(args["use_tp_pp_dp_mapping"]) and (sizes.pipeline_model_parallel_size or 1) > 1
    return several and not encoder_size(sizes) and decoder_size(sizes) != expert_size(sizes)


SECOND: Mapping[str, object] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "outer_dp_sharding_strategy": "no_shard",
    "cuda_graph_impl": "none",
    **dict.fromkeys(
        (
            "gradient_accumulation_fusion",
            "calculate_per_token_loss",
            "fp8",
            "fp4",
            "use_precision_aware_optimizer",
            "delay_wgrad_compute",
            "ddp_num_buckets",
            "suggested_communication_unit_size",
            "data_parallel_random_init",
            "fsdp_db_use_persist_buf_on_alloc_fail",
            "fsdp_manual_registration",
            "megatron_fsdp_enable_fine_grained_param_gather",
            "megatron_fsdp_max_pool_double_buffer",
        )
    ),
}
"""Values that version 2 of Megatron-FSDP requires. None means that the argument must be off."""


def _second(path: str, value: object) -> Check:
    return Check(
        path,
        lambda args: (
            bool(args["use_megatron_fsdp"])
            and args["megatron_fsdp_version"] == 2
            and (args[path] not in (None, False) if value is None else args[path] != value)
        ),
        f"found {{{path}}} with megatron_fsdp_version 2, which does not support it: training stops at the start;"
        f" {'switch it off' if value is None else f'expected {value}'}",
        Effect.STOPS,
        "distributed/fsdp/mcore_fsdp_adapter.py: FullyShardedDataParallelV2._validate_config",
        since=MAIN,
    )


CHECKS = Checks(
    RELEASES,
    *(_second(path, value) for path, value in SECOND.items()),
    *CORE,
    _ignore_without(
        "use_distributed_optimizer",
        lambda args: args["optimizer"] == "sgd" and not args["optimizer_cpu_offload"],
        "found with sgd, whose state Megatron cannot shard: training stops at the start; drop"
        " --use-distributed-optimizer, or use adam",
        "optimizer/distrib_optimizer.py: DistributedOptimizer.__init__",
        Effect.STOPS,
        name="shards-the-state-of-adam",
    ),
    _ignore_without(
        "data_parallel_sharding_strategy",
        _no_fsdp,
        "has no effect without --use-megatron-fsdp (0.12 and 0.13: --use-custom-fsdp), so nothing is sharded",
        "distributed/fsdp; NVIDIA/Megatron-LM#1641",
    ),
    *(
        _ignore_without(
            path,
            lambda args: not args["fp16"] or bool(args["loss_scale"]),
            "has no effect without fp16 and dynamic loss scaling",
            "optimizer/__init__.py: grad scaler",
        )
        for path in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    ),
    _ignore_without(
        "num_query_groups",
        lambda args: not args["group_query_attention"],
        "has no effect without --group-query-attention",
        "arguments.py: core_transformer_config_from_args",
    ),
    _ignore_without(
        "sgd_momentum",
        lambda args: args["optimizer"] == "adam",
        "has no effect with the adam optimizer",
        "optimizer/__init__.py",
    ),
    *(
        _ignore_without(
            path,
            lambda args: args["optimizer"] == "sgd",
            "has no effect with the sgd optimizer",
            "optimizer/__init__.py",
        )
        for path in ("adam_beta1", "adam_beta2", "adam_eps")
    ),
    _ignore_without(
        "expert_model_parallel_size",
        lambda args: not args["num_experts"] and args["expert_model_parallel_size"] != 1,
        "has no effect without --num-experts",
        "initialize.py: expert groups hold no experts",
    ),
    _ignore_without(
        "rope_scaling_factor",
        lambda args: (
            bool(args["use_rope_scaling"]) and args["rope_scaling_factor"] not in (None, 8.0)
        ),
        "has no effect: Megatron-LM's own GPT builder does not pass this argument to the model, "
        "which scales positions by 8",
        "gpt_builders.py: gpt_builder; before, pretrain_gpt.py: model_provider",
        Effect.NUMBERS,
        name="is-not-handed-to-the",
    ),
    _ignore_without(
        "rotary_seq_len_interpolation_factor",
        lambda args: bool(args["use_rope_scaling"]),
        "scales positions a second time, after --use-rope-scaling; no other stack does both; drop one of them",
        "rotary_pos_embedding.py: RotaryEmbedding scales the frequencies, and forward divides the positions",
        Effect.NUMBERS,
        name="stretches-positions-a-second-time",
    ),
    Check(
        "lr_warmup_iters",
        # None: nothing to compare. What the launch then lacks is named by `missing`.
        lambda args: (lengths := _horizon(args)) is not None and lengths[0] >= lengths[1],
        "the learning rate's warmup is at least as long as its decay: training stops at the start; shorten the warmup, or"
        " set a longer --lr-decay-iters or --lr-decay-samples",
        Effect.STOPS,
        "optimizer_param_scheduler.py: OptimizerParamScheduler.__init__",
    ),
    Check(
        "lr_warmup_init",
        lambda args: args["lr"] is not None and (args["lr_warmup_init"] or 0) > args["lr"],
        "found {lr_warmup_init}, above lr {lr}: training stops at the start; expected at most lr",
        Effect.STOPS,
        "optimizer_param_scheduler.py: OptimizerParamScheduler.__init__",
    ),
    Check(
        "end_weight_decay",
        lambda args: (args["end_weight_decay"] or 0) < (args["start_weight_decay"] or 0),
        "found {end_weight_decay}, below start_weight_decay {start_weight_decay}: training stops at the start;"
        " expected at least start_weight_decay",
        Effect.STOPS,
        "optimizer_param_scheduler.py: OptimizerParamScheduler.__init__",
    ),
    Check(
        "global_batch_size",
        lambda args: _rest(args) > 0,
        "found {global_batch_size}, which is not a multiple of micro_batch_size ({micro_batch_size}) x data_parallel_size"
        " ({data_parallel_size}): training stops at the start; change one of them, or add --decrease-batch-size-if-needed",
        Effect.STOPS,
        "num_microbatches_calculator.py, after all other checks",
        name="no-multiple-of-micro_batch_size-x",
    ),
    Check(
        "expert_model_parallel_size",
        _uneven_experts,
        "found {expert_model_parallel_size} on {world_size} ranks: training stops at the start,"
        " because expert tensor x expert x pipeline parallel size does not divide the number of"
        " ranks; use more ranks, or smaller sizes",
        Effect.STOPS,
        "core/parallel_state.py: initialize_model_parallel",
        since="0.10.0",
        name="expert-grid-does-not-divide-the-ranks",
    ),
    Check(
        "use_tp_pp_dp_mapping",
        _stages_apart,
        "found with pipeline ranks, and tensor x context parallel size is not expert tensor x"
        " expert parallel size: training stops at the start, in a model without experts too; drop"
        " --use-tp-pp-dp-mapping",
        Effect.STOPS,
        "core/parallel_state.py: initialize_model_parallel",
        since="0.11.0",
        name="stages-of-experts-on-different-ranks",
    ),
    Check(
        "expert_model_parallel_size",
        lambda args: (
            (args["data_parallel_size"] or 0) % (args["expert_model_parallel_size"] or 1) != 0
        ),
        "found {expert_model_parallel_size} with data_parallel_size {data_parallel_size}: training"
        " stops at the start; expected a divisor of data_parallel_size",
        Effect.STOPS,
        "core/parallel_state.py: initialize_model_parallel",
        until="0.10.0",
        name="expert-size-does-not-divide-data-ranks",
    ),
    Check(
        "use_megatron_fsdp",
        lambda args: (
            bool(args["use_megatron_fsdp"])
            and (args["pipeline_model_parallel_size"] or 1) > 1
            and args["megatron_fsdp_version"] != 2
        ),
        "found with pipeline_model_parallel_size {pipeline_model_parallel_size}: training stops when it wraps the model,"
        " because the mesh of Megatron-FSDP has no pipeline ranks; use the distributed optimizer",
        Effect.STOPS,
        "distributed/fsdp/mcore_fsdp_adapter.py: _get_dp_tp_mesh arranges all ranks of the world",
        since="0.14.0",
    ),
    Check(
        "use_megatron_fsdp",
        lambda args: (
            not _no_fsdp(args) and bool(args["fp16"]) and (args["data_parallel_size"] or 1) > 1
        ),
        "found with fp16: training stops in the first step if a rank holds no part of some "
        "parameter; use bf16, or the"
        " distributed optimizer",
        Effect.STOPS,
        "optimizer/distrib_optimizer.py: _collect_main_grad_data_for_unscaling; param_and_grad_buffer.py: update_main_grads",
        since="0.13.0",
    ),
    _ignore_without(
        "use_checkpoint_opt_param_scheduler",
        lambda args: bool(args["load"]) and bool(args["no_load_optim"] or args["finetune"]),
        "has no effect with --no-load-optim or --finetune: the schedule is loaded together with the optimizer, so"
        " that the rate begins anew; drop one of them",
        "training/checkpointing.py: load_checkpoint",
        Effect.NUMBERS,
        name="loaded-with-the-optimizer",
    ),
    Check(
        "fp8",
        lambda args: args["fp8"] == "hybrid" and args["fp8_recipe"] == "mxfp8",
        "found hybrid with fp8_recipe mxfp8: gradients are in E5M2, with which runs have diverged; use"
        " --fp8-format e4m3",
        Effect.NONE,
        "core/fp8_utils.py: get_fp8_recipe; NVIDIA-NeMo/Megatron-Bridge#638",
        name="mxfp8-with-gradients-in-e5m2",
    ),
    _ignore_without(
        "microbatch_group_size_per_vp_stage",
        lambda args: args["virtual_pipeline_model_parallel_size"] is None,
        "has no effect without virtual pipeline stages (--num-virtual-stages-per-pipeline-rank)",
        "pipeline_parallel/schedules.py",
    ),
)
