"""Settings that DeepSpeed accepts and then ignores or gets wrong. Each check names the effect and
the place in DeepSpeed's source.
"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.errors import nearest
from bridge.stack.check_tables import Checks
from bridge.stack.checks import Check, Remark
from bridge.stack.rules import Effect
from compat.deepspeed.batch import ranks
from compat.deepspeed.checks_view import (
    MICRO,
    OFFLOAD,
    PARAM,
    SCALE_KEYS,
    STEPS,
    TOTAL,
    ZERO,
    Seen,
    implementation_of,
    keeps_wide_masters,
    offloads_optimizer,
    steps_on_cpu,
)
from compat.deepspeed.refusals import AUTOTP, BF16_MASTER, FP16_MASTER
from compat.deepspeed.releases import KEYS, RELEASES

ADAM = ("adam", "adamw")
TESTED = ("adam", "adamw", "adagrad", "lion", "muon")
"""Optimizers that ZeRO accepts without zero_allow_untested_optimizer (runtime/zero/utils.py,
ZERO_SUPPORTED_OPTIMIZERS).
"""


def _stops_muon(view: Seen) -> bool:
    """Return whether BF16_Optimizer gets Muon in a run with a grid of model-parallel ranks."""
    has_pipeline = (view["code.pipeline_stages"] or 1) > 1
    narrow = has_pipeline and view.stage == 0 and view["data_types.grad_accum_dtype"] != "fp32"
    parallel = has_pipeline or (view["tensor_parallel.autotp_size"] or 0) > 1
    wide = keeps_wide_masters(view.values) and parallel
    muon = str(view["optimizer.type"]).lower() == "muon"
    return muon and bool(view["bf16.enabled"]) and (wide or narrow)


def _check_dead_key(
    path: str, message: str, place: str = "runtime/config.py: parsed, never read", name: str = ""
) -> Check:
    return Check(path, lambda view: path in view.given, message, Effect.NONE, place, name=name)


FUSED = ("lion", "lamb")
"""Optimizers whose step needs a kernel that DeepSpeed has only for some accelerators."""
FUSED_ON = ("cuda", "npu", "supa")
"""Accelerators for which DeepSpeed has the kernels of the optimizers in `FUSED` (ops/op_builder and
its folders).
"""


def _needs_fused_kernel(view: Seen) -> bool:
    """Return whether the optimizer needs a kernel that only few accelerators have. Lion with
    offload needs none, because DeepSpeed compiles Lion's CPU kernel on every machine.
    """
    name = str(view["optimizer.type"]).lower()
    return name in FUSED and not (name == "lion" and offloads_optimizer(view.values))


WARMUP_MAX_LR = 0.001
"""DeepSpeed's default of warmup_max_lr. It applies to WarmupDecayLR in all releases, and to
WarmupLR before 0.17.2 (runtime/lr_schedules.py).
"""


def _lr_overridden(view: Seen) -> bool:
    """Return whether the scheduler replaces the optimizer's learning rate by a different rate.
    WarmupDecayLR always replaces the rate; WarmupLR does if the config sets warmup_max_lr.
    """
    kind, peak = view["scheduler.type"], view["scheduler.params.warmup_max_lr"]
    sets = kind == "WarmupDecayLR" or (
        kind == "WarmupLR" and "scheduler.params.warmup_max_lr" in view.given
    )
    if not sets or not view.wrote("optimizer.params.lr"):
        return False
    return bool(view["optimizer.params.lr"] != (WARMUP_MAX_LR if peak is None else peak))


NOT_THERE = "DeepSpeed fails when it builds the engine"
"""Part of messages about settings that DeepSpeedConfig accepts but with which the run stops."""

MOMENTS = "bf16.bf16_optimizer_states"
BASE = "runtime/base_optimizer.py: _configure_master_weights"


def _zero_masters(view: Seen) -> bool:
    """Return whether a ZeRO optimizer of the engine keeps masters in bf16."""
    return bool(view[BF16_MASTER]) and view.stage > 0 and not keeps_wide_masters(view.values)


CHECKS = Checks(
    RELEASES,
    # Keys that nothing reads
    _check_dead_key(
        "pipeline.stages",
        "this key has no effect; the script sets the number of stages with"
        " PipelineModule(num_stages=): set code.pipeline_stages",
        name="no-effect-the-script-s",
    ),
    _check_dead_key(
        "pipeline.partition",
        "this key has no effect; the script sets the partition method with"
        " PipelineModule(partition_method=): set code.partition_method",
        name="no-effect-the-script-s",
    ),
    _check_dead_key(
        "pipeline.seed_layers",
        "this key has no effect; the script sets it with PipelineModule(seed_layers=); drop the"
        " key",
        name="no-effect-the-script-s",
    ),
    _check_dead_key("disable_allgather", "no effect; drop it"),
    _check_dead_key(
        "tensor_parallel.tp.tp_size",
        "tp_size has no effect; DeepSpeed uses tensor_parallel.autotp_size",
        "runtime/engine.py, autotp_size",
        name="no-effect-tensor_parallel-autotp_size-counts",
    ),
    _check_dead_key(ZERO + "allgather_partitions", "no effect; drop it"),
    _check_dead_key(
        ZERO + "cpu_offload_use_pin_memory",
        "this key has no effect; use pin_memory in offload_optimizer or offload_param",
        name="no-effect-use-pin_memory-in",
    ),
    _check_dead_key(
        "fp32_allreduce",
        "this key has no effect since DeepSpeed 0.6; use communication_data_type",
        name="no-effect-since-deepspeed-0",
    ),
    Check(
        "data_parallel_size",
        lambda view: (
            "data_parallel_size" in view.given and "sequence_parallel_size" not in view.given
        ),
        "this key has no effect without sequence_parallel_size; drop the key",
        Effect.NONE,
        "__init__.py: initialize",
        name="no-effect-without-sequence_parallel_size-drop",
    ),
    Check(
        "sequence_parallel_size",
        lambda view: (
            view["sequence_parallel_size"] > 1 and not view.wrote("data_parallel_size", "code")
        ),
        "before 0.17.0 DeepSpeed's batch equation ignores sequence_parallel_size unless"
        " data_parallel_size is set too; set both",
        Effect.NUMBERS,
        "runtime/config.py: world_size",
        until="0.17.0",
        name="the-batch-arithmetic-ignores-it",
    ),
    Check(
        "optimizer.params",
        lambda view: view.wrote("optimizer.params") and view["optimizer.type"] is None,
        "DeepSpeed ignores this section without optimizer.type, and uses the script's optimizer",
        Effect.NUMBERS,
        "runtime/config.py: get_optimizer_params",
        surprising=True,
        name="ignored-without-optimizer-type-the",
    ),
    Check(
        "scheduler.params",
        lambda view: view.wrote("scheduler.params") and view["scheduler.type"] is None,
        "DeepSpeed ignores this section without scheduler.type, and uses the script's scheduler",
        Effect.NUMBERS,
        "runtime/config.py: get_scheduler_params",
        surprising=True,
        name="ignored-without-scheduler-type-the",
    ),
    Check(
        "pipeline",
        lambda view: (
            view.wrote("pipeline.activation_checkpoint_interval") and not view.has_pipeline
        ),
        "this section has no effect without a PipelineModule; set code.pipeline_stages if the"
        " script builds a PipelineModule",
        Effect.COST,
        "runtime/pipe/engine.py: the only reader",
        name="no-effect-without-a-pipelinemodule",
    ),
    Check(
        "activation_checkpointing",
        lambda view: (
            any(
                view.given[key] for key in view.given if key.startswith("activation_checkpointing.")
            )
            and not (view["code.checkpointing"] or view.has_pipeline)
        ),
        "this section has no effect unless the model calls deepspeed.checkpointing; set"
        " code.checkpointing if the model calls it",
        Effect.COST,
        "runtime/activation_checkpointing/checkpointing.py: configure",
        name="no-effect-unless-the-model",
    ),
    # Kernels that few accelerators have
    Check(
        "optimizer.type",
        lambda view: _needs_fused_kernel(view) and view["code.accelerator"] is None,
        f"DeepSpeed has this optimizer's kernel only for {', '.join(FUSED_ON)}; on other"
        " accelerators and on CPUs the run stops",
        Effect.COST,
        "ops/lion/fused_lion.py, ops/lamb/fused_lamb.py, ops/op_builder",
        name="deepspeed-has-this-kernel-for",
    ),
    Check(
        "optimizer.type",
        lambda view: (
            _needs_fused_kernel(view) and view["code.accelerator"] not in (None, *FUSED_ON)
        ),
        f"DeepSpeed has this optimizer's kernel only for {', '.join(FUSED_ON)}, not for the run's"
        f" accelerator: {NOT_THERE}; use another optimizer, or offload Lion",
        Effect.STOPS,
        "ops/lion/fused_lion.py, ops/lamb/fused_lamb.py, ops/op_builder",
        name="no-kernel-for-this-accelerator",
    ),
    # ZeRO settings that a stage ignores
    Check(
        PARAM,
        lambda view: view[PARAM + ".device"] != "none" and view.stage < 3,
        "DeepSpeed ignores this section below ZeRO stage 3; drop the section, or use stage 3",
        Effect.COST,
        "runtime/engine.py: only stage 3 reads the section",
        name="ignored-below-stage-3-drop",
    ),
    Check(
        OFFLOAD,
        lambda view: offloads_optimizer(view.values) and view.stage == 0,
        "DeepSpeed ignores this section at ZeRO stage 0; drop the section, or use stage 1",
        Effect.COST,
        "runtime/engine.py: only ZeRO optimizers read the section",
        name="ignored-at-stage-0-drop",
    ),
    Check(
        OFFLOAD,
        lambda view: (
            offloads_optimizer(view.values)
            and view.stage > 0
            and view["optimizer.type"] is None
            and view["zero_force_ds_cpu_optimizer"] is not False
        ),
        "the optimizer is the script's: DeepSpeed stops if that is not DeepSpeedCPUAdam or"
        " DeepSpeedCPULion; use one of them, or set zero_force_ds_cpu_optimizer to false",
        Effect.COST,
        "runtime/engine.py: _configure_optimizer",
        name="the-scripts-optimizer-has-to-be-deepspeeds",
    ),
    Check(
        OFFLOAD,
        lambda view: (
            _zero_masters(view)
            and bool(view[MOMENTS])
            and offloads_optimizer(view.values)
            and view["optimizer.type"] is None
        ),
        "found with bf16_optimizer_states, and the optimizer is the script's: DeepSpeed stops unless it is"
        " DeepSpeedCPUAdam(..., fp32_optimizer_states=False)",
        Effect.COST,
        BASE,
        since="0.19.1",
        name="the-scripts-optimizer-has-to-keep-moments-in-bf16",
    ),
    Check(
        OFFLOAD + ".super_offload",
        lambda view: bool(view[OFFLOAD + ".super_offload"]) and view.stage < 3,
        "DeepSpeed ignores this key below ZeRO stage 3; drop the key, or use stage 3",
        Effect.COST,
        "runtime/engine.py: _configure_zero_optimizer",
        name="ignored-below-stage-3-drop",
    ),
    Check(
        PARAM + ".nvme_path",
        lambda view: (
            view[PARAM + ".device"] == "nvme" and not view[PARAM + ".nvme_path"] and view.stage == 3
        ),
        f"missing, although device is nvme: {NOT_THERE}; set this key to a directory",
        Effect.STOPS,
        "runtime/zero/partition_parameters.py",
        name="missing-for-device-nvme-deepspeed",
    ),
    Check(
        OFFLOAD + ".ratio",
        lambda view: view[OFFLOAD + ".device"] == "nvme" and (view[OFFLOAD + ".ratio"] or 0) < 1,
        "{zero_optimization.offload_optimizer.ratio} moves no update to the GPU with device nvme: the host computes"
        " that share too, with moments in its memory, and DeepSpeed 0.12 stops there; drop the key, or use"
        " device cpu",
        Effect.COST,
        "runtime/zero/stage3.py: _optimizer_step; deepspeedai/DeepSpeed#4872",
        name="no-share-of-the-gpu-with-nvme",
    ),
    Check(
        OFFLOAD + ".nvme_path",
        lambda view: (
            view[OFFLOAD + ".device"] == "nvme"
            and not view[OFFLOAD + ".nvme_path"]
            and view.stage == 3
        ),
        f"missing, although device is nvme: {NOT_THERE}; set this key to a directory",
        Effect.STOPS,
        "runtime/zero/stage3.py",
        name="missing-for-device-nvme-deepspeed",
    ),
    Check(
        ZERO + "allgather_bucket_size",
        lambda view: (
            view.stage in (1, 2)
            and not keeps_wide_masters(view.values)
            and int(view[ZERO + "allgather_bucket_size"]) % 2 != 0
        ),
        f"found an odd number at ZeRO stage 1 or 2: {NOT_THERE}; use an even number",
        Effect.STOPS,
        "runtime/zero/stage_1_and_2.py: DeepSpeedZeroOptimizer.__init__, nccl_start_alignment_factor",
        name="odd-at-stage-1-or-2",
    ),
    Check(
        ZERO + "legacy_stage1",
        lambda view: bool(view[ZERO + "legacy_stage1"]) and view.stage > 0,
        f"DeepSpeed 0.5.9 removed this switch: {NOT_THERE}; drop it",
        Effect.STOPS,
        "runtime/engine.py: _configure_zero_optimizer",
        name="gone-since-deepspeed-0-5",
    ),
    Check(
        "prescale_gradients",
        lambda view: (
            view["prescale_gradients"] and view.stage >= 2 and view[ZERO + "reduce_scatter"]
        ),
        "prescale_gradients cannot be combined with reduce_scatter at ZeRO stages 2 and 3:"
        f" {NOT_THERE}; switch one of the two off",
        Effect.STOPS,
        "runtime/zero/stage_1_and_2.py, stage3.py",
        name="not-possible-at-stage-2",
    ),
    Check(
        "gradient_predivide_factor",
        lambda view: (
            view["gradient_predivide_factor"] != 1
            and view.stage >= 2
            and view[ZERO + "reduce_scatter"]
        ),
        "a factor other than 1.0 cannot be combined with reduce_scatter at ZeRO stages 2 and 3:"
        f" {NOT_THERE}; use 1.0",
        Effect.STOPS,
        "runtime/zero/stage_1_and_2.py, stage3.py",
        name="not-possible-at-stage-2",
    ),
    Check(
        "optimizer.type",
        lambda view: str(view["optimizer.type"]).lower() == "muon" and view.stage == 3,
        f"Muon cannot be combined with ZeRO stage 3: {NOT_THERE}; use stage 2",
        Effect.STOPS,
        "runtime/engine.py: _configure_basic_optimizer",
        until="0.18.9",
        name="muon-not-possible-at-stage-3",
    ),
    Check(
        "optimizer.type",
        lambda view: (
            str(view["optimizer.type"]).lower() == "muon"
            and view.stage == 3
            and view[ZERO + "reduce_scatter"]
        ),
        f"Muon cannot be combined with reduce_scatter at ZeRO stage 3: {NOT_THERE}; set"
        " zero_optimization.reduce_scatter to false, or use stage 2",
        Effect.STOPS,
        "runtime/zero/stage3.py: __init__",
        since="0.18.9",
        name="muon-needs-no-reduce-scatter-at-stage-3",
    ),
    # Masters in half precision. What DeepSpeedConfig refuses is in `refusals`.
    Check(
        FP16_MASTER,
        lambda view: bool(view[FP16_MASTER]) and view.stage > 0 and not steps_on_cpu(view.values),
        f"masters in fp16 need Adam on the CPU: {NOT_THERE}; set zero_optimization.offload_optimizer"
        " to cpu with Adam or AdamW, or drop this key",
        Effect.STOPS,
        "runtime/zero/stage_1_and_2.py, stage3.py: _enforce_cpu_offload",
        name="masters-in-fp16-need-adam-on-the-cpu",
    ),
    Check(
        BF16_MASTER,
        lambda view: _zero_masters(view) and not view[MOMENTS] and not steps_on_cpu(view.values),
        f"masters in bf16 with moments in fp32 need Adam on the CPU: {NOT_THERE}; set"
        " bf16.bf16_optimizer_states to true, or zero_optimization.offload_optimizer to cpu with"
        " Adam or AdamW",
        Effect.STOPS,
        BASE,
        since="0.18.3",
        name="masters-in-bf16-need-moments-in-bf16-or-adam-on-the-cpu",
    ),
    Check(
        MOMENTS,
        lambda view: (
            _zero_masters(view)
            and bool(view[MOMENTS])
            and offloads_optimizer(view.values)
            and not steps_on_cpu(view.values)
        ),
        f"found with offload_optimizer, which needs Adam on the CPU here: {NOT_THERE}; use Adam or"
        " AdamW, or drop offload_optimizer",
        Effect.STOPS,
        BASE,
        since="0.19.1",
        name="offloaded-moments-in-bf16-need-adam-on-the-cpu",
    ),
    Check(
        MOMENTS,
        lambda view: _zero_masters(view) and bool(view[MOMENTS]) and steps_on_cpu(view.values),
        "before DeepSpeed 0.19.1 Adam on the CPU keeps its moments in fp32 whatever this key says;"
        " drop offload_optimizer, or this key",
        Effect.ROUNDING,
        "ops/adam/cpu_adam.py: DeepSpeedCPUAdam, fp32_optimizer_states",
        since="0.18.3",
        until="0.19.1",
        name="adam-on-the-cpu-keeps-moments-in-fp32",
    ),
    Check(
        BF16_MASTER,
        lambda view: bool(view[BF16_MASTER]) and keeps_wide_masters(view.values),
        "no effect at ZeRO stage 1 with gradients in fp32: masters and moments stay in fp32; use"
        " stage 2, or data_types.grad_accum_dtype bf16",
        Effect.ROUNDING,
        "runtime/engine.py: _do_optimizer_sanity_check, BF16_Optimizer",
        since="0.18.3",
        name="no-effect-at-stage-1-with-gradients-in-fp32",
    ),
    # Settings that change the numbers. The engine accumulates,
    # clips and scales in its own way at each stage.
    Check(
        "gradient_clipping",
        lambda view: "gradient_clipping" not in view.given,
        "not given: the default is 0.0 (off) before DeepSpeed 0.19.3, and 1.0 since; set the"
        " value you want",
        Effect.NUMBERS,
        "runtime/constants.py: GRADIENT_CLIPPING_DEFAULT",
        name="not-given-0-0-off",
        surprising=True,
    ),
    Check(
        ZERO + "stage",
        # A step with zero gradients moves no weights, but it counts: Adam's bias correction has
        # the step as exponent. Pipelines in bf16 take BF16_Optimizer, which makes no such step.
        lambda view: (
            view.stage == 0
            and (view.precision == "fp16" or (view.precision == "bf16" and not view.has_pipeline))
            and view["optimizer.type"] in ADAM
        ),
        "stage 0 in half precision takes an optimizer step with zero gradients before training, so Adam's bias correction is one"
        " step ahead; use stage 1",
        Effect.NUMBERS,
        "runtime/fp16/fused_optimizer.py, unfused_optimizer.py: initialize_optimizer_states",
    ),
    Check(
        "gradient_clipping",
        # The norm takes parameters of model-parallel rank 0 only, and a pipeline's stages
        # are such ranks to DeepSpeed (runtime/pipe/topology.py: get_model_parallel_rank).
        lambda view: (
            view.has_pipeline
            and view.stage == 0
            and view.precision == "fp32"
            and view["gradient_clipping"] > 0
        ),
        "with a pipeline at stage 0 in fp32 the gradient norm is computed only from the first"
        " pipeline stage; use ZeRO stage 1 or gradient_clipping 0",
        Effect.NUMBERS,
        "runtime/utils.py: clip_grad_norm_",
    ),
    Check(
        "managed_gradient_accumulation",
        lambda view: (
            bool(view["code.manual_accumulation"])
            and view.stage in (1, 2)
            and view["managed_gradient_accumulation"] is not False
        ),
        "ZeRO stages 1 and 2 lose the gradients of every backward call before a step except the"
        " last one; set gradient_accumulation_steps, or (since DeepSpeed 0.19.4) set"
        " managed_gradient_accumulation to false",
        Effect.NUMBERS,
        "runtime/zero/stage_1_and_2.py: gradients are averaged at the engine's own boundary",
        name="stages-1-and-2-lose",
    ),
    Check(
        "managed_gradient_accumulation",
        lambda view: (
            view["managed_gradient_accumulation"] is False
            and (
                view.has_pipeline
                or bool(view["compile.deepcompile"])
                or (view.stage < 2 and bool(view[ZERO + "overlap_comm"]))
            )
        ),
        "false cannot be combined with a pipeline, with DeepCompile, or with overlap_comm below"
        f" ZeRO stage 2: {NOT_THERE}",
        Effect.STOPS,
        "runtime/engine.py: _do_sanity_check",
        name="false-does-not-go-with",
    ),
    Check(
        TOTAL,
        lambda view: (view["tensor_parallel.autotp_size"] or 0) > 1 and TOTAL in view.given,
        "with AutoTP DeepSpeed divides the train batch over all ranks, not over the"
        " data-parallel ranks, so the batch is too small by a factor of autotp_size; give only"
        f" {MICRO} and {STEPS}",
        Effect.NUMBERS,
        "runtime/config.py: the config is built before the tensor-parallel groups",
        name="with-autotp-deepspeed-divides-it",
    ),
    Check(
        "data_types.grad_accum_dtype",
        lambda view: (
            view.stage == 0 and view["data_types.grad_accum_dtype"] not in (None, view.precision)
        ),
        "gradients at ZeRO stage 0 cannot accumulate in another format than the model's:"
        f" {NOT_THERE}; use stage 1",
        Effect.STOPS,
        "runtime/engine.py: _do_optimizer_sanity_check",
        name="another-format-than-the-model",
    ),
    Check(
        "data_types.param_dtype",
        lambda view: view["data_types.param_dtype"] not in (None, view.precision),
        f"this format differs from the training precision: {NOT_THERE}; drop the key",
        Effect.STOPS,
        "runtime/engine.py: _assert_valid_mixed_precision_config",
        name="must-be-the-training-precision",
    ),
    Check(
        "fp16.initial_scale_power",
        lambda view: (
            bool(view["fp16.enabled"])
            and not view["fp16.loss_scale"]
            and view.stage > 0
            and not any(path in view.given for path in SCALE_KEYS)
        ),
        "the config sets no key of loss scaling: before DeepSpeed 0.17.1 ZeRO then starts at a"
        " scale of 2**32 with hysteresis 1; set this key",
        Effect.NUMBERS,
        "runtime/fp16/loss_scaler.py: CreateLossScaler",
        until="0.17.1",
        name="not-given-nor-any-other",
    ),
    Check(
        "fp16.hysteresis",
        lambda view: (
            view.stage == 0
            and bool(view["fp16.enabled"])
            and not view["fp16.loss_scale"]
            and view.given.get("fp16.hysteresis", 1) != 1
        ),
        "DeepSpeed does not read this key at stage 0: there, each overflow halves the scale, and"
        " an overflow at the smallest scale does not end the run; use stage 1",
        Effect.NUMBERS,
        "runtime/fp16/fused_optimizer.py, unfused_optimizer.py: _update_scale",
        name="not-read-at-stage-0",
    ),
    # Optimizers and schedulers
    Check(
        "scheduler.type",
        lambda view: (
            view["optimizer.type"] is not None and not view.wrote("scheduler", "code.scheduler")
        ),
        "not given: taken as a constant learning rate, which is DeepSpeed's own behaviour; if"
        " the script or a trainer builds a scheduler, give the scheduler's settings, for example"
        " with --code scheduler.name=linear --code scheduler.total_steps=1000",
        Effect.NONE,
        "runtime/engine.py: _configure_lr_scheduler",
    ),
    Check(
        "optimizer.params.nesterov",
        lambda view: (
            str(view["optimizer.type"]).lower() == "sgd"
            and bool(view["optimizer.params.nesterov"])
            and (not view["optimizer.params.momentum"] or bool(view["optimizer.params.dampening"]))
        ),
        "found true without a momentum, or with dampening, which torch's SGD refuses: DeepSpeed fails when it"
        " builds the engine; set momentum, and no dampening",
        Effect.STOPS,
        "runtime/engine.py: _configure_basic_optimizer; torch/optim/sgd.py: SGD.__init__",
        name="nesterov-needs-a-momentum",
    ),
    Check(
        "optimizer.params.max_grad_norm",
        lambda view: "optimizer.params.max_grad_norm" in view.given,
        f"DeepSpeed refuses this argument: {NOT_THERE}; use gradient_clipping",
        Effect.STOPS,
        "runtime/engine.py: _configure_basic_optimizer",
        name="not-an-optimizer-parameter-deepspeed",
    ),
    Check(
        "optimizer.type",
        lambda view: (
            view["optimizer.type"] == "adam"
            and "optimizer.params.adam_w_mode" not in view.given
            and bool(view["optimizer.params.weight_decay"])
        ),
        "Adam decays weights as AdamW does unless adam_w_mode is false; set adam_w_mode explicitly",
        Effect.NUMBERS,
        "runtime/engine.py: _configure_basic_optimizer",
        surprising=True,
    ),
    Check(
        "optimizer.params.adam_w_mode",
        lambda seen: (
            seen["optimizer.type"] == "adamw"
            and seen.given.get("optimizer.params.adam_w_mode") is False
        ),
        "DeepSpeed ignores false with type AdamW, which always decouples weight decay; for decay in the"
        " gradient use type Adam with it",
        Effect.NUMBERS,
        "runtime/engine.py: _configure_basic_optimizer",
        name="ignored-with-type-adamw",
        surprising=True,
    ),
    Check(
        "optimizer.type",
        _stops_muon,
        "found Muon in bf16 with a pipeline or AutoTP: DeepSpeed stops when it builds its BF16_Optimizer,"
        " which takes Muon without them alone; use ZeRO stage 2, or another optimizer",
        Effect.STOPS,
        "runtime/bf16_optimizer.py: BF16_Optimizer.__init__",
        since="0.19.8",
        name="muon-in-bf16-takes-no-model-parallel-ranks",
    ),
    Check(
        "zero_allow_untested_optimizer",
        lambda view: (
            view.stage > 0
            and view["optimizer.type"] not in (None, *TESTED)
            and not view["zero_allow_untested_optimizer"]
            and bool(view.at.forms("optimizers", view["optimizer.type"]))
        ),
        f"ZeRO accepts this optimizer only if the key is true: {NOT_THERE}; set the key to true",
        Effect.STOPS,
        "runtime/engine.py: _do_optimizer_sanity_check",
        name="zero-wants-it-true-for",
    ),
    Check(
        "scheduler.params.warmup_max_lr",
        # With an lr of 0.001 both defaults give the same numbers.
        lambda view: (
            view["scheduler.type"] == "WarmupLR"
            and "scheduler.params.warmup_max_lr" not in view.given
            and view["optimizer.params.lr"] != WARMUP_MAX_LR
        ),
        "not given: WarmupLR warms up to 0.001 before DeepSpeed 0.17.2, and to the optimizer's"
        " lr ({optimizer.params.lr}) since; set the rate you want",
        Effect.NUMBERS,
        "runtime/lr_schedules.py: WarmupLR",
        surprising=True,
    ),
    Check(
        "optimizer.params.lr",
        _lr_overridden,
        "the scheduler replaces this rate by warmup_max_lr (0.001 if not given); set"
        " warmup_max_lr to the same rate",
        Effect.NUMBERS,
        "runtime/lr_schedules.py: WarmupLR, WarmupDecayLR",
        name="replaced-by-the-scheduler-s",
        surprising=True,
    ),
    # Pipeline
    Check(
        ZERO + "overlap_comm",
        lambda view: view.has_pipeline and bool(view.given.get(ZERO + "overlap_comm")),
        "DeepSpeed ignores this key with a pipeline; drop the key",
        Effect.COST,
        "runtime/engine.py: _configure_zero_optimizer",
        name="ignored-with-a-pipeline-drop",
    ),
    Check(
        "steps_per_print",
        lambda view: (
            view.has_pipeline and view["wall_clock_breakdown"] and view["steps_per_print"] is None
        ),
        "missing: with a pipeline and wall_clock_breakdown the first step fails; set this key to"
        " a number",
        Effect.STOPS,
        "runtime/pipe/engine.py: _exec_optimizer_step",
    ),
    Check(
        "steps_per_print",
        lambda view: view.has_pipeline and view["steps_per_print"] is None,
        "missing: with a pipeline the first step fails before DeepSpeed 0.16.5; set this key to"
        " a number",
        Effect.STOPS,
        "runtime/pipe/engine.py: train_batch",
        since="0.15.2",
        until="0.16.5",
    ),
    Check(
        "code.partition_method",
        lambda view: "code.partition_method" in view.given and not view.has_pipeline,
        "no effect without code.pipeline_stages",
        Effect.NONE,
        "runtime/pipe/module.py",
    ),
)
"""Checks of settings that DeepSpeed accepts. The `place` of each check is the function in
DeepSpeed's code that ignores the setting or gets it wrong.
"""


def find_remarks(view: Seen) -> Iterator[Remark]:
    """Yield remarks on settings that DeepSpeed ignores or gets wrong, where no row of a table can say so."""
    yield from _find_strange_types(view)
    yield from _old_names(view)
    yield from _find_wrong_arguments(view)
    yield from _find_assumed_world(view)
    yield from _find_shared_samples(view)


def _find_strange_types(view: Seen) -> Iterator[Remark]:
    """Yield remarks on types of optimizers and schedulers that neither DeepSpeed nor PyTorch has.

    Source: runtime/engine.py: _configure_basic_optimizer, _scheduler_from_config.
    """
    for section, article in (("optimizer", "an"), ("scheduler", "a")):
        path, kind = f"{section}.type", f"{section}s"
        name = view[path]
        if name is not None and not view.at.forms(kind, name):
            close = nearest(str(name), view.at.types[kind])
            yield (
                path,
                f"neither this release nor PyTorch has {article} {section} {name}:"
                f" {NOT_THERE}{close}",
                Effect.STOPS,
            )


def _old_names(view: Seen) -> Iterator[Remark]:
    """Yield remarks on old names of keys that DeepSpeed still reads (runtime/config_utils.py)."""
    for path in view.given:
        instead = KEYS[path].instead if path in KEYS else ""
        if path.startswith("bfloat16."):
            instead = "bf16"
        # These two do not work any more. Each has a check of its own.
        if instead and path not in (
            "optimizer.params.max_grad_norm",
            ZERO + "cpu_offload_use_pin_memory",
        ):
            yield path, f"old name; use {instead}", Effect.NONE


def _find_wrong_arguments(view: Seen) -> Iterator[Remark]:
    """Yield remarks on optimizer arguments that the selected implementation does not take, although
    another implementation of the same optimizer does.
    """
    name = view["optimizer.type"]
    forms = view.at.forms("optimizers", name) if name else ()
    form = next(
        (row for row in forms if row.form == implementation_of(view.values)),
        forms[0] if forms else None,
    )
    for path in view.given:
        argument = path.removeprefix("optimizer.params.")
        # A type without a list of arguments takes any; max_grad_norm has a check of its own.
        if form is None or form.args is None or argument == path or argument == "max_grad_norm":
            continue
        if argument not in (*form.args, *form.ignored):
            yield (
                path,
                f"the settings select the {form.form} implementation of {name}, which does not"
                f" take this argument: {NOT_THERE}",
                Effect.STOPS,
            )


def _find_assumed_world(view: Seen) -> Iterator[Remark]:
    """Yield a remark if the world size is not given. The batch keys are then checked for an assumed
    number of ranks.
    """
    if view.context.world_size is None:
        guess = ranks(view.values, view.at.version, None)
        if all(key in view.given for key in (TOTAL, STEPS, MICRO)):
            message = f"not given; {guess.world} is assumed, because the batch keys imply this number of ranks"
        else:
            message = f"not given; {guess.world} is assumed, the smallest possible number of ranks"
        yield "world_size", message, Effect.NONE


def _find_shared_samples(view: Seen) -> Iterator[Remark]:
    """Yield a remark if the ranks of a tensor group read the same samples, which DeepSpeed's own number of
    samples and older releases of Hugging Face's Trainer (get_total_train_batch_size) do not know.
    """
    size, total = view[AUTOTP] or 1, view[TOTAL]
    if size > 1 and total and view.context.world_size:
        yield (
            AUTOTP,
            f"the ranks of a tensor group read the same samples, so that a step takes {total // size};"
            f" DeepSpeed's train_batch_size, and before 4.53 the log of Hugging Face's Trainer, say {total}",
            Effect.NONE,
        )
