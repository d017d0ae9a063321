"""The table between Megatron's arguments and `Plan`, one row for each group of fields."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import nextafter

from bridge.stack.rules import (
    Context,
    Effect,
    Group,
    Rule,
    complete_rules,
    convert,
    each_only_ours,
    lacks,
    only_ours,
    only_theirs,
    plain_adam,
    rename,
)
from bridge.stack.words import (
    above,
    among,
    beyond,
    effect_if,
    either,
    every,
    give,
    has_value,
    look_up,
    no,
    of,
    on,
    some,
)
from compat.megatron import habits, options, stages
from compat.megatron.rules import (
    model as model_rules,
    run_length,
    switches,
    unmapped as unmapped_flags,
    weight_decay,
)
from compat.megatron.rules.learning_rate import RULE as LEARNING_RATE
from compat.megatron.shards import SHARDED, STRATEGIES, aware, torch_fsdp, zero_stage

DTYPES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float64": "fp64",
}
# Megatron has no fp64; the rule of the precision says that it is lost.
DTYPE_FLAGS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp64": "fp32"}
ORDERS = {False: "tensor-context-expert-data-pipeline", True: "tensor-context-expert-pipeline-data"}


TENSOR_OVERLAP = convert(
    "tp_comm_overlap",
    "parallel.tensor_overlap",
    give(
        "parallel.tensor_overlap",
        every(on("tp_comm_overlap"), on("sequence_parallel")),
        has_value("tp_comm_overlap"),
    ),
    give("tp_comm_overlap", True, every(on("parallel.tensor_overlap"), on("parallel.sequence"))),
    effect=Effect.COST,
    sees=("sequence_parallel", "parallel.sequence"),
    lossy="Megatron overlaps the communication of tensor parallelism only if sequence parallelism is on",
    source="arguments.py: tp_comm_overlap needs sequence_parallel",
)


def parallel_rules() -> tuple[Rule, ...]:
    """Return the rules for the sizes of the mesh axes."""
    layout = "another arrangement of ranks computes the same sums in another order"
    return (
        rename(
            "tensor_model_parallel_size", "parallel.tensor", effect=Effect.ROUNDING, note=layout
        ),
        rename(
            "pipeline_model_parallel_size", "parallel.pipeline", effect=Effect.ROUNDING, note=layout
        ),
        rename("context_parallel_size", "parallel.context", effect=Effect.ROUNDING, note=layout),
        TENSOR_OVERLAP,
        convert(
            "expert_model_parallel_size",
            "parallel.expert",
            write=give(
                "expert_model_parallel_size",
                of("parallel.expert"),
                some(on("model.experts"), no(has_value("model.layers"))),
            ),
            effect=Effect.ROUNDING,
            sees=("model.experts", "model.layers"),
            lossy="Megatron splits experts over ranks only if the number of experts is set",
            source="arguments.py: expert_model_parallel_size needs num_experts",
        ),
        rename(
            "expert_tensor_parallel_size",
            "parallel.expert_tensor",
            effect=Effect.ROUNDING,
            note=layout,
        ),
        convert(
            "sequence_parallel",
            "parallel.sequence",
            write=_write_sequence,
            effect=Effect.COST,
            sees=("parallel.tensor", "parallel.expert"),
            lossy="before 0.16 Megatron combines expert and tensor parallelism only with sequence parallelism",
            source="model_parallel_config.py: __post_init__, expert and tensor parallelism",
        ),
        convert(
            "use_tp_pp_dp_mapping",
            "parallel.order",
            give("parallel.order", either(on("use_tp_pp_dp_mapping"), ORDERS[True], ORDERS[False])),
            give("use_tp_pp_dp_mapping", True, among("parallel.order", ORDERS[True])),
            effect=Effect.COST,
            lossy="Megatron offers only two rank orders",
            source="initialize.py: order of initialize_model_parallel",
        ),
    )


def _write_sequence(values: Group, context: Context) -> Group:
    tensor, expert = values.get("parallel.tensor") or 1, values.get("parallel.expert") or 1
    # ModelParallelConfig refuses the run otherwise, and 0.15 ends there with a NameError.
    if tensor > 1 and expert > 1 and not context.since("0.16.0"):
        return {"sequence_parallel": True}
    return {"sequence_parallel": values.get("parallel.sequence")}


SIZES = ("micro_batch_size", "global_batch_size", "data_parallel_size")


def _read_batch(values: Group) -> Group:
    micro, global_, data = (values.get(name) for name in SIZES)
    if not (micro and global_ and data):
        return {"batch.micro": micro, "batch.global_": global_, "parallel.data": data}
    # The microbatches that each rank runs in a step.
    steps = max(1, global_ // (micro * data))
    return {
        "batch.micro": micro,
        "batch.accumulation": steps,
        "batch.global_": micro * steps * data,
        "parallel.data": data,
    }


BATCH = convert(
    SIZES,
    ("batch.micro", "batch.accumulation", "batch.global_", "parallel.data"),
    _read_batch,
    give({"micro_batch_size": of("batch.micro"), "global_batch_size": of("batch.global_")}),
    blurs=lambda values: bool(
        all(values.get(name) for name in SIZES)
        and values["global_batch_size"]
        % (values["micro_batch_size"] * values["data_parallel_size"])
    ),
    carries={
        "micro_batch_size": ("batch.micro", "batch.accumulation"),
        "global_batch_size": ("batch.global_", "batch.accumulation"),
        "data_parallel_size": "parallel.data",
    },
    lossy="a global batch size is rounded down to a multiple of micro batch size x data-parallel size",
    source="arguments.py: global_batch_size defaults to micro x data; num_microbatches_calculator.py",
)


TORCH_NEEDS = ("parallel.pipeline", "parallel.expert", "model.tied", "precision.compute")


def _shardable(values: Group, context: Context) -> bool:
    """Whether Megatron can shard this optimizer's state.

    It never shards the state of sgd and muon, and since 0.18 only Adam's.
    """
    name = values.get("optimizer.name")
    return name in (None, "adam", "adamw") or (
        name not in ("sgd", "muon") and not context.since("0.18.0")
    )


def _torch_only(values: Group, context: Context) -> bool:
    """Whether torch's FSDP supports the plan and Megatron's own FSDP does not.

    Megatron's own FSDP exists since 0.12, and never shards with sgd.
    """
    # The conditions of validate_args for use_torch_fsdp2 (arguments/sharding.py: TORCH_STEPS).
    whole = all((values.get(f"parallel.{axis}") or 1) == 1 for axis in ("pipeline", "expert"))
    sgd = values.get("optimizer.name") == "sgd"
    fits = whole and values.get("model.tied") is False and values.get("precision.compute") != "fp16"
    # It shards weights too. With a flag of 0.13, gathered weights stay until backward, as in stage 2.
    stage = values.get("zero.stage")
    able = stage == 3 or (stage == 2 and context.since("0.13.0"))
    return fits and able and context.since("0.10.0") and (sgd or not context.since("0.12.0"))


def _write_zero(values: Group, context: Context) -> Group:
    stage = values.get("zero.stage") or 0
    if _torch_only(values, context):
        reshard = {"torch_fsdp2_reshard_after_forward": False} if stage == 2 else {}
        return {
            "use_torch_fsdp2": True,
            "ckpt_format": "torch_dist",
            "gradient_accumulation_fusion": False,
            **reshard,
        }
    if stage == 0 or not _shardable(values, context):
        return {}
    # The mesh of Megatron-FSDP has no pipeline ranks. In fp16, the loss scaler looks for gradients
    # of parameters of which a rank holds no part; a single data-parallel rank holds them all.
    # Either stops the run (checks.py).
    has_pipeline = context.since("0.14.0") and (values.get("parallel.pipeline") or 1) > 1
    fp16 = context.since("0.13.0") and values.get("precision.compute") == "fp16"
    loss_scaling = fp16 and values.get("parallel.data") != 1
    if stage == 1 or not context.since("0.12.0") or has_pipeline or loss_scaling:
        return {"use_distributed_optimizer": True}
    sharding = {
        "use_distributed_optimizer": True,
        "data_parallel_sharding_strategy": STRATEGIES[stage],
    }
    if not context.since("0.14.0"):
        return {**sharding, "use_custom_fsdp": True, "gradient_accumulation_fusion": False}
    # Its checkpoints have a format of their own, without which validate_args refuses the run.
    return {**sharding, "use_megatron_fsdp": True, "ckpt_format": "fsdp_dtensor"}


ZERO = convert(
    (*SHARDED, "ckpt_format", "gradient_accumulation_fusion"),
    "zero.stage",
    give("zero.stage", zero_stage),
    _write_zero,
    effect=Effect.COST,
    sees=("optimizer.name", "parallel.data", *TORCH_NEEDS),
    carries={"ckpt_format": (), "gradient_accumulation_fusion": ()},
    kernels=("gradient_accumulation_fusion",),
    note="a choice of kernel or checkpoint format that Megatron's sharding may require",
    lossy="Megatron shards gradients and weights only with its own FSDP, which exists since 0.12; "
    "since 0.13, this FSDP supports fp16 only on one data-parallel rank, and since 0.14 it supports no pipeline; "
    "with sgd, this FSDP does not shard",
    source="reference: distributed optimizer is level 1; data_parallel_sharding_strategy takes effect only with Megatron-FSDP;"
    " optimizer/distrib_optimizer.py: DistributedOptimizer takes Adam only",
)


def ddp_rules() -> tuple[Rule, ...]:
    """Return the rules for the buckets of data parallelism and the overlap of its communication."""
    return (
        rename(
            "num_distributed_optimizer_instances",
            "zero.replicas",
            effect=Effect.COST,
            note="hybrid sharding",
        ),
        rename(
            "ddp_bucket_size",
            "zero.bucket",
            effect=Effect.COST,
            note="elements in one gradient bucket",
        ),
        convert(
            ("overlap_grad_reduce", "overlap_param_gather"),
            ("zero.overlap", "zero.overlap_gather"),
            _read_overlap,
            _write_overlap,
            effect=Effect.COST,
            sees=("zero.stage", "optimizer.name", *SHARDED, *TORCH_NEEDS),
            carries={
                "overlap_grad_reduce": "zero.overlap",
                "overlap_param_gather": "zero.overlap_gather",
            },
            lossy="Megatron overlaps the gathering of weights only if they are sharded and the gradient reduction is overlapped",
            source="arguments.py: --overlap-param-gather needs --overlap-grad-reduce and a sharded optimizer",
        ),
    )


def _read_overlap(values: Group, context: Context) -> Group:
    """Return two plan fields: whether the gradient reduction overlaps computation, and whether the
    gathering of weights does.

    torch's FSDP always overlaps both. Without sharding, no weights are gathered, so the gathering
    is not overlapped.
    """
    if "overlap_grad_reduce" not in values:
        return {}
    if torch_fsdp(values):
        return {"zero.overlap": True, "zero.overlap_gather": True}
    gather = bool(values.get("overlap_param_gather")) and zero_stage(values) >= 1
    return {"zero.overlap": values.get("overlap_grad_reduce"), "zero.overlap_gather": gather}


def _write_overlap(values: Group, context: Context) -> Group:
    # torch's FSDP overlaps without being asked. 0.16 refuses muon with any overlap.
    if _torch_only(values, context) or (
        values.get("optimizer.name") == "muon" and not context.since("0.17.0")
    ):
        return {}
    reduce = values.get("zero.overlap")
    sharded = (values.get("zero.stage") or 0) >= 1 and _shardable(values, context)
    gather = bool(values.get("zero.overlap_gather") and reduce and sharded)
    return {"overlap_grad_reduce": reduce, "overlap_param_gather": gather}


def _read_precision(values: Group, context: Context) -> Group:
    compute = next((name for name in ("bf16", "fp16") if values.get(name)), "fp32")
    if "accumulate_allreduce_grads_in_fp32" not in values:
        return {"precision.compute": compute}
    precision_aware = aware(values)
    # Before 0.12, bf16 gradients are accumulated in fp32 whatever the flag says, unless the
    # precision-aware optimizer keeps them in bf16.
    wide = values.get("accumulate_allreduce_grads_in_fp32") or (
        compute == "bf16" and not precision_aware and not context.since("0.12.0")
    )
    master = (
        DTYPES.get(values.get("main_params_dtype") or "", "fp32") if precision_aware else "fp32"
    )
    return {
        "precision.compute": compute,
        "precision.reduce": "fp32" if wide else compute,
        "precision.master": master,
    }


def _write_precision(values: Group, context: Context) -> Group:
    compute = DTYPE_FLAGS[values.get("precision.compute") or "fp32"]
    settings = {} if compute == "fp32" else {compute: True}
    reduce = values.get("precision.reduce")
    if compute == "fp16" and reduce == "fp32":
        settings["accumulate_allreduce_grads_in_fp32"] = True
    if compute == "bf16" and reduce == "bf16" and context.since("0.12.0"):
        settings["grad_reduce_in_bf16"] = True
    return {
        **settings,
        **_write_states(
            values, context, narrow=compute == reduce == "bf16" and not context.since("0.12.0")
        ),
    }


PRECISION = convert(
    (
        "bf16",
        "fp16",
        "params_dtype",
        "accumulate_allreduce_grads_in_fp32",
        "grad_reduce_in_bf16",
        "main_params_dtype",
        "main_grads_dtype",
        "use_precision_aware_optimizer",
    ),
    ("precision.compute", "precision.reduce", "precision.master"),
    _read_precision,
    _write_precision,
    sees=(
        "zero.offload.optimizer",
        "zero.stage",
        "optimizer.name",
        "precision.moments",
        "optimizer",
        *SHARDED,
    ),
    carries={
        "accumulate_allreduce_grads_in_fp32": "precision.reduce",
        "grad_reduce_in_bf16": "precision.reduce",
        "main_grads_dtype": "precision.reduce",
        "main_params_dtype": "precision.master",
        "use_precision_aware_optimizer": "precision.master",
    },
    mixed=True,
    lossy=(
        "Megatron updates fp32 master weights; "
        "only its precision-aware optimizer has other formats; "
        "Megatron has no fp64, and before 0.12 it reduces bf16 gradients in fp32"
    ),
    source="arguments.py: --bf16 sets accumulate_allreduce_grads_in_fp32 unless --grad-reduce-in-bf16",
)


def _write_states(values: Group, context: Context, narrow: bool) -> Group:
    """Return the flags that switch the precision-aware optimizer on, if the plan's formats of
    optimizer state need it. If `narrow`, gradients are kept in bf16.
    """
    # main_params_dtype accepts fp32, the default, and fp16.
    master = {"main_params_dtype": "fp16"} if values.get("precision.master") == "fp16" else {}
    states = {**master, **({"main_grads_dtype": "bf16"} if narrow else {})}
    narrow_moments = values.get("precision.moments") not in (None, WIDE)
    needs = states or _offloads(values, context) or narrow_moments
    return (
        {"use_precision_aware_optimizer": True, **states}
        if needs and _can_be_aware(values, context)
        else {}
    )


MOMENT_DTYPES = ("exp_avg_dtype", "exp_avg_sq_dtype")
WIDE = ("fp32", "fp32")
"""Formats of the first and second moment if the optimizer is not precision-aware."""


def _read_moment_dtypes(values: Group, context: Context) -> Group:
    if MOMENT_DTYPES[0] not in values:
        return {}
    # fp8 moments, for which a plan has no form, are read as fp16; `blurs` tells that they are lost.
    dtypes = tuple(DTYPES.get(str(values[path]), "fp16") for path in MOMENT_DTYPES)
    return {"precision.moments": dtypes if aware(values) else WIDE}


MOMENT_FORMATS = convert(
    MOMENT_DTYPES,
    "precision.moments",
    _read_moment_dtypes,
    lambda values, context: (
        dict(zip(MOMENT_DTYPES, values["precision.moments"], strict=True))
        if values.get("precision.moments") not in (None, WIDE) and _can_be_aware(values, context)
        else {}
    ),
    effect=Effect.ROUNDING,
    sees=("use_precision_aware_optimizer", "optimizer", "optimizer.name", "zero.stage", *SHARDED),
    blurs=some(*(beyond(path, *DTYPES) for path in MOMENT_DTYPES)),
    lossy="Megatron keeps moments in other formats than fp32 only with its precision-aware optimizer;"
    " stagebridge does not translate 8-bit moments",
    note="formats of the optimizer's moments",
    source="optimizer_config.py: exp_avg_dtype, exp_avg_sq_dtype",
)


def _can_be_aware(values: Group, context: Context) -> bool:
    """Whether Megatron can run its precision-aware optimizer, which exists since 0.11 and requires
    Adam with sharded state.
    """
    adam = values.get("optimizer.name") in (None, "adam", "adamw")
    return adam and (values.get("zero.stage") or 0) >= 1 and context.since("0.11.0")


def _offloads(values: Group, context: Context) -> bool:
    """Whether optimizer state is offloaded, which needs 0.12 and the precision-aware optimizer."""
    offload = values.get("zero.offload.optimizer") not in (None, "none")
    return offload and context.since("0.12.0") and _can_be_aware(values, context)


SCALES = ("static", "initial", "hysteresis")


LACKED = either(on("loss_scale"), None, False)
"""The value of a switch for the dynamic loss scale that Megatron lacks."""


def _window(values: Group) -> int | None:
    # The flag is a float, the number of steps is whole.
    window = values.get("loss_scale_window")
    return None if window is None else int(window)


def _loss_scale_effect(values: Group) -> Effect:
    if values.get("fp16"):
        return Effect.NUMBERS
    # bf16 has the exponents of fp32, so a constant scale moves no gradient out of range.
    return Effect.ROUNDING if values.get("bf16") and values.get("loss_scale") else Effect.NONE


FLOOR = convert(
    "min_loss_scale",
    ("precision.loss_scale.minimum", "precision.loss_scale.final"),
    give(
        {
            "precision.loss_scale.minimum": of("min_loss_scale"),
            "precision.loss_scale.final": LACKED,
        },
        when=on("fp16"),
    ),
    give("min_loss_scale", of("precision.loss_scale.minimum"), among("precision.compute", "fp16")),
    effect=_loss_scale_effect,
    sees=("fp16", "loss_scale", "precision.compute"),
    lossy="after an overflow at the smallest loss scale, Megatron continues; "
    "it skips every step that overflows",
    source="optimizer/grad_scaler.py: DynamicGradScaler.update",
)


WINDOW = convert(
    "loss_scale_window",
    ("precision.loss_scale.window", "precision.loss_scale.late"),
    give(
        {"precision.loss_scale.window": _window, "precision.loss_scale.late": LACKED},
        when=on("fp16"),
    ),
    give(
        "loss_scale_window", of("precision.loss_scale.window"), among("precision.compute", "fp16")
    ),
    effect=_loss_scale_effect,
    sees=("fp16", "loss_scale", "precision.compute"),
    lossy="Megatron doubles the loss scale at the end of the loss-scale window, not one step later",
    source="optimizer/grad_scaler.py: DynamicGradScaler.update",
)


def _read_loss_scale(values: Group) -> Group:
    static = values.get("loss_scale") or None
    if not values.get("fp16"):
        return {"precision.loss_scale.static": static if values.get("bf16") else None}
    return {
        "precision.loss_scale.static": static,
        "precision.loss_scale.initial": values.get("initial_loss_scale"),
        "precision.loss_scale.hysteresis": values.get("hysteresis"),
    }


def _write_loss_scale(values: Group) -> Group:
    static, initial, hysteresis = (values.get(f"precision.loss_scale.{name}") for name in SCALES)
    if values.get("precision.compute") != "fp16":
        return {"loss_scale": static}
    return {"loss_scale": static, "initial_loss_scale": initial, "hysteresis": hysteresis}


LOSS_SCALE = convert(
    ("loss_scale", "initial_loss_scale", "hysteresis"),
    tuple(f"precision.loss_scale.{name}" for name in SCALES),
    _read_loss_scale,
    _write_loss_scale,
    effect=_loss_scale_effect,
    sees=("fp16", "bf16", "precision.compute"),
    carries={
        "loss_scale": "precision.loss_scale.static",
        "initial_loss_scale": "precision.loss_scale.initial",
        "hysteresis": "precision.loss_scale.hysteresis",
    },
    lossy="Megatron scales the loss in fp16, and in bf16 only by a constant",
    source="optimizer/__init__.py: constant scaler if --loss-scale, dynamic in fp16, none otherwise",
)


SAME = {name: name for name in ("sgd", "muon", "adaptive_muon", "soap", "lion")}
OPTIMIZERS = {"adam": "adamw", "dist_muon": "muon", **SAME}
OPTIMIZER_FLAGS = {"adamw": "adam", "adam": "adam", **SAME}


def _write_optimizer(values: Group, context: Context) -> Group:
    name = values.get("optimizer.name")
    # 0.17 refuses muon with overlap_grad_reduce and has dist_muon for that; 0.18 reads dist_muon as
    # muon.
    if (
        name == "muon"
        and values.get("zero.overlap")
        and context.since("0.17.0")
        and not context.since("0.18.0")
    ):
        return {"optimizer": "dist_muon"}
    return {"optimizer": OPTIMIZER_FLAGS[name]} if name in OPTIMIZER_FLAGS else {}


OPTIMIZER = convert(
    "optimizer",
    "optimizer.name",
    give("optimizer.name", look_up(OPTIMIZERS, "optimizer")),
    _write_optimizer,
    sees=("zero.overlap",),
    lossy="Megatron's adam always has decoupled weight decay (AdamW)",
    source="optimizer/__init__.py: adam is FusedAdam or torch.optim.AdamW with decoupled weight decay",
)


ORTHOGONAL = ("muon", "dist_muon", "adaptive_muon")

UPDATE_SCALE = convert(
    "muon_scale_mode",
    "optimizer.update_scale",
    give("optimizer.update_scale", of("muon_scale_mode"), among("optimizer", *ORTHOGONAL)),
    give("muon_scale_mode", of("optimizer.update_scale"), among("optimizer.name", *ORTHOGONAL)),
    sees=("optimizer", "optimizer.name"),
    note="only Megatron's muon variants scale updates by the shape of a matrix",
    source="optimizer/muon.py: scale_mode of get_muon_scale_factor",
)


def optimizer_rules() -> tuple[Rule, ...]:
    """Return the rules for the optimizer and its hyperparameters."""
    return (
        OPTIMIZER,
        rename("lr", "optimizer.lr"),
        convert(
            MOMENTS,
            ("optimizer.betas", "optimizer.eps"),
            _read_moments,
            _write_moments,
            effect=effect_if(among("optimizer", "sgd"), Effect.NONE, Effect.NUMBERS),
            sees=("optimizer", "optimizer.name"),
            carries={
                "adam_beta1": "optimizer.betas",
                "adam_beta2": "optimizer.betas",
                "adam_eps": "optimizer.eps",
                "lion_beta1": "optimizer.betas",
                "lion_beta2": "optimizer.betas",
            },
            lossy="the optimizer of the target has other moment settings, or none",
        ),
        convert(
            (*dict.fromkeys(MOMENTUM.values()), *NESTEROV),
            ("optimizer.momentum", "optimizer.nesterov"),
            _read_momentum,
            _write_momentum,
            effect=effect_if(among("optimizer", *MOMENTUM), Effect.NUMBERS),
            sees=("optimizer", "optimizer.name"),
            carries={
                **dict.fromkeys(MOMENTUM.values(), "optimizer.momentum"),
                **dict.fromkeys(NESTEROV, "optimizer.nesterov"),
            },
            lossy="in Megatron only sgd and muon have a momentum, and only muon has Nesterov momentum",
            source="optimizer/__init__.py: torch.optim.SGD(momentum=), without nesterov; emerging optimizers: muon_nesterov",
        ),
        UPDATE_SCALE,
        *plain_adam(
            "optimizer.amsgrad",
            "optimizer.bias_correction",
            note="Megatron has no flag for this option of Adam",
        ),
        rename("clip_grad", "optimizer.clip"),
        LEARNING_RATE,
    )


MOMENTS = ("adam_beta1", "adam_beta2", "adam_eps", "lion_beta1", "lion_beta2")


MOMENTUM = {"sgd": "sgd_momentum", "muon": "muon_momentum", "dist_muon": "muon_momentum"}
NESTEROV = ("muon_nesterov", "muon_use_nesterov")


def _read_momentum(values: Group, context: Context) -> Group:
    name = values.get("optimizer") or ""
    path = MOMENTUM.get(name)
    # Adam has no momentum setting and no Nesterov variant; of other optimizers neither is known.
    if path is None or values.get(path) is None:
        return {"optimizer.nesterov": False} if name == "adam" else {}
    muon = path == "muon_momentum"
    return {
        "optimizer.momentum": max(0.0, values[path]),
        "optimizer.nesterov": any(values.get(name) for name in NESTEROV) if muon else False,
    }


def _write_momentum(values: Group, context: Context) -> Group:
    name = values.get("optimizer.name")
    if name not in MOMENTUM:
        return {}
    switch = NESTEROV[0 if context.since("0.18.0") else 1]  # renamed in 0.18
    nesterov = {switch: True} if name == "muon" and values.get("optimizer.nesterov") else {}
    return {MOMENTUM[name]: values.get("optimizer.momentum"), **nesterov}


BELOW_ONE = nextafter(1.0, 0.0)
"""The largest beta that a plan allows. Megatron itself has no limit for Lion's betas."""


def _read_moments(values: Group, context: Context) -> Group:
    if values.get("optimizer") == "lion":
        betas = [
            float(values[path])
            for path in ("lion_beta1", "lion_beta2")
            if values.get(path) is not None
        ]
        return (
            {"optimizer.betas": tuple(min(max(0.0, beta), BELOW_ONE) for beta in betas)}
            if len(betas) == 2
            else {}
        )
    first, second = values.get("adam_beta1"), values.get("adam_beta2")
    if values.get("optimizer") == "sgd" or first is None or second is None:
        return {}
    return {"optimizer.betas": (first, second), "optimizer.eps": values.get("adam_eps")}


def _write_moments(values: Group, context: Context) -> Group:
    first, second = values.get("optimizer.betas") or (None, None)
    if values.get("optimizer.name") == "lion":
        return {"lion_beta1": first, "lion_beta2": second}
    return {"adam_beta1": first, "adam_beta2": second, "adam_eps": values.get("optimizer.eps")}


PARTIAL = "num_microbatches_with_partial_activation_checkpoints"


def _counts(values: Group) -> bool:
    kept = values.get(PARTIAL)
    return isinstance(kept, int) and not isinstance(kept, bool) and kept >= 0


PARTLY = convert(
    PARTIAL,
    "recompute.kept_microbatches",
    give("recompute.kept_microbatches", of(PARTIAL), _counts),
    effect=Effect.COST,
    blurs=every(has_value(PARTIAL), no(_counts)),
    note="Megatron's training script decides how many activations of a microbatch are kept instead of "
    "recomputed; stagebridge translates only runs that keep all activations of such a microbatch",
    source="pipeline_parallel/schedules.py: max_outstanding_backprops; a field of the class, without a flag",
)


def _read_recompute(values: Group) -> Group:
    granularity = values.get("recompute_granularity") or "none"
    if granularity != "full":
        return {"recompute.granularity": granularity}
    return {
        "recompute.granularity": granularity,
        "recompute.method": values.get("recompute_method"),
        "recompute.layers": values.get("recompute_num_layers"),
    }


def _write_recompute(values: Group) -> Group:
    granularity = values.get("recompute.granularity")
    if granularity != "full":
        return {"recompute_granularity": "selective"} if granularity == "selective" else {}
    method, layers = values.get("recompute.method"), values.get("recompute.layers")
    # Full recomputation needs both; uniform with one layer recomputes every layer by itself.
    return {
        "recompute_granularity": "full",
        "recompute_method": method or "uniform",
        "recompute_num_layers": layers or 1,
    }


RECOMPUTE = convert(
    ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_activations"),
    ("recompute.granularity", "recompute.method", "recompute.layers"),
    _read_recompute,
    _write_recompute,
    effect=Effect.COST,
    carries={"recompute_method": "recompute.method", "recompute_num_layers": "recompute.layers"},
    lossy="Megatron's selective recomputation has no method and no number of layers",
    source="arguments.py: --recompute-activations is granularity selective",
)


def other_rules() -> tuple[Rule, ...]:
    """Return the rules for recomputation, offload, fp8 and the loss."""
    offloads = every(on("optimizer_cpu_offload"), aware)
    return (
        RECOMPUTE,
        convert(
            "distribute_saved_activations",
            "recompute.partition",
            give("recompute.partition", on("distribute_saved_activations")),
            give(
                "distribute_saved_activations",
                True,
                every(
                    on("recompute.partition"),
                    among("recompute.granularity", "full"),
                    above("parallel.tensor"),
                    no(on("parallel.sequence")),
                ),
            ),
            effect=Effect.COST,
            sees=("recompute.granularity", "parallel.tensor", "parallel.sequence"),
            lossy="Megatron partitions saved activations only with full recomputation, tensor parallelism and no sequence"
            " parallelism",
            source="arguments.py: distribute_saved_activations needs TP > 1 and full granularity",
        ),
        convert(
            ("optimizer_cpu_offload", "optimizer_offload_fraction"),
            ("zero.offload.optimizer", "zero.offload.optimizer_ratio"),
            give(
                {
                    "zero.offload.optimizer": either(offloads, "cpu", "none"),
                    "zero.offload.optimizer_ratio": either(
                        offloads, of("optimizer_offload_fraction"), None
                    ),
                }
            ),
            _write_offload,
            effect=Effect.COST,
            sees=(
                "use_precision_aware_optimizer",
                "optimizer",
                "optimizer.name",
                "zero.stage",
                *SHARDED,
            ),
            lossy="Megatron offloads optimizer state since 0.12, to host memory, and only with its precision-aware optimizer",
            source="arguments.py: optimizer_cpu_offload needs use_precision_aware_optimizer",
        ),
        PARTLY,
        only_ours(
            "precision.frozen",
            note="Megatron keeps no master copy of frozen weights (optimizer/__init__.py)",
            effect=Effect.COST,
        ),
        convert("fp8", "precision.fp8", note="8-bit matrix products by Transformer Engine"),
        convert(
            "calculate_per_token_loss",
            "loss",
            give(
                "loss", either(on("calculate_per_token_loss"), "per_token", "mean_of_microbatches")
            ),
            give("calculate_per_token_loss", True, among("loss", "per_token")),
        ),
    )


def _write_offload(values: Group, context: Context) -> Group:
    if not _offloads(values, context):
        return {}
    ratio = values.get("zero.offload.optimizer_ratio")
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 1.0 if ratio is None else ratio,
    }


def missing_rules() -> tuple[Rule, ...]:
    """Return the rules for plan fields that Megatron has no argument for."""
    return (
        only_ours(
            "zero.weight_buffers",
            "zero.grad_buffers",
            note="Megatron has no limit on the number of weight or gradient buffers",
            effect=Effect.COST,
        ),
        *each_only_ours(
            "zero.gather_bucket", note="Megatron has one bucket size for reducing and gathering"
        ),
        *each_only_ours(
            "zero.prescale", "zero.predivide", note="Megatron divides gradients only once"
        ),
        only_ours(
            "zero.offload.parameters",
            note="Megatron keeps weights on the device",
            effect=Effect.COST,
        ),
        only_ours(
            "recompute.ratio",
            "recompute.offload",
            note="Megatron recomputes whole layers",
            effect=Effect.COST,
        ),
        only_ours(
            "schedule.depth_first",
            "schedule.breadth_first",
            "schedule.csv",
            note="Megatron has only the pipeline schedules 1F1B and interleaved 1F1B",
            effect=Effect.COST,
        ),
        lacks("debug", "Megatron has no per-layer logs", effect=Effect.NONE),
    )


LACKS = {
    "model": "Megatron has no argument for this field",
    "parallel": "Megatron has no argument for this field",
    "zero": "Megatron has no argument for this field",
    "precision": "Megatron has no argument for this field",
    "optimizer": "Megatron has no argument for this field",
    "adapters": "Megatron has no adapters",
    "recompute.modules": "Megatron has no argument for this field",
    "run": "Megatron's training loop has no such switch",
}
"""Reasons why Megatron lacks plan fields that no other row names, by section of the plan."""


def _without_ramp(values: Group) -> str:
    """Return why the ramp of the batch size is lost, and how many steps the run then has."""
    samples, size = values.get("train_samples"), values.get("global_batch_size")
    steps = values.get("train_iters") or (samples // size if samples and size else None)
    end = (
        f"; the run then has {steps:,} steps of {size} samples from the start"
        if steps and size
        else ""
    )
    return f"{unmapped_flags.BATCHES.note}{end}"


RAMP = replace(
    only_theirs(
        "rampup_batch_size",
        note=unmapped_flags.BATCHES.note,
        effect=unmapped_flags.BATCHES.effect,
        source="training/training.py: update_train_iters",
    ),
    sees=("train_samples", "train_iters", "global_batch_size"),
    blurs=on("rampup_batch_size"),
    tells=_without_ramp,
)


@cache
def table() -> tuple[Rule, ...]:
    """Return all rules. Each argument of each release, and each plan field, is in exactly one rule."""
    rules = (
        *model_rules.RULES,
        *parallel_rules(),
        *stages.RULES,
        BATCH,
        ZERO,
        *ddp_rules(),
        PRECISION,
        MOMENT_FORMATS,
        LOSS_SCALE,
        WINDOW,
        FLOOR,
        *optimizer_rules(),
        RAMP,
        *run_length.RULES,
        *switches.RULES,
        *weight_decay.RULES,
        *habits.RULES,
        *other_rules(),
        *missing_rules(),
    )
    # Last, because they take what no row above has named.
    return complete_rules(rules, LACKS, options.groups(), unmapped_flags.why)
