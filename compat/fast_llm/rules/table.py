"""The table of rules between Fast-LLM's fields and `Plan`: one rule for each group of fields."""

from __future__ import annotations

from functools import cache
from math import nextafter

from bridge.plan.section import fields
from bridge.stack.rules import (
    Context,
    Effect,
    Group,
    Rule,
    Side,
    Use,
    Why,
    always,
    complete_rules,
    convert,
    each_only_ours,
    lacks,
    longest,
    nothing,
    only_ours,
    plain_adam,
    rename,
    spare_parameters,
)
from bridge.stack.words import (
    above,
    among,
    either,
    every,
    give,
    has_value,
    look_up,
    no,
    nonzero,
    of,
    on,
    spread,
)
from compat.fast_llm import habits
from compat.fast_llm.effective import (
    GRADS,
    LEVEL,
    PIPELINE,
    RANKS,
    SEQUENCE_TENSOR,
    SPLIT,
    STAGES,
    TENSOR,
    WEIGHTS,
    buffers_of_level,
)
from compat.fast_llm.rules import batch, learning_rate, model, run_length
from compat.fast_llm.schema import FastLLM
from compat.fast_llm.setting_types import DTYPES

NAMES = {long: short for short, long in DTYPES.items()}


def parallel_rules() -> tuple[Rule, ...]:
    """Return the rules for the sizes of the mesh axes."""
    layout = "another order of ranks adds up the same terms in another order"
    return (
        rename(TENSOR, "parallel.tensor", effect=Effect.ROUNDING, note=layout),
        rename(PIPELINE, "parallel.pipeline", effect=Effect.ROUNDING, note=layout),
        rename(
            SPLIT,
            "parallel.context",
            effect=Effect.ROUNDING,
            note="data ranks share a sequence and gather keys and values for attention, which is context parallelism",
            source="layers/attention: keys and values are gathered over the sequence_data group",
        ),
        convert(
            (),
            "parallel.context_method",
            give("parallel.context_method", "all_gather", above(SPLIT)),
            nothing,
            effect=Effect.COST,
            sees=(SPLIT,),
            note="Fast-LLM's context parallelism always gathers keys and values",
            source="layers/attention/attention.py: keys and values are gathered over the sequence_data group",
        ),
        rename(
            SEQUENCE_TENSOR,
            "parallel.sequence",
            effect=Effect.COST,
            note="both stacks split the activations of norms and dropout by tokens",
        ),
        ORDER,
        only_ours(
            "parallel.expert",
            "parallel.expert_tensor",
            note="Fast-LLM has no expert parallelism",
            effect=Effect.ROUNDING,
        ),
    )


ORDERS = {False: "tensor-context-expert-data-pipeline", True: "tensor-context-expert-pipeline-data"}
SPLIT_FIRST = "tensor-pipeline-context-expert-data"
"""The plan's order of axes for pipeline_first if sequences are split. The ranks that share a
sequence are data ranks, so their axis comes after the pipeline axis.
"""


def _read_order(values: Group, context: Context) -> Group:
    first = bool(values.get(RANKS + "pipeline_first"))
    split = (values.get(SPLIT) or 1) > 1
    return {"parallel.order": SPLIT_FIRST if first and split else ORDERS[first]}


def _write_order(values: Group, context: Context) -> Group:
    order = (values.get("parallel.order") or "").split("-")
    if not {"pipeline", "data"} <= set(order):
        return {}
    return {RANKS + "pipeline_first": order.index("pipeline") < order.index("data")}


ORDER = convert(
    RANKS + "pipeline_first",
    "parallel.order",
    _read_order,
    _write_order,
    effect=Effect.COST,
    sees=(SPLIT,),
    lossy="Fast-LLM offers only two rank orders",
    source="distributed/config.py: strides of the groups",
)


def _read_zero(values: Group) -> Group:
    """Read the ZeRO level from the numbers of buffers. A limited number of gradient buffers means
    level 2, and a limited number of weight buffers level 3.
    """
    weights, grads = values.get(WEIGHTS), values.get(GRADS)
    stage = 1 if grads is None else 2
    if weights is not None:
        stage = 3
    return {"zero.stage": stage, "zero.weight_buffers": weights, "zero.grad_buffers": grads}


def _write_zero(values: Group) -> Group:
    stage = values.get("zero.stage")
    both = {WEIGHTS: values.get("zero.weight_buffers"), GRADS: values.get("zero.grad_buffers")}
    counts = {path: count for path, count in both.items() if count is not None}
    # A level that sets these very counts is written in their place: newer releases refuse both
    # together.
    level = next((level for level in (3, 2) if buffers_of_level(level) == counts), None)
    if counts:
        return {LEVEL: level} if level else counts
    return {} if stage is None else {LEVEL: max(1, stage)}


ZERO = convert(
    (LEVEL, WEIGHTS, GRADS),
    ("zero.stage", "zero.weight_buffers", "zero.grad_buffers"),
    _read_zero,
    _write_zero,
    effect=Effect.COST,
    carries={
        LEVEL: ("zero.stage", "zero.weight_buffers", "zero.grad_buffers"),
        WEIGHTS: ("zero.weight_buffers", "zero.stage"),
        GRADS: ("zero.grad_buffers", "zero.stage"),
    },
    lossy="Fast-LLM always shards optimizer state: its lowest ZeRO level is 1",
    source="multi_stage/config.py: ZeRO level 2 means two gradient buffers, level 3 also two weight buffers;"
    " fsdp.py: optimizer state is sharded at any level",
)


def exchange_rules() -> tuple[Rule, ...]:
    """Return the rules for overlap, and for ZeRO settings that Fast-LLM lacks."""
    return (
        convert(
            "schedule.data_overlap",
            ("zero.overlap", "zero.overlap_gather"),
            give(
                dict.fromkeys(("zero.overlap", "zero.overlap_gather"), of("schedule.data_overlap"))
            ),
            _write_overlap,
            effect=Effect.COST,
            lossy="Fast-LLM has a single switch for the overlap of reducing and gathering",
        ),
        only_ours(
            "zero.bucket",
            "zero.gather_bucket",
            note="Fast-LLM gathers and reduces whole stages, so it has no bucket size",
            effect=Effect.COST,
        ),
        *each_only_ours(
            "zero.prescale", "zero.predivide", note="Fast-LLM divides gradients only once"
        ),
        *each_only_ours("parallel.tensor_overlap", note="Fast-LLM has no switch for this field"),
        only_ours("zero.replicas", note="Fast-LLM shards over all data ranks", effect=Effect.COST),
        only_ours(
            "zero.offload.optimizer",
            "zero.offload.optimizer_ratio",
            "zero.offload.parameters",
            note="Fast-LLM keeps weights, gradients and optimizer state on the device",
            effect=Effect.COST,
        ),
    )


def _write_overlap(values: Group, context: Context) -> Group:
    switches = [
        values[path]
        for path in ("zero.overlap", "zero.overlap_gather")
        if values.get(path) is not None
    ]
    # One switch for both: on if either is on, as overlap changes no numbers.
    return {"schedule.data_overlap": any(switches)} if switches else {}


def stage_rules() -> tuple[Rule, ...]:
    """Return the rules for the layers of each stage and for the pipeline schedule."""
    return (
        convert(
            (STAGES + "layers_per_stage", STAGES + "stages_per_pipeline_stage"),
            ("stages.rule", "stages.layers_per_stage"),
            give(
                {"stages.rule": "ceil", "stages.layers_per_stage": of(STAGES + "layers_per_stage")}
            ),
            _write_stages,
            effect=Effect.COST,
            lossy="Fast-LLM fills stages one after the other, and gives the embedding its own "
            "stage; it also gathers and reduces by stage",
            note="in every other stack, layers per stage have another meaning",
            source="multi_stage/multi_stage.py: _split_into_stages",
        ),
        only_ours(
            "stages.boundaries",
            note="Fast-LLM sets stages only by a number of layers",
            effect=Effect.COST,
        ),
        convert(
            (),
            "schedule.name",
            give("schedule.name", "looped_bfs", above(PIPELINE)),
            nothing,
            effect=Effect.COST,
            sees=(PIPELINE,),
            note="Fast-LLM runs all forward passes, then all backward passes; "
            "it assigns stages to ranks in turn",
            source="schedule/schedule.py: order of steps; multi_stage.py: stage modulo pipeline ranks",
        ),
        convert(
            "schedule.pipeline_overlap",
            "schedule.overlap",
            _read_pipeline_overlap,
            _write_pipeline_overlap,
            effect=Effect.COST,
            sees=(PIPELINE, "parallel.pipeline"),
            lossy="without pipeline parallelism there is no communication to overlap",
        ),
        only_ours(
            "schedule.virtual",
            "schedule.group",
            "schedule.csv",
            note="Fast-LLM assigns stages to pipeline ranks in turn",
            effect=Effect.COST,
        ),
    )


def _write_stages(values: Group, context: Context) -> Group:
    size = values.get("stages.layers_per_stage")
    # Of another rule the number would cut the layers at other places.
    return (
        {STAGES + "layers_per_stage": size}
        if size is not None and values.get("stages.rule") == "ceil"
        else {}
    )


def _read_pipeline_overlap(values: Group, context: Context) -> Group:
    has_pipeline = (values.get(PIPELINE) or 1) > 1
    return {"schedule.overlap": values.get("schedule.pipeline_overlap")} if has_pipeline else {}


def _write_pipeline_overlap(values: Group, context: Context) -> Group:
    has_pipeline = (values.get("parallel.pipeline") or 1) > 1
    return {"schedule.pipeline_overlap": values.get("schedule.overlap")} if has_pipeline else {}


COMPUTE, OLD_COMPUTE, MASTER = (
    RANKS + name for name in ("compute_dtype", "training_dtype", "optimization_dtype")
)
FULL = STAGES + "full_precision_gradients"


def _read_precision(values: Group) -> Group:
    compute, master = (
        NAMES.get(name or "", "fp32")
        for name in (values.get(COMPUTE) or values.get(OLD_COMPUTE), values.get(MASTER))
    )
    return {
        "precision.compute": compute,
        "precision.master": master,
        "precision.reduce": master if values.get(FULL) else compute,
    }


def _write_precision(values: Group, context: Context) -> Group:
    compute, master, reduce = (
        values.get(f"precision.{name}") for name in ("compute", "master", "reduce")
    )
    settings = {COMPUTE if context.since("0.3.0") else OLD_COMPUTE: compute, MASTER: master}
    if reduce is not None:
        # Fast-LLM chooses between two formats. A third one becomes the more precise of them.
        settings[FULL] = reduce == (master or "fp32") or reduce != compute
    return settings


PRECISION = convert(
    (COMPUTE, OLD_COMPUTE, MASTER, FULL),
    ("precision.compute", "precision.master", "precision.reduce"),
    _read_precision,
    _write_precision,
    carries={
        COMPUTE: "precision.compute",
        OLD_COMPUTE: "precision.compute",
        MASTER: "precision.master",
        FULL: "precision.reduce",
    },
    mixed=True,
    blurs=lambda values: any(
        values.get(path, "float32") not in NAMES for path in (COMPUTE, OLD_COMPUTE, MASTER)
    ),
    lossy=(
        "Fast-LLM sums gradients in the optimizer's format or in the format of the forward"
        " pass; stagebridge does not translate integer formats"
    ),
    source="multi_stage/fsdp.py: format of the gradient buffer",
)


STORE = STAGES + "store_frozen_weights_in_optimization_precision"
KEPT = {True: "master", False: "compute"}

FROZEN = convert(
    STORE,
    "precision.frozen",
    give("precision.frozen", look_up(KEPT, STORE), has_value(STORE)),
    give(STORE, look_up({ours: theirs for theirs, ours in KEPT.items()}, "precision.frozen")),
    effect=Effect.COST,
    source="multi_stage/stage_base.py: format of the shard of frozen weights",
)

SCALER = "optimizer.gradient_scaler."
SCALES = {"static": "constant", "initial": "initial", "hysteresis": "hysteresis"}


def _effect_of_scale(values: Group) -> Effect:
    return Effect.NUMBERS if _half(values) else Effect.ROUNDING


def _half(values: Group) -> bool:
    return "float16" in (values.get(COMPUTE), values.get(OLD_COMPUTE))


def _dynamic(name: str, otherwise: str) -> tuple[Side, Side]:
    """Return both sides of the rule for a setting of the dynamic loss scale. `otherwise` is a plan field for
    a variant that Fast-LLM does not have, and is set to false.
    """
    ours = f"precision.loss_scale.{name}"
    return (
        give(
            {ours: of(SCALER + name), f"precision.loss_scale.{otherwise}": False},
            when=every(no(on(SCALER + "constant")), _half),
        ),
        give(SCALER + name, nonzero(ours), among("precision.compute", "fp16")),
    )


WINDOW = convert(
    SCALER + "window",
    ("precision.loss_scale.window", "precision.loss_scale.late"),
    *_dynamic("window", "late"),
    effect=_effect_of_scale,
    sees=(COMPUTE, OLD_COMPUTE, "precision.compute", SCALER + "constant"),
    lossy="Fast-LLM doubles the loss scale in the last step of the loss-scale window, not in the step after it",
    source="optimizer/optimizer.py: DynamicGradScaler.update",
)


FLOOR = convert(
    SCALER + "minimum",
    ("precision.loss_scale.minimum", "precision.loss_scale.final"),
    *_dynamic("minimum", "final"),
    effect=_effect_of_scale,
    sees=(COMPUTE, OLD_COMPUTE, "precision.compute", SCALER + "constant"),
    lossy="Fast-LLM's minimum loss scale is above 0; "
    "after an overflow at the minimum, it only skips the step",
    source="optimizer/optimizer.py: DynamicGradScaler.update",
)


def _read_scale(values: Group) -> Group:
    if values.get(SCALER + "constant"):
        return {"precision.loss_scale.static": values[SCALER + "constant"]}
    if not _half(values):
        return {}
    return {
        f"precision.loss_scale.{ours}": values.get(SCALER + theirs)
        for ours, theirs in SCALES.items()
        if ours != "static"
    }


def _write_scale(values: Group) -> Group:
    scales = {
        SCALER + theirs: values.get(f"precision.loss_scale.{ours}")
        for ours, theirs in SCALES.items()
    }
    if values.get("precision.compute") != "fp16":
        return {SCALER + "constant": scales[SCALER + "constant"]}
    return {path: value for path, value in scales.items() if value}


LOSS_SCALE = convert(
    tuple(SCALER + theirs for theirs in SCALES.values()),
    tuple(f"precision.loss_scale.{ours}" for ours in SCALES),
    _read_scale,
    _write_scale,
    effect=_effect_of_scale,
    sees=(COMPUTE, OLD_COMPUTE, "precision.compute"),
    carries={SCALER + theirs: f"precision.loss_scale.{ours}" for ours, theirs in SCALES.items()},
    lossy="Fast-LLM has a dynamic loss scale only in fp16",
    source="optimizer/optimizer.py: get_grad_scaler",
)


NEVER = 1e30
"""A limit of the gradient norm that no run reaches. It stands for no clipping, which Fast-LLM does
not have.
"""


def optimizer_rules() -> tuple[Rule, ...]:
    """Return the rules for AdamW, Fast-LLM's only optimizer."""
    return (
        always("optimizer.name", "adamw", "Fast-LLM has only AdamW"),
        convert(
            (learning_rate.RATE + "base", learning_rate.SCALE),
            "optimizer.lr",
            give("optimizer.lr", learning_rate.peak),
            give(learning_rate.RATE + "base", of("optimizer.lr")),
            sees=(learning_rate.TEXT,),
            blurs=lambda values: (
                values.get(learning_rate.TEXT) is None
                and (values.get(learning_rate.RATE + "base") or 0) < 0
            ),
            lossy="Fast-LLM has a default learning rate of 0.0001; stagebridge does not translate negative rates",
        ),
        convert(
            ("optimizer.beta_1", "optimizer.beta_2"),
            "optimizer.betas",
            _read_betas,
            spread(("optimizer.beta_1", "optimizer.beta_2"), "optimizer.betas"),
            blurs=lambda values: 1.0 in values.values(),
            lossy="Fast-LLM has default betas of 0.9 and 0.999; stagebridge translates betas below 1",
        ),
        convert(
            "optimizer.epsilon",
            "optimizer.eps",
            write=give("optimizer.epsilon", nonzero("optimizer.eps")),
            lossy="Fast-LLM's epsilon is above 0, with a default of 1e-8",
        ),
        rename("optimizer.weight_decay", "optimizer.weight_decay"),
        spare_parameters(
            "optimizer.weight_decay", "matrices", "Fast-LLM decays neither biases nor norms"
        ),
        lacks("optimizer.decay_ramp", "Fast-LLM's weight decay is constant"),
        *plain_adam(
            "optimizer.nesterov",
            "optimizer.amsgrad",
            "optimizer.bias_correction",
            note="Fast-LLM has only AdamW",
        ),
        convert(
            "optimizer.gradient_norm_clipping",
            "optimizer.clip",
            _read_clip,
            give(
                "optimizer.gradient_norm_clipping",
                either(among("optimizer.clip", 0), NEVER, of("optimizer.clip")),
            ),
            note="Fast-LLM always clips gradients; "
            "a run without clipping gets a limit that is never reached",
        ),
        only_ours("optimizer.momentum", note="Fast-LLM has only AdamW"),
    )


def _read_betas(values: Group, context: Context) -> Group:
    betas = [
        beta
        for beta in (values.get("optimizer.beta_1"), values.get("optimizer.beta_2"))
        if beta is not None
    ]
    if len(betas) < 2:
        return {}
    # Fast-LLM takes 1, a plan only what is below; the nearest float keeps the difference as small
    # as it can be.
    return {"optimizer.betas": tuple(min(beta, nextafter(1.0, 0.0)) for beta in betas)}


def _read_clip(values: Group, context: Context) -> Group:
    bound = values.get("optimizer.gradient_norm_clipping")
    return {"optimizer.clip": 0.0 if bound is not None and bound >= NEVER else bound}


DEBUG = {
    "layer_outputs": "debug_layer_outputs",
    "layer_gradients": "debug_layer_gradients",
    "param_init": "debug_param_init",
    "param_gradients": "debug_param_gradients",
    "all_param_gradients": "debug_all_param_gradients",
    "param_update": "debug_param_update",
    "global_tensors": "debug_global_tensors",
    "activation_memory": "debug_activation_memory",
    "tensor_parallel": "debug_tensor_parallel",
}


def debug_rules() -> tuple[Rule, ...]:
    """Return the rules for the debug logs of each layer."""
    return tuple(
        rename(STAGES + theirs, f"debug.{ours}", effect=Effect.NONE)
        for ours, theirs in DEBUG.items()
    )


RECOMPUTE = tuple(
    f"recompute.{name}"
    for name in ("method", "layers", "ratio", "kept_microbatches", "partition", "offload")
)


def missing_rules() -> tuple[Rule, ...]:
    """Return the rules for plan fields for which Fast-LLM has no setting."""
    return (
        only_ours(
            *RECOMPUTE,
            note="Fast-LLM recomputes only whole feed-forward layers",
            effect=Effect.COST,
        ),
        only_ours("precision.fp8", note="Fast-LLM has no fp8"),
        convert(
            (),
            "loss",
            lambda values, context: {
                "loss": "per_token" if context.since("0.4.0+20260720") else "mean_of_microbatches"
            },
            nothing,
            note="Fast-LLM has no setting for this field; its loss is the mean over"
            " microbatches, and in its main branch of 2026 the mean over all labels of a"
            " step",
            source="schedule/runner.py and layers/language_model/loss: divided by microbatches, later by num_labels_in_batch",
        ),
    )


SECTIONS: dict[str, tuple[str, Use]] = {
    "run": ("a setting of the experiment's folder or of its logs", Use.RECORDS),
    "training": ("a setting of Fast-LLM's trainer", Use.RECORDS),
    "training.prefetch_factor": ("a setting of Fast-LLM's data loader", Use.PLACES),
    "run.triton_linear_kernels": ("a kernel choice", Use.FORM),
    "run.enable_triton_kernels": ("a kernel choice", Use.FORM),
    "run.torch_dynamo_enable": ("a kernel choice", Use.FORM),
    "model.multi_stage.compile_all": ("a kernel choice", Use.FORM),
    "data.gpu": ("the device on which Fast-LLM draws samples", Use.PLACES),
    "data": ("the training script of the target stack sets datasets and sampling", Use.SAMPLES),
    "data.data_sample_warn_time_ms": ("a warning of Fast-LLM's data loader", Use.RECORDS),
    "data.multiprocessing_context": ("a setting of Fast-LLM's data loader", Use.RECORDS),
    "batch": ("the training script of the target stack cuts and masks samples", Use.SAMPLES),
    "batch.micro_sequence_length": (
        "Fast-LLM computes a sequence in parts, one after the other",
        Use.FORM,
    ),
    "schedule": ("a setting inside Fast-LLM's schedule", Use.PLACES),
    "schedule.micro_batch_splits": (
        "Fast-LLM computes a sequence in parts, one after the other",
        Use.FORM,
    ),
    "schedule.estimate_critical_batch": ("Fast-LLM measures gradients", Use.WAITS),
    "schedule.skip_step": ("Fast-LLM can leave out the optimizer step", Use.COMPUTES),
    **dict.fromkeys(
        (
            "schedule.debug_schedule",
            "schedule.debug_send_recv",
            "schedule.profile_schedule",
            "schedule.data_batch_warn_time_ms",
        ),
        ("logs of Fast-LLM's schedule", Use.RECORDS),
    ),
    "optimizer": ("a setting of Fast-LLM's optimizer", Use.COMPUTES),
    "model.multi_stage": ("a setting inside Fast-LLM's stages", Use.PLACES),
    "model.distributed": ("the launcher of the target stack starts the processes", Use.RECORDS),
    "model.distributed.use_cuda": ("the device that computes", Use.FORM),
    **{
        f"model.distributed.{name}": (
            "a setting of Fast-LLM's random number generators",
            Use.SAMPLES,
        )
        for name in (
            "dp_seed_shift",
            "pp_seed_shift",
            "pp_gen_seed_shift",
            "pp_gen_init_seed_shift",
            "tp_seed_shift",
            "tp_gen_seed_shift",
            "tp_gen_init_seed_shift",
            "sample_seed_shift",
            "train_seed_shift",
            "reproducible_init",
        )
    },
    "pretrained": (
        "the training script of the target stack sets the checkpoint to start from",
        Use.STARTS,
    ),
    "reference_models": (
        "the training script of the target stack sets further models",
        Use.COMPUTES,
    ),
    "callbacks": ("the training script of the target stack sets callbacks", Use.RECORDS),
    "profiling": ("a setting of Fast-LLM's profiler", Use.WAITS),
}
"""Fields that no plan field stands for, by path or prefix. Each has the reason and the use, from
which the effect on the run follows; the longest matching prefix applies.
"""

OTHER = ("a name that only Fast-LLM uses", Use.RECORDS)


LACKS = {
    "model": "Fast-LLM's model has no setting for this field",
    "parallel": "Fast-LLM has no switch for this field",
    "zero": "Fast-LLM has no switch for this field",
    "precision": "Fast-LLM has no setting for this format",
    "optimizer.update_scale": "Fast-LLM has no Muon",
    "optimizer": "Fast-LLM's optimizer has no setting for this field",
    "adapters": "Fast-LLM's adapters have no setting for this field",
    "run": "Fast-LLM's training loop has no switch for this field",
}
"""Reasons why Fast-LLM lacks the plan fields that no rule above names, by section of the plan."""


@cache
def table() -> tuple[Rule, ...]:
    """Return all rules. Each field of Fast-LLM and each plan field is in exactly one rule."""
    rules = (
        model.RULE,
        *parallel_rules(),
        *stage_rules(),
        *batch.RULES,
        ZERO,
        *exchange_rules(),
        PRECISION,
        FROZEN,
        LOSS_SCALE,
        WINDOW,
        FLOOR,
        *optimizer_rules(),
        learning_rate.RULE,
        *run_length.RULES,
        *debug_rules(),
        *missing_rules(),
        *habits.RULES,
    )
    return complete_rules(
        rules, LACKS, fields(FastLLM), lambda path: Why(*longest(path, SECTIONS, OTHER))
    )
