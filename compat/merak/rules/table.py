"""The table of rules between Merak's settings and `Plan`, one rule for each group of fields."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import log2

from bridge.plan.section import fields
from bridge.stack.rules import (
    Context,
    Effect,
    Group,
    Rule,
    Use,
    Why,
    always,
    complete_rules,
    convert,
    lacks,
    longest,
    nothing,
    only_ours,
    plain_adam,
    rename,
    spare_parameters,
)
from bridge.stack.words import above, among, either, give, has_field, has_value, no, of, on
from compat.merak import habits
from compat.merak.habits import automatic
from compat.merak.releases import REWRITTEN, ULYSSES
from compat.merak.rules import run_length
from compat.merak.rules.learning_rate import RULE as LEARNING_RATE
from compat.merak.schema import Merak

BF16 = "2.2.2"
"""First release that reads bf16. Earlier releases accept the argument and ignore it."""
LEVEL = "args.tp_overlapping_level"
LAYOUT = "another arrangement of ranks computes the same sums in another order"
SHARDS = "Merak distributes shards of a traced graph over stages, not layers, and cannot express layer boundaries"


def model_rules() -> tuple[Rule, ...]:
    """Return the rules for the model."""
    note = "Merak reads this value from the model's own config unless the argument is given"
    pairs = (
        ("num_layers", "layers"),
        ("hidden_size", "hidden"),
        ("num_heads", "heads"),
        ("seq_length", "sequence"),
    )
    source = "merak_args/args.py: mergeargs"
    return (
        *(
            rename(f"args.{theirs}", f"model.{ours}", effect=Effect.NONE, note=note, source=source)
            for theirs, ours in pairs
        ),
        convert(
            "args.no_tie_modules",
            "model.tied",
            give("model.tied", False, on("args.no_tie_modules")),
            _write_tied,
            lossy=(
                "Merak ties weights of equal shape if the model ties them; only no_tie_modules"
                " prevents it"
            ),
            source="core/merak_engine.py: tie_modules",
        ),
        run_length.split(
            "args.init_method_std", "model.init.std", "core/pipeline/module.py: init_method_std"
        ),
        only_ours(*OWN_FACTS, note="the model's own config sets this field", effect=Effect.NONE),
    )


OWN_FACTS = ("model.kv_heads", "model.ffn", "model.vocab", "model.experts")


def _write_tied(values: Group, context: Context) -> Group:
    tied = values.get("model.tied")
    return {} if tied is None else {"args.no_tie_modules": not tied}


def _read_sequence(values: Group, context: Context) -> Group:
    # One argument, two meanings: Ulysses over ranks of their own on main, tokens of tensor ranks
    # before.
    if context.since(ULYSSES):
        return {"parallel.context": values.get("init.sp"), "parallel.sequence": False}
    split = bool(values.get("args.sequence_parallel")) and (values.get("init.tp") or 1) > 1
    return {"parallel.context": 1, "parallel.sequence": split}


def _write_sequence(values: Group, context: Context) -> Group:
    ranks = values.get("parallel.context")
    if context.since(ULYSSES):
        return {"init.sp": ranks, "args.sequence_parallel": ranks > 1} if ranks else {}
    split = bool(values.get("parallel.sequence")) and (values.get("parallel.tensor") or 1) > 1
    return {"args.sequence_parallel": split} if values.get("parallel.sequence") is not None else {}


SEQUENCE = convert(
    ("init.sp", "args.sequence_parallel"),
    ("parallel.context", "parallel.sequence"),
    _read_sequence,
    _write_sequence,
    effect=Effect.ROUNDING,
    sees=("init.tp", "parallel.tensor"),
    carries={
        "init.sp": "parallel.context",
        "args.sequence_parallel": ("parallel.context", "parallel.sequence"),
    },
    lossy=(
        "Merak's main branch splits sequences over the ranks of init(sp=) by all-to-all (Ulysses);"
        " releases up to 2.2.2 split them over tensor ranks"
    ),
    source="initialize.py: init; core/pipeline/module.py: sequence_parallel; up to 2.2.2 core/tensor_parallel/mp_layers.py",
)


def parallel_rules() -> tuple[Rule, ...]:
    """Return the rules for the sizes of the mesh axes."""
    return (
        rename("init.tp", "parallel.tensor", effect=Effect.ROUNDING, note=LAYOUT),
        rename("init.pp", "parallel.pipeline", effect=Effect.ROUNDING, note=LAYOUT),
        SEQUENCE,
        convert(
            LEVEL,
            "parallel.tensor_overlap",
            give("parallel.tensor_overlap", above(LEVEL, 0), has_value(LEVEL)),
            give(
                LEVEL,
                either(on("parallel.tensor_overlap"), 1, 0),
                has_field("parallel.tensor_overlap"),
            ),
            effect=Effect.COST,
            blurs=above(LEVEL),
            lossy="stagebridge does not translate levels of overlap; Merak's level 1 is used",
        ),
        convert(
            (),
            "parallel.context_method",
            give("parallel.context_method", "a2a", above("init.sp")),
            nothing,
            effect=Effect.COST,
            sees=("init.sp",),
            carries={"init.sp": "parallel.context_method"},
            lossy="Merak uses an all-to-all, which exchanges heads for tokens",
            note="Merak uses an all-to-all, which exchanges heads for tokens",
            source="core/sequence_parallel/operation.py",
        ),
        only_ours(
            "parallel.expert",
            "parallel.expert_tensor",
            note="Merak does not split experts",
            effect=Effect.ROUNDING,
        ),
        only_ours(
            "parallel.order",
            note="Merak has one order: tensor ranks vary fastest, then sequence, data and pipeline",
            effect=Effect.COST,
        ),
    )


MICRO, STEPS, DATA = (
    "args.per_device_train_batch_size",
    "args.gradient_accumulation_steps",
    "init.dp",
)


def _read_batch(values: Group) -> Group:
    micro, steps, data = values.get(MICRO), values.get(STEPS), values.get(DATA)
    return {
        "batch.micro": micro,
        "batch.accumulation": steps,
        "batch.global_": micro * steps * data if micro and steps and data else None,
        "parallel.data": data,
    }


BATCH = convert(
    (MICRO, STEPS, DATA),
    ("batch.micro", "batch.accumulation", "batch.global_", "parallel.data"),
    _read_batch,
    give({MICRO: of("batch.micro"), STEPS: of("batch.accumulation"), DATA: of("parallel.data")}),
    carries={
        MICRO: "batch.micro",
        STEPS: "batch.accumulation",
        DATA: ("batch.global_", "parallel.data"),
    },
    source="utils/parameters.py: total_batch_size = micro x accumulation x data",
)


PARTITIONS = {
    "uniform": "even",
    "uniform_floor": "even",
    "parameters": "parameters",
    "autopipe": "parameters",
    "custom": "even",
}
OWN_PARTITIONS = ("autopipe", "custom")
PAIRED = ("1f1b", "ds_default")
CRITICAL = "shifted_critical_path"
ORDERS = {
    "1f1b": "1f1b",
    "ds_default": "1f1b",
    "pre_recompute_1f1b": "pre_recompute_1f1b",
    "last_no_recompute_1f1b": "last_no_recompute_1f1b",
    CRITICAL: CRITICAL,
    "full_critical_path_1f1b": CRITICAL,
}
"""The plan's name for each value of train_schedule."""


def _read_order(values: Group) -> Group:
    """Return the plan's schedule for Merak's train_schedule. If no layers are recomputed, the
    critical-path schedule differs from 1F1B in a single step, and the plan gets 1F1B.
    """
    if not _has_pipeline(values.get("init.pp")):
        return {}
    name, words = (
        ORDERS[values["args.train_schedule"]],
        values.get("args.activation_checkpoint_ratio") or (),
    )
    again = bool(values.get("args.checkpoint_num_layers")) and len(words) == 1
    return {"schedule.name": "1f1b" if name == CRITICAL and not again else name}


def _write_order(values: Group) -> Group:
    """Return the train_schedule for the plan's schedule: the same variant of 1F1B if Merak accepts
    the variant, else plain 1F1B.

    For a variant Merak needs enough micro batches. The critical-path variant also needs a ratio of
    recomputed layers.
    """
    name, ranks, steps = (
        values.get("schedule.name"),
        values.get("parallel.pipeline") or 1,
        values.get("batch.accumulation") or 0,
    )
    if not name or not _has_pipeline(ranks):
        return {}
    again = (
        values.get("recompute.granularity") == "full" and values.get("recompute.ratio") is not None
    )
    fits = name in ORDERS and steps >= ranks and (name != CRITICAL or (steps >= 4 and again))
    return {"args.train_schedule": name if fits else "1f1b"}


def stage_rules() -> tuple[Rule, ...]:
    """Return the rules for the stages and the pipeline schedule."""
    one = "Merak runs 1F1B with one stage on each rank"
    return (
        convert(
            ("args.partition_method", "args.custom_partition"),
            ("stages.rule", "stages.boundaries", "stages.layers_per_stage"),
            lambda values, context: (
                {"stages.rule": PARTITIONS[values["args.partition_method"]]}
                if _has_pipeline(values.get("init.pp"))
                else {}
            ),
            _write_partition,
            effect=Effect.COST,
            sees=("init.pp", "parallel.pipeline"),
            carries={
                "args.partition_method": "stages.rule",
                "args.custom_partition": "stages.boundaries",
            },
            lossy=SHARDS,
            blurs=among("args.partition_method", *OWN_PARTITIONS),
            source="core/pipeline/layers_partition.py",
        ),
        convert(
            "args.train_schedule",
            "schedule.name",
            _read_order,
            _write_order,
            effect=Effect.COST,
            sees=(
                "init.pp",
                "args.checkpoint_num_layers",
                "args.activation_checkpoint_ratio",
                "parallel.pipeline",
                "batch.accumulation",
                "recompute.granularity",
                "recompute.ratio",
            ),
            lossy=(
                "Merak's schedules are all variants of 1F1B, which differ in the messages that they"
                " combine and in the time of recomputation"
            ),
            blurs=no(among("args.train_schedule", *PAIRED)),
            source="core/merak_engine.py: scheduler_method; core/pipeline/schedule.py",
        ),
        only_ours(
            "schedule.virtual",
            "schedule.group",
            "schedule.depth_first",
            "schedule.breadth_first",
            "schedule.csv",
            "schedule.overlap",
            note=one,
            effect=Effect.COST,
        ),
    )


def _has_pipeline(ranks: int | None) -> bool:
    return (ranks or 1) > 1


def _write_partition(values: Group) -> Group:
    rule = values.get("stages.rule")
    if rule is None or not _has_pipeline(values.get("parallel.pipeline")):
        return {}
    # Not uniform: its boundaries exceed the last shard unless pp divides their number
    # (module_utils.py: partition_uniform).
    return {"args.partition_method": "parameters" if rule == "parameters" else "uniform_floor"}


ZERO_FIELDS = ("args.zero_stage", "args.zero_optimization")
REDUCE_BUCKET, GATHER_BUCKET = "args.zero_reduce_bucket_size", "args.zero_allgather_bucket_size"


def has_zero(values: Group, context: Context) -> bool:
    """Return whether ZeRO is on."""
    return values.get("args.zero_stage") == 1 and (
        context.since(REWRITTEN) or bool(values.get("args.zero_optimization"))
    )


def zero_rules() -> tuple[Rule, ...]:
    """Return the rules for sharding over data ranks."""
    return (
        convert(
            ZERO_FIELDS,
            "zero.stage",
            lambda values, context: {"zero.stage": int(has_zero(values, context))},
            _write_zero,
            effect=Effect.COST,
            carries={"args.zero_optimization": "zero.stage"},
            lossy="Merak shards only optimizer state (ZeRO stage 1)",
            source="core/zero/stage1.py; release 1.1.1: merak_trainer.py, zero_config",
        ),
        convert(
            (REDUCE_BUCKET, GATHER_BUCKET),
            ("zero.bucket", "zero.gather_bucket"),
            _read_bucket,
            _write_bucket,
            effect=Effect.COST,
            sees=(*ZERO_FIELDS, "zero.stage"),
            carries={REDUCE_BUCKET: "zero.bucket", GATHER_BUCKET: "zero.gather_bucket"},
            blurs=no(among("args.zero_stage", 1)),
            lossy="Merak reads the bucket sizes only with ZeRO",
            source="core/zero/stage1.py: configure_zero_optimizer; sizes are counted in elements",
        ),
        convert(
            PRESCALED,
            ("zero.prescale", "zero.predivide"),
            effect=Effect.ROUNDING,
            carries=dict(zip(PRESCALED, ("zero.prescale", "zero.predivide"), strict=True)),
            source="core/zero/stage1.py: average_tensor",
        ),
        always(
            "zero.overlap", False, "Merak reduces gradients after the backward pass", Effect.COST
        ),
        always("zero.overlap_gather", False, "Merak gathers weights after the update", Effect.COST),
        always(
            "zero.offload.optimizer",
            "none",
            "Merak keeps optimizer state on the device",
            Effect.COST,
        ),
        always("zero.offload.parameters", "none", "Merak keeps weights on the device", Effect.COST),
        only_ours(
            "zero.offload.optimizer_ratio",
            note="Merak keeps optimizer state on the device",
            effect=Effect.COST,
        ),
        only_ours(
            "zero.weight_buffers",
            "zero.grad_buffers",
            note=("Merak has no setting for the number of buffers"),
            effect=Effect.COST,
        ),
        only_ours(
            "zero.replicas", note="Merak shards over all data-parallel ranks", effect=Effect.COST
        ),
    )


def _write_zero(values: Group, context: Context) -> Group:
    on = (values.get("zero.stage") or 0) > 0
    if context.since(REWRITTEN):
        return {"args.zero_stage": 1} if on else {}
    return {"args.zero_optimization": on, **({"args.zero_stage": 1} if on else {})}


def _read_bucket(values: Group, context: Context) -> Group:
    on = has_zero(values, context)
    return (
        {"zero.bucket": values.get(REDUCE_BUCKET), "zero.gather_bucket": values.get(GATHER_BUCKET)}
        if on
        else {}
    )


def _write_bucket(values: Group, context: Context) -> Group:
    if not values.get("zero.stage"):
        return {}
    # An open gather bucket means the same size as the other one.
    bucket = values.get("zero.bucket")
    gather = values.get("zero.gather_bucket") or bucket
    return {REDUCE_BUCKET: bucket or None, GATHER_BUCKET: gather or None}


PRESCALED = ("args.prescale_gradients", "args.gradient_predivide_factor")


HALF_PRECISION = ("args.fp16", "args.bf16", "args.half_precision_backend", "args.fp16_opt_level")


def compute(values: Group, context: Context) -> str:
    """Return the number format in which the release trains."""
    if values.get("args.fp16"):
        return "fp16"
    if values.get("args.bf16") and context.since(BF16):
        return "bf16"
    return "fp16" if automatic(values) else "fp32"


def _read_precision(values: Group, context: Context) -> Group:
    format = compute(values, context)
    in_half = has_zero(values, context) and context.since(REWRITTEN)
    return {
        "precision.compute": format,
        "precision.master": "bf16" if format == "bf16" else "fp32",
        "precision.reduce": "fp16" if in_half else format,
        "precision.moments": ("bf16", "bf16") if format == "bf16" else None,
    }


def _write_precision(values: Group, context: Context) -> Group:
    format = values.get("precision.compute")
    if format is None:
        return {}
    return {"args.fp16": format == "fp16", "args.bf16": format == "bf16" and context.since(BF16)}


PRECISION = convert(
    HALF_PRECISION,
    ("precision.compute", "precision.master", "precision.reduce", "precision.moments"),
    _read_precision,
    _write_precision,
    sees=ZERO_FIELDS,
    carries={"args.half_precision_backend": "precision.compute", "args.fp16_opt_level": ()},
    lossy=(
        "Merak trains in fp16 with fp32 master weights, in bf16 (from 2.2.2 on) without master"
        " weights, or in fp32; Merak reduces gradients in the training format, but with ZeRO in"
        " fp16; stagebridge translates automatic mixed precision to fp16"
    ),
    mixed=True,
    blurs=automatic,
    note="a level of Apex mixed precision",
    source="core/amp/amp_engine.py; core/merak_engine.py: communication_data_type; core/zero/stage1.py: communication_data_type",
)


SCALES = ("static", "initial", "hysteresis")
FIXED_HYSTERESIS = 2
TORCH_SCALER = {
    "precision.loss_scale.initial": 65536.0,
    "precision.loss_scale.hysteresis": FIXED_HYSTERESIS,
}
TORCH_WINDOW = 2000
TORCH_FLOOR = {"precision.loss_scale.minimum": 1.0, "precision.loss_scale.final": False}
"""Plan fields for the smallest loss scale in torch's automatic mixed precision. As in Merak's fp16,
an overflow at this scale does not end the run.
"""

SCALED = ("args.fp16", "args.half_precision_backend", "precision.compute")


def _effect_of_scale(values: Group) -> Effect:
    return Effect.NUMBERS if values.get("args.fp16") or automatic(values) else Effect.NONE


def _read_window(values: Group, context: Context) -> Group:
    if values.get("args.fp16"):
        window = values["args.loss_scale_window"]
    elif automatic(values):
        window = TORCH_WINDOW
    else:
        return {}
    # ZeRO has a scaler of its own, which doubles at the end of the window; Merak's doubles one good
    # step later.
    return {
        "precision.loss_scale.window": window,
        "precision.loss_scale.late": not has_zero(values, context),
    }


WINDOW = convert(
    "args.loss_scale_window",
    ("precision.loss_scale.window", "precision.loss_scale.late"),
    _read_window,
    give(
        "args.loss_scale_window",
        of("precision.loss_scale.window"),
        among("precision.compute", "fp16"),
    ),
    effect=_effect_of_scale,
    sees=(*SCALED, *ZERO_FIELDS),
    lossy="with ZeRO, Merak's loss scale doubles at the end of the loss-scale window; without ZeRO, one step later",
    source="core/amp/fp16_optimizer.py: _update_scale; core/zero/utils.py: DynamicLossScaler.update_scale",
)


def _read_floor(values: Group) -> Group:
    """Return the plan's fields for the smallest loss scale. Neither Merak nor torch ends the run if
    a step overflows at this scale. In torch's scaler the smallest scale is fixed.
    """
    if not values.get("args.fp16"):
        return TORCH_FLOOR if automatic(values) else {}
    minimum = float(values["args.min_loss_scale"])
    return {"precision.loss_scale.minimum": minimum, "precision.loss_scale.final": False}


def _write_floor(values: Group) -> Group:
    # The argument is a whole number; a plan's minimum may have a fraction.
    minimum = values.get("precision.loss_scale.minimum")
    return _where_half(values, "args.min_loss_scale", None if minimum is None else round(minimum))


FLOOR = convert(
    "args.min_loss_scale",
    ("precision.loss_scale.minimum", "precision.loss_scale.final"),
    _read_floor,
    _write_floor,
    effect=_effect_of_scale,
    sees=SCALED,
    lossy=(
        "Merak's smallest scale is a whole number, and a step that overflows at this scale is"
        " skipped like any other step that overflows"
    ),
    source="core/amp/fp16_optimizer.py: _update_scale; core/zero/utils.py: DynamicLossScaler.update_scale",
)


def _where_half(values: Group, path: str, value: int | None) -> Group:
    return {path: value} if values.get("precision.compute") == "fp16" else {}


def _read_loss_scale(values: Group, context: Context) -> Group:
    if not values.get("args.fp16"):
        return TORCH_SCALER if automatic(values) else {}
    return {
        "precision.loss_scale.initial": 2.0 ** values["args.initial_scale_power"],
        "precision.loss_scale.hysteresis": FIXED_HYSTERESIS
        if context.since(REWRITTEN)
        else values["args.hysteresis"],
    }


def _write_loss_scale(values: Group, context: Context) -> Group:
    if values.get("precision.compute") != "fp16":
        return {}
    # A static scale has no setting here: Merak's is always dynamic.
    _, initial, hysteresis = (values.get(f"precision.loss_scale.{name}") for name in SCALES)
    return {
        "args.initial_scale_power": None
        if initial is None
        else min(127, max(0, round(log2(initial)))),
        "args.hysteresis": None if context.since(REWRITTEN) else hysteresis,
    }


LOSS_SCALE = convert(
    ("args.loss_scale", "args.initial_scale_power", "args.hysteresis"),
    tuple(f"precision.loss_scale.{name}" for name in SCALES),
    _read_loss_scale,
    _write_loss_scale,
    effect=_effect_of_scale,
    sees=SCALED,
    carries={
        "args.loss_scale": "precision.loss_scale.static",
        "args.initial_scale_power": "precision.loss_scale.initial",
        "args.hysteresis": "precision.loss_scale.hysteresis",
    },
    lossy=(
        "Merak scales the loss only in fp16, always dynamically, starts at a power of two, and has hysteresis 2 from 2.0.0 on"
    ),
    source="core/amp/amp_engine.py: configure_fp16_optimizer, dynamic_loss_args",
)


def _read_optimizer(values: Group) -> Group:
    adafactor = bool(values.get("args.adafactor"))
    moments = {
        "optimizer.betas": (values["args.adam_beta1"], values["args.adam_beta2"]),
        "optimizer.eps": values["args.adam_epsilon"],
    }
    return {
        "optimizer.name": "adafactor" if adafactor else "adamw",
        "optimizer.lr": values["args.learning_rate"],
        "optimizer.weight_decay": values["args.weight_decay"],
        **({} if adafactor else moments),
    }


def _write_optimizer(values: Group) -> Group:
    first, second = values.get("optimizer.betas") or (None, None)
    name = values.get("optimizer.name")
    return {
        "args.adafactor": None if name is None else name == "adafactor",
        "args.learning_rate": values.get("optimizer.lr"),
        "args.adam_beta1": first,
        "args.adam_beta2": second,
        "args.adam_epsilon": values.get("optimizer.eps"),
        "args.weight_decay": values.get("optimizer.weight_decay"),
        # ZeRO refuses optimizers that it was not tested with, such as Adafactor, unless this is
        # set.
        "args.zero_allow_untested_optimizer": True
        if name == "adafactor" and values.get("zero.stage")
        else None,
    }


OPTIMIZER = convert(
    (
        "args.adafactor",
        "args.learning_rate",
        "args.adam_beta1",
        "args.adam_beta2",
        "args.adam_epsilon",
        "args.weight_decay",
        "args.zero_allow_untested_optimizer",
    ),
    (
        "optimizer.name",
        "optimizer.lr",
        "optimizer.betas",
        "optimizer.eps",
        "optimizer.weight_decay",
    ),
    _read_optimizer,
    _write_optimizer,
    carries={
        "args.adafactor": "optimizer.name",
        "args.learning_rate": "optimizer.lr",
        "args.adam_beta1": "optimizer.betas",
        "args.adam_beta2": "optimizer.betas",
        "args.adam_epsilon": "optimizer.eps",
        "args.weight_decay": "optimizer.weight_decay",
        "args.zero_allow_untested_optimizer": (),
    },
    sees=("zero.stage",),
    note="with Adafactor, ZeRO needs this switch",
    lossy="Merak has AdamW and Adafactor; neither decays biases and layer norms",
    source="merak_trainer.py: create_optimizer",
)


CLIP = convert(
    "args.max_grad_norm",
    "optimizer.clip",
    lambda values, context: {
        "optimizer.clip": 0.0
        if switches_clipping_off(values)
        else max(0.0, values["args.max_grad_norm"])
    },
    sees=("args.half_precision_backend", "args.fp16"),
    lossy="0, negative bounds, and any bound under cpu_amp mean no clipping",
    note="except in fp16, Merak bounds the norm of each rank's own gradients, not the global norm",
    source="core/merak_engine.py: _exec_optimizer_step",
)


def switches_clipping_off(values: Group) -> bool:
    """Return whether the backend switches clipping off. Under cpu_amp the engine does not clip
    gradients.
    """
    return values.get("args.half_precision_backend") == "cpu_amp" and not values.get("args.fp16")


def _read_recompute(values: Group) -> Group:
    size = values["args.checkpoint_num_layers"]
    if not size:
        return {"recompute.granularity": "none"}
    words: tuple[str, ...] = values.get("args.activation_checkpoint_ratio") or ()
    # A plan has one share for all stages; one for each stage is lost, which `blurs` tells.
    share = float(words[0]) if len(words) == 1 else None
    return {
        "recompute.granularity": "full",
        "recompute.method": "uniform",
        "recompute.layers": size,
        "recompute.ratio": None if share is None else min(1.0, max(0.0, share)),
    }


def _write_recompute(values: Group) -> Group:
    granularity, ratio = values.get("recompute.granularity"), values.get("recompute.ratio")
    if granularity is None:
        return {}
    if granularity != "full":
        return {"args.activation_checkpointing": False}
    size = (values.get("recompute.layers") or 1) if values.get("recompute.method") != "block" else 1
    return {
        "args.activation_checkpointing": True,
        "args.checkpoint_num_layers": size,
        "args.activation_checkpoint_ratio": None if ratio is None else (repr(float(ratio)),),
    }


RECOMPUTE = convert(
    (
        "args.activation_checkpointing",
        "args.checkpoint_num_layers",
        "args.activation_checkpoint_ratio",
    ),
    ("recompute.granularity", "recompute.method", "recompute.layers", "recompute.ratio"),
    _read_recompute,
    _write_recompute,
    effect=Effect.COST,
    carries={
        "args.activation_checkpointing": "recompute.granularity",
        "args.checkpoint_num_layers": (
            "recompute.granularity",
            "recompute.method",
            "recompute.layers",
        ),
        "args.activation_checkpoint_ratio": "recompute.ratio",
    },
    lossy=(
        "Merak recomputes groups of shards, not of layers, and never only parts of a layer; Merak's"
        " ratio is one number for the first stage, or one number for each stage"
    ),
    blurs=lambda values: len(values.get("args.activation_checkpoint_ratio") or ()) > 1,
    source="core/pipeline/module.py: act_ckpt_interval, act_ckpt_ratio; merak_args/args.py: mergeargs",
)


def other_rules() -> tuple[Rule, ...]:
    """Return the rules for plan fields for which Merak has no setting."""
    return (
        always(
            "loss",
            "mean_of_microbatches",
            "Merak averages over microbatches; the script's loss decides how tokens are averaged",
        ),
        only_ours(
            "optimizer.momentum", note=("AdamW and Adafactor do not have this kind of momentum")
        ),
        *plain_adam(
            "optimizer.nesterov",
            "optimizer.amsgrad",
            "optimizer.bias_correction",
            note="Merak's AdamW has no switch for this field",
        ),
        spare_parameters(
            "args.weight_decay",
            "not_layernorm",
            "Merak excludes only biases and LayerNorm from weight decay, so weights of RMSNorm"
            " decay",
            lossy=(
                "Merak excludes only biases and LayerNorm from weight decay, so weights of RMSNorm"
                " decay"
            ),
            source="merak_trainer.py: create_optimizer, get_parameter_names(model, [nn.LayerNorm])",
        ),
        lacks("optimizer.decay_ramp", "Merak's weight decay is constant"),
        only_ours(
            "recompute.partition",
            "recompute.offload",
            note="Merak does not split saved activations over ranks",
            effect=Effect.COST,
        ),
        only_ours("precision.fp8", note="Merak has no 8-bit matrix products"),
        only_ours(
            "precision.frozen",
            note="Merak keeps frozen weights in the format of the model",
            effect=Effect.COST,
        ),
        only_ours(
            "recompute.kept_microbatches",
            note="Merak recomputes the layers in every micro batch",
            effect=Effect.COST,
        ),
        lacks("debug", "Merak has no per-layer logs", effect=Effect.NONE),
    )


KEPT: tuple[tuple[str, Use, tuple[str, ...]], ...] = (
    (
        "Merak's own method cuts the traced graph into shards",
        Use.PLACES,
        ("split_method", "custom_split_points", "shard_count"),
    ),
    (
        "the way to trace the model is Merak's own",
        Use.RECORDS,
        ("trace_method", "trace_model", "input_names", "cache_sharding", "cache_name"),
    ),
    ("Merak's engine frees sent activations in its own way", Use.PLACES, ("dealloc_pipeoutput",)),
    ("tensor-parallel messages inside Merak's layers", Use.PLACES, ("sequence_dim",)),
    ("a switch of the device's kernels", Use.FORM, ("tf32",)),
    ("a setting of the data loader", Use.PLACES, ("dataloader_pin_memory", "split_inputs")),
    (
        "each stack's trainer has its own evaluation and logs",
        Use.RECORDS,
        (
            "per_device_eval_batch_size",
            "do_train",
            "do_eval",
            "do_predict",
            "eval_iters",
            "return_logits",
        ),
    ),
    (
        "checkpoints are written by Merak's trainer",
        Use.RECORDS,
        ("output_dir", "save", "load_best_model_at_end"),
    ),
    (
        "the checkpoint from which a run starts; a translation of settings does not convert it",
        Use.STARTS,
        ("resume_from_checkpoint",),
    ),
    (
        "generation by Merak's engine",
        Use.RECORDS,
        ("text_generation", "out_seq_length", "temperature"),
    ),
    ("a LoRA adapter that Merak inserts", Use.COMPUTES, ("lora_config", "adapter_name")),
    ("how a rank finds its device", Use.UNREAD, ("local_rank",)),
    ("the device on which a rank runs", Use.FORM, ("no_cuda", "use_cpu")),
)
"""Arguments that no plan field stands for, in groups. Each group has the reason, and the use, from
which the effect on the run follows.
"""
REASONS: Mapping[str, Why] = {
    **{f"args.{name}": Why(note, use) for note, use, names in KEPT for name in names},
    "init.backend": Why(
        "Merak replaces the value by NCCL if torch supports NCCL, else by MPI", Use.UNREAD
    ),
    "trainer": Why("objects of the training script", Use.RECORDS, other=Effect.NUMBERS),
    "tp_lists": Why(
        "in other stacks the model's code defines how each module is split over tensor ranks",
        Use.FORM,
    ),
}
INHERITED = Why(
    "a setting of the Hugging Face trainer, which Merak does not read from 2.0.0 on", Use.UNREAD
)


LACKS = {
    "model": "the model's own config sets this field",
    "parallel.vocabulary": "Merak splits the vocabulary only if `parallel_vocab` is set",
    "parallel.context_method": "Merak uses an all-to-all, which exchanges heads for tokens",
    "parallel.dispatcher": "Merak has no experts",
    "zero": "Merak does not have this switch",
    "precision": "Merak does not have this format",
    "optimizer.update_scale": "Merak has no Muon",
    "optimizer": "Merak has only one learning rate",
    "adapters": "Merak reads adapters from a separate file",
    "recompute.modules": "Merak recomputes whole layers",
    "run": "Merak's trainer does not have this switch",
}
"""Reasons why Merak lacks the plan fields that no rule above names, by section of the plan."""


@cache
def table() -> tuple[Rule, ...]:
    """Return all rules. Each path of Merak and each plan path is in exactly one rule."""
    rules = (
        *model_rules(),
        *parallel_rules(),
        BATCH,
        *stage_rules(),
        *zero_rules(),
        PRECISION,
        LOSS_SCALE,
        WINDOW,
        FLOOR,
        OPTIMIZER,
        CLIP,
        LEARNING_RATE,
        *run_length.RULES,
        RECOMPUTE,
        *other_rules(),
        *habits.RULES,
    )
    return complete_rules(
        rules, LACKS, fields(Merak), lambda path: longest(path, REASONS, INHERITED)
    )
