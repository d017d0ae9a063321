"""The table of rules between DeepSpeed's keys and the fields of `Plan`."""

from __future__ import annotations

from functools import cache
from math import log2, prod

from bridge.errors import ConfigError
from bridge.plan.section import fields
from bridge.stack.rules import (
    EFFECTS,
    Context,
    Effect,
    Group,
    Rule,
    complete_rules,
    convert,
    lacks,
    nothing,
    only_ours,
    rename,
)
from bridge.stack.words import above, among, either, every, give, look_up, no, of, on
from compat.deepspeed import habits
from compat.deepspeed.checks_view import HALF, keeps_wide_masters, steps_on_cpu
from compat.deepspeed.rules import run_length, switches, unmapped as unmapped_settings
from compat.deepspeed.rules.optimizers import ADAM_LIKE, RULES as OPTIMIZERS
from compat.deepspeed.schema import DeepSpeed

BUCKET = 500_000_000
"""Number of elements in a bucket if the plan does not set it. The number is DeepSpeed's own default
(runtime/zero/config.py).
"""


def layout_rules() -> tuple[Rule, ...]:
    """Return the rules for the sizes of the mesh axes. DeepSpeed has no key for most sizes, so the
    script sets them.
    """
    return (
        convert(
            ("code.tensor_parallel", "tensor_parallel.autotp_size"),
            "parallel.tensor",
            # A plan does not tell who splits the layers, so it is
            # written as groups that the script builds.
            give("parallel.tensor", _tensor),
            give("code.tensor_parallel", of("parallel.tensor"), above("parallel.tensor")),
            effect=Effect.ROUNDING,
            lossy=(
                "a plan does not express AutoTP; a DeepSpeed config that is made from a plan needs"
                " tensor-parallel layers in the model's own code"
            ),
        ),
        convert(
            "code.pipeline_stages",
            "parallel.pipeline",
            give("parallel.pipeline", of("code.pipeline_stages", 1)),
            give("code.pipeline_stages", of("parallel.pipeline"), above("parallel.pipeline")),
            effect=Effect.ROUNDING,
            note="PipelineModule(num_stages=)",
        ),
        convert(
            ("code.context_parallel", "sequence_parallel_size"),
            "parallel.context",
            _read_context,
            give(
                "code.context_parallel",
                of("parallel.context"),
                every(no(_cannot_split), above("parallel.context")),
            ),
            effect=Effect.ROUNDING,
            sees=HEADS,
            lossy="a DeepSpeed config that is made from a plan does not set sequence_parallel_size;"
            f" the training script builds the groups of ranks instead; {UNSERVED}",
            note="Ulysses attention: all-to-all over heads, not a ring",
            source="runtime/sequence_parallel/ulysses_sp.py: UlyssesSPAttentionHF; runtime/pipe/topology.py",
        ),
        convert(
            ("code.expert_parallel", "expert_parallel.enabled", "expert_parallel.autoep_size"),
            "parallel.expert",
            give(
                "parallel.expert",
                either(
                    every(on("expert_parallel.enabled"), on("expert_parallel.autoep_size")),
                    of("expert_parallel.autoep_size"),
                    of("code.expert_parallel", 1),
                ),
            ),
            give("code.expert_parallel", of("parallel.expert"), above("parallel.expert")),
            effect=Effect.ROUNDING,
            lossy=(
                "a plan does not express AutoEP; a DeepSpeed config that is made from a plan needs"
                " MoE layers in the model's own code"
            ),
        ),
        only_ours(
            "parallel.expert_tensor",
            note=("DeepSpeed has no separate tensor-parallel size for experts"),
            effect=Effect.ROUNDING,
        ),
        only_ours(
            "parallel.sequence",
            note="DeepSpeed has no sequence parallelism within tensor groups",
            effect=Effect.COST,
        ),
        only_ours("parallel.order", note="DeepSpeed has a fixed order of axes", effect=Effect.COST),
    )


HEADS = ("parallel.pipeline", "parallel.tensor", "model.heads")
UNSERVED = (
    "Ulysses works only without DeepSpeed's pipeline engine, and only if the number of heads is a"
    " multiple of context ranks x tensor ranks; otherwise context ranks become data-parallel ranks"
)
"""The reason why a plan's context parallelism may be lost."""


def _cannot_split(values: Group) -> bool:
    """Return whether DeepSpeed cannot split sequences over the plan's context ranks. This holds in
    a pipeline, and if the number of heads is not a multiple of context ranks x tensor ranks.
    """
    ranks, heads = values.get("parallel.context") or 1, values.get("model.heads")
    if ranks == 1:
        return False
    # Tensor ranks split the heads first; Ulysses then splits those that each of them has left.
    uneven = heads is not None and heads % (ranks * (values.get("parallel.tensor") or 1)) != 0
    return (values.get("parallel.pipeline") or 1) > 1 or uneven


def _tensor(values: Group) -> int:
    return max(
        values.get("code.tensor_parallel") or 1, values.get("tensor_parallel.autotp_size") or 1
    )


def _read_context(values: Group, context: Context) -> Group:
    return {
        "parallel.context": max(
            values.get("code.context_parallel") or 1, values.get("sequence_parallel_size") or 1
        )
    }


PARTITIONS = {"uniform": "even", "parameters": "parameters"}
METHODS = {ours: theirs for theirs, ours in PARTITIONS.items()}
"""Ways to split layers into stages, as a table from the plan's names to PipelineModule's names.
`PARTITIONS` is the table in the other direction.
"""


def pipeline_rules() -> tuple[Rule, ...]:
    """Return the rules for the stages and the schedule of the pipeline engine."""
    one = "DeepSpeed's pipeline engine runs 1F1B with one stage on each rank"
    return (
        convert(
            "code.partition_method",
            ("stages.rule", "stages.boundaries", "stages.layers_per_stage"),
            _read_partition,
            give(
                "code.partition_method",
                look_up(METHODS, "stages.rule", "uniform"),
                above("parallel.pipeline"),
            ),
            effect=Effect.COST,
            sees=("code.pipeline_stages", "parallel.pipeline"),
            lossy="PipelineModule splits layers uniformly, by parameters or by type; it does not"
            " take stage boundaries",
            source="runtime/pipe/module.py: _partition_layers",
        ),
        convert(
            (),
            "schedule.name",
            give("schedule.name", "1f1b", above("code.pipeline_stages")),
            nothing,
            effect=Effect.COST,
            sees=("code.pipeline_stages",),
            note=one,
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


def _read_partition(values: Group, context: Context) -> Group:
    if (values.get("code.pipeline_stages") or 1) == 1:
        return {}
    # PipelineModule's own default is parameters.
    method = (values.get("code.partition_method") or "parameters").lower()
    # "type:block" spreads the layers of that class evenly, as the plan's rule spreads its layers.
    return {"stages.rule": "even" if method.startswith("type:") else PARTITIONS.get(method)}


AXES = (
    "code.tensor_parallel",
    "tensor_parallel.autotp_size",
    "code.pipeline_stages",
    "code.context_parallel",
    "sequence_parallel_size",
)


def _write_batch(values: Group, context: Context) -> Group:
    """Return the batch keys that the plan sets. If context ranks become data-parallel ranks, the
    number of micro batches is left out, and DeepSpeed computes the number.
    """
    micro, steps, whole = (
        values.get(f"batch.{name}") for name in ("micro", "accumulation", "global_")
    )
    anew = bool(whole) and _cannot_split(values)
    if anew and micro and context.world_size:
        data = context.world_size // prod(
            values.get(f"parallel.{axis}") or 1 for axis in ("tensor", "pipeline")
        )
        if whole % (micro * data):
            raise ConfigError(
                f"batch.global_: found {whole}, which is not a multiple of micro batch ({micro}) x"
                f" data ranks ({data}): {UNSERVED}; use a multiple, or fewer ranks"
            )
    return {
        "train_micro_batch_size_per_gpu": micro,
        # More data ranks make fewer micro batches each. DeepSpeed
        # works out the number if it is left out.
        "gradient_accumulation_steps": None if anew else steps,
        "train_batch_size": whole,
    }


def _read_batch(values: Group, context: Context) -> Group:
    micro, steps = (
        values.get("train_micro_batch_size_per_gpu"),
        values.get("gradient_accumulation_steps"),
    )
    total = values.get("train_batch_size")
    data = _data_ranks(values, context)
    # Without a world size the three batch keys together imply the data-parallel ranks.
    if not data and micro and steps and total:
        data = total // (micro * steps)
    return {
        "batch.micro": micro,
        "batch.accumulation": steps,
        # Not DeepSpeed's total: with AutoTP that counts all ranks as data-parallel ranks.
        "batch.global_": micro * steps * data if micro and steps and data else total,
        "parallel.data": data,
    }


BATCH = convert(
    ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"),
    ("batch.micro", "batch.accumulation", "batch.global_", "parallel.data"),
    _read_batch,
    _write_batch,
    sees=(*AXES, "tensor_parallel.tp.tp_size", "parallel.context", *HEADS),
    carries={
        "train_micro_batch_size_per_gpu": "batch.micro",
        "gradient_accumulation_steps": "batch.accumulation",
        "train_batch_size": ("batch.global_", "parallel.data"),
    },
    lossy=(
        "with AutoTP DeepSpeed counts all ranks as data-parallel ranks, so DeepSpeed's"
        " train_batch_size is too large; without batch keys the number of data-parallel ranks is"
        " not known"
    ),
    source="runtime/config.py: _configure_train_batch_size; the mpu gives the number of"
    " data-parallel ranks",
)


def _data_ranks(values: Group, context: Context) -> int | None:
    if context.world_size is None:
        return None
    axes = (
        _tensor(values)
        * (values.get("code.pipeline_stages") or 1)
        * _read_context(values, context)["parallel.context"]
    )
    return context.world_size // axes or None


ENABLED = ("fp16.enabled", "bf16.enabled")


def _sound_stage(stage: int, pipeline: int, half: bool, clip: float) -> int:
    """Return the ZeRO stage nearest to `stage` at which DeepSpeed computes the right numbers."""
    # Pipelines refuse stages 2 and 3.
    highest = 1 if pipeline > 1 else 3
    # Stage 0 makes a step too many in half precision, and in a
    # pipeline it clips by the first stage's norm (`checks`).
    least = 1 if half or (pipeline > 1 and clip > 0) else 0
    return max(least, min(stage, highest))


def _stage(values: Group) -> int:
    half = values.get("precision.compute") in HALF
    return _sound_stage(
        values.get("zero.stage") or 0,
        values.get("parallel.pipeline") or 1,
        half,
        values.get("optimizer.clip") or 0,
    )


def _read_stage(values: Group) -> int:
    half = any(values.get(path) for path in ENABLED)
    stage, pipeline = (
        values.get("zero_optimization.stage") or 0,
        values.get("code.pipeline_stages") or 1,
    )
    return _sound_stage(stage, pipeline, half, values.get("gradient_clipping") or 0)


ZERO = convert(
    "zero_optimization.stage",
    "zero.stage",
    give("zero.stage", _read_stage),
    give("zero_optimization.stage", _stage),
    effect=Effect.COST,
    sees=(
        "code.pipeline_stages",
        *ENABLED,
        "gradient_clipping",
        "parallel.pipeline",
        "precision.compute",
        "optimizer.clip",
    ),
    lossy=(
        "DeepSpeed's pipeline engine accepts only ZeRO stages 0 and 1; in half precision stage 0"
        " makes an extra optimizer step, and in a pipeline stage 0 clips by a wrong norm; stage 1"
        " gives the right numbers"
    ),
    source="checks.py: stage 0; runtime/pipe/engine.py refuses stage 2 and 3",
)


def exchange_rules() -> tuple[Rule, ...]:
    """Return the rules for buckets, overlap and offload in ZeRO."""
    return (
        convert(
            BUCKETS,
            ("zero.bucket", "zero.gather_bucket"),
            write=lambda values, context: {
                BUCKETS[0]: values.get("zero.bucket", BUCKET),
                BUCKETS[1]: values.get("zero.gather_bucket", values.get("zero.bucket", BUCKET)),
            },
            effect=Effect.COST,
            carries=dict(zip(BUCKETS, ("zero.bucket", "zero.gather_bucket"), strict=True)),
        ),
        rename("prescale_gradients", "zero.prescale", source="runtime/engine.py: allreduce_bucket"),
        rename(
            "gradient_predivide_factor",
            "zero.predivide",
            source="runtime/engine.py: allreduce_bucket",
        ),
        convert(
            OVERLAPPED,
            "parallel.tensor_overlap",
            write=give(OVERLAPPED, True, on("parallel.tensor_overlap")),
            effect=Effect.COST,
            source="runtime/tensor_parallel/config.py: tp_overlap_comm",
        ),
        OVERLAP,
        only_ours(
            "zero.overlap_gather",
            note="DeepSpeed has no switch for gathering weights ahead of their use",
            effect=Effect.COST,
        ),
        convert(
            MICS,
            "zero.replicas",
            _read_replicas,
            _write_replicas,
            effect=Effect.COST,
            sees=(
                "zero_optimization.stage",
                "zero.stage",
                "parallel.data",
                "parallel.pipeline",
                *AXES,
                *STAGE_SEES,
            ),
            lossy=(
                "only DeepSpeed's MiCS shards over groups of ranks; MiCS needs ZeRO stage 3 and"
                " was removed after 0.19.6"
            ),
            source="runtime/zero/mics.py: MiCS_Init; runtime/engine.py: mics_shard_size at stage 3",
        ),
        only_ours(
            "zero.weight_buffers",
            "zero.grad_buffers",
            note=(
                "DeepSpeed sets the sizes of buffers as numbers of"
                " elements, not as numbers of stages"
            ),
            effect=Effect.COST,
        ),
        OFFLOAD,
    )


STAGE_SEES = (
    "precision.compute",
    "optimizer.clip",
    *ENABLED,
    "gradient_clipping",
    "code.pipeline_stages",
)


OVERLAPPED = "tensor_parallel.tp_overlap_comm"
BUCKETS = ("zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size")
MICS = "zero_optimization.mics_shard_size"

OVERLAP = convert(
    "zero_optimization.overlap_comm",
    "zero.overlap",
    give(
        "zero.overlap",
        of("zero_optimization.overlap_comm"),
        every(_read_stage, no(above("code.pipeline_stages"))),
    ),
    give(
        "zero_optimization.overlap_comm",
        on("zero.overlap"),
        every(_stage, no(above("parallel.pipeline"))),
    ),
    effect=Effect.COST,
    sees=("zero_optimization.stage", "zero.stage", "parallel.pipeline", *STAGE_SEES),
    lossy="DeepSpeed overlaps gradient reductions with the backward pass only at ZeRO stages 1"
    " to 3 and without a pipeline",
    source="runtime/engine.py: overlap_comm is off with a pipeline; ZeRO stage 0 reduces after the backward pass",
)


def _read_replicas(values: Group, context: Context) -> Group:
    """Return the number of replica groups. It is computed from mics_shard_size, the number of ranks
    in one group. Without MiCS, mics_shard_size is -1.
    """
    size, data = values.get(MICS) or -1, _data_ranks(values, context)
    if size > 0 and data and data % size == 0 and _read_stage(values) == 3:
        return {"zero.replicas": data // size}
    return {}


def _write_replicas(values: Group, context: Context) -> Group:
    replicas, data = values.get("zero.replicas") or 1, values.get("parallel.data") or 1
    if replicas > 1 and data % replicas == 0 and _stage(values) == 3:
        return {MICS: data // replicas}
    return {}


OPTIMIZER_DEVICE, PARAM_DEVICE = (
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
)


def _read_offload(values: Group) -> Group:
    devices = _devices(values)
    optimizer = devices[OPTIMIZER_DEVICE]
    # DeepSpeed splits the optimizer's state between devices only
    # at stage 3 (runtime/zero/config.py, offload_ratio_check).
    ratio = (
        values.get(f"{OPTIMIZER_DEVICE}.ratio")
        if values.get("zero_optimization.stage") == 3
        else None
    )
    return {
        "zero.offload.optimizer": optimizer,
        "zero.offload.optimizer_ratio": ratio if optimizer != "none" else None,
        "zero.offload.parameters": devices[PARAM_DEVICE],
        "zero.offload.pinned": next(iter(_pin_values(values)), None),
    }


def _devices(values: Group) -> dict[str, str]:
    """Return the device of each offload section. A section that DeepSpeed ignores at the config's
    ZeRO stage has the device "none".
    """
    stage = values.get("zero_optimization.stage") or 0
    least = {OPTIMIZER_DEVICE: 1, PARAM_DEVICE: 3}
    return {
        section: (values.get(f"{section}.device") or "none") if stage >= first else "none"
        for section, first in least.items()
    }


def _pin_values(values: Group) -> list[bool]:
    """Return the values of pin_memory in the offload sections that have an effect, without
    repetitions. Two values mean that the sections disagree.
    """
    sections = [section for section, device in _devices(values).items() if device != "none"]
    return list(dict.fromkeys(bool(values.get(f"{section}.pin_memory")) for section in sections))


def _write_offload(values: Group) -> Group:
    # By the stage that is written, which may differ from the plan's: DeepSpeed ignores offload below these stages.
    stage, settings = _stage(values), {}
    pins = values.get("zero.offload.pinned", True)
    if stage >= 1 and (device := values.get("zero.offload.optimizer")) not in (None, "none"):
        settings = {f"{OPTIMIZER_DEVICE}.device": device, f"{OPTIMIZER_DEVICE}.pin_memory": pins}
        if stage == 3:
            settings[f"{OPTIMIZER_DEVICE}.ratio"] = values.get("zero.offload.optimizer_ratio", 1.0)
    if stage == 3 and (device := values.get("zero.offload.parameters")) not in (None, "none"):
        settings |= {f"{PARAM_DEVICE}.device": device, f"{PARAM_DEVICE}.pin_memory": pins}
    return settings


OFFLOAD = convert(
    (
        f"{OPTIMIZER_DEVICE}.device",
        f"{OPTIMIZER_DEVICE}.ratio",
        f"{OPTIMIZER_DEVICE}.pin_memory",
        f"{PARAM_DEVICE}.device",
        f"{PARAM_DEVICE}.pin_memory",
    ),
    (
        "zero.offload.optimizer",
        "zero.offload.optimizer_ratio",
        "zero.offload.parameters",
        "zero.offload.pinned",
    ),
    _read_offload,
    _write_offload,
    effect=Effect.COST,
    sees=("zero_optimization.stage", "zero.stage", "parallel.pipeline", *STAGE_SEES),
    carries={
        f"{OPTIMIZER_DEVICE}.device": "zero.offload.optimizer",
        f"{OPTIMIZER_DEVICE}.pin_memory": "zero.offload.pinned",
        f"{OPTIMIZER_DEVICE}.ratio": "zero.offload.optimizer_ratio",
        f"{PARAM_DEVICE}.device": "zero.offload.parameters",
        f"{PARAM_DEVICE}.pin_memory": "zero.offload.pinned",
    },
    # A plan has one switch for both sections.
    blurs=lambda values: len(_pin_values(values)) > 1,
    lossy=(
        "DeepSpeed offloads the optimizer state only at ZeRO stages 1 to 3, and parameters or a"
        " part of the optimizer state only at stage 3"
    ),
    source="checks.py: DeepSpeed accepts offload at lower stages and ignores it",
)


MASTERS = {name: f"{name}.{name}_master_weights_and_grads" for name in HALF}
MOMENTS = "bf16.bf16_optimizer_states"
NARROW, WIDE = ("bf16", "bf16"), ("fp32", "fp32")


def _compute_format(values: Group) -> str:
    if values.get("bf16.enabled"):
        return "bf16"
    return "fp16" if values.get("fp16.enabled") else "fp32"


def _accumulation_format(values: Group, compute: str) -> str:
    """Return the format in which gradients accumulate. At stage 0 DeepSpeed allows only the model's
    format (engine.py: _do_optimizer_sanity_check).
    """
    format: str | None = values.get("data_types.grad_accum_dtype") if _read_stage(values) else None
    return format or compute


def _read_precision(values: Group, context: Context) -> Group:
    compute = _compute_format(values)
    narrow = (
        compute in HALF and bool(values.get(MASTERS[compute])) and not keeps_wide_masters(values)
    )
    moments = None
    if narrow:
        # Until 0.19.1 Adam on the CPU keeps its moments in fp32 whatever the key says.
        wide = steps_on_cpu(values) and not context.since("0.19.1")
        moments = NARROW if values.get(MOMENTS) and not wide else WIDE
    return {
        "precision.compute": compute,
        "precision.reduce": _accumulation_format(values, compute),
        "precision.master": compute if narrow else "fp32",
        "precision.moments": moments,
    }


def _read_communication(values: Group, context: Context) -> Group:
    """Return the plan's format of gradient reductions. The field stays open if it equals the format
    in which gradients accumulate, or if the run has sequence-parallel ranks, whose reductions have
    a separate key.
    """
    compute = _compute_format(values)
    # Unset, the format is that of training, even if gradients
    # accumulate in fp32 (engine.py: communication_data_type).
    format = values.get("communication_data_type") or compute
    apart = _read_context(values, context)["parallel.context"] > 1
    return (
        {}
        if apart or format == _accumulation_format(values, compute)
        else {"precision.communicate": format}
    )


def _write_communication(values: Group) -> Group:
    # A plan without the field reduces in the format of
    # accumulation, which DeepSpeed does only if told so.
    format = values.get("precision.communicate") or (
        values.get("precision.reduce") if _stage(values) else None
    )
    return {"communication_data_type": format} if format in (*HALF, "fp32") else {}


COMMUNICATION = convert(
    "communication_data_type",
    "precision.communicate",
    _read_communication,
    _write_communication,
    effect=EFFECTS["precision.communicate"],
    # The format depends on what is computed and accumulated in, and those in turn on the stage.
    sees=(
        "fp16.enabled",
        "bf16.enabled",
        "data_types.grad_accum_dtype",
        "zero_optimization.stage",
        "zero.stage",
        "gradient_clipping",
        "optimizer.clip",
        "code.pipeline_stages",
        "parallel.pipeline",
        "code.context_parallel",
        "sequence_parallel_size",
        "precision.compute",
        "precision.reduce",
    ),
    lossy=(
        "DeepSpeed has no fp64; another key sets the format of reductions over sequence-parallel"
        " ranks"
    ),
    source=(
        "runtime/engine.py: communication_data_type, allreduce_bucket, _configure_distributed_model; "
        "runtime/zero/stage_1_and_2.py: allreduce_bucket; runtime/zero/stage3.py: __avg_scatter_grads"
    ),
)


def _write_precision(values: Group, context: Context) -> Group:
    compute, reduce = values.get("precision.compute") or "fp32", values.get("precision.reduce")
    settings: dict[str, object] = {
        "fp16.enabled": compute == "fp16",
        "bf16.enabled": compute == "bf16",
    }
    if _stage(values) and reduce in (*HALF, "fp32"):
        settings["data_types.grad_accum_dtype"] = reduce
    return settings | dict.fromkeys(_narrow_keys(values, settings, context), True)


PRECISION = convert(
    ("fp16.enabled", "bf16.enabled", "data_types.grad_accum_dtype", *MASTERS.values(), MOMENTS),
    ("precision.compute", "precision.reduce", "precision.master", "precision.moments"),
    _read_precision,
    _write_precision,
    sees=(
        "zero_optimization.stage",
        "zero.stage",
        "parallel.pipeline",
        "optimizer.clip",
        "gradient_clipping",
        "code.pipeline_stages",
        f"{OPTIMIZER_DEVICE}.device",
        "zero.offload.optimizer",
        "optimizer.name",
        "optimizer.amsgrad",
        "optimizer.type",
        "optimizer.params.torch_adam",
    ),
    carries={
        "fp16.enabled": "precision.compute",
        "bf16.enabled": "precision.compute",
        "data_types.grad_accum_dtype": "precision.reduce",
        **dict.fromkeys(MASTERS.values(), "precision.master"),
        MOMENTS: "precision.moments",
    },
    mixed=True,
    lossy=(
        "DeepSpeed has no fp64; masters in half precision need ZeRO and either moments in bf16 too,"
        " or Adam on the CPU, and with stage 1 and gradients in fp32 bf16 masters need Adam on the CPU"
    ),
    source=(
        "runtime/engine.py: get_data_types, _do_optimizer_sanity_check; runtime/base_optimizer.py:"
        " _configure_master_weights"
    ),
)


def _narrow_keys(values: Group, settings: Group, context: Context) -> tuple[str, ...]:
    """Return the keys for masters, and moments, in half precision. `settings` are the other keys of
    precision. DeepSpeed refuses or ignores each combination for which there are none.
    """
    compute, stage = values.get("precision.compute") or "", _stage(values)
    if values.get("precision.master") != compute or compute not in HALF or not stage:
        return ()
    offloads = values.get("zero.offload.optimizer") not in (None, "none")
    # An optimizer that the script brings is taken for Adam on the CPU, as when the keys are read.
    adam = values.get("optimizer.name") in (None, *ADAM_LIKE)
    on_cpu = offloads and not values.get("optimizer.amsgrad") and adam
    moments = values.get("precision.moments") or NARROW
    if compute == "fp16":
        fits = on_cpu and (stage == 2 or context.since("0.18.3"))
        return (MASTERS["fp16"],) if fits else ()
    if on_cpu:
        both = moments == NARROW and context.since("0.19.1")
        return (MASTERS["bf16"], MOMENTS) if both else (MASTERS["bf16"],)
    wide = stage == 1 and settings.get("data_types.grad_accum_dtype") == "fp32"
    wide |= offloads and context.since("0.19.1")
    return () if wide or moments != NARROW else (MASTERS["bf16"], MOMENTS)


UNUSED_WINDOW = 1000
"""The plan's loss-scale window if DeepSpeed's window is 0. DeepSpeed accepts 0 only with a constant
scale, which uses no window.
"""

SCALES = ("static", "initial", "hysteresis")


def _effect_of_scale(values: Group) -> Effect:
    return Effect.NUMBERS if values.get("fp16.enabled") else Effect.NONE


def _read_loss_scale(values: Group) -> Group:
    if not values.get("fp16.enabled"):
        return {}
    return {
        "precision.loss_scale.static": values.get("fp16.loss_scale") or None,
        "precision.loss_scale.initial": 2.0 ** (values.get("fp16.initial_scale_power") or 0),
        # The optimizer of stage 0 does not read the key: each overflow halves the scale, as with hysteresis 1.
        "precision.loss_scale.hysteresis": values.get("fp16.hysteresis")
        if values.get("zero_optimization.stage")
        else 1,
    }


def _read_window(values: Group) -> Group:
    if not values.get("fp16.enabled"):
        return {}
    # The scaler asks for a whole window of good steps behind the overflow, and doubles in the
    # step after it. With a constant scale nothing grows, so there is nothing to be late.
    late = None if values.get("fp16.loss_scale") else True
    return {
        "precision.loss_scale.window": values.get("fp16.loss_scale_window") or UNUSED_WINDOW,
        "precision.loss_scale.late": late,
    }


WINDOW = convert(
    "fp16.loss_scale_window",
    ("precision.loss_scale.window", "precision.loss_scale.late"),
    _read_window,
    give(
        "fp16.loss_scale_window",
        of("precision.loss_scale.window"),
        among("precision.compute", "fp16"),
    ),
    effect=_effect_of_scale,
    sees=("fp16.enabled", "fp16.loss_scale", "precision.compute"),
    lossy="DeepSpeed doubles the loss scale one good step later than loss_scale_window says, and"
    " divides that step's gradients by the new scale",
    source="runtime/fp16/loss_scaler.py: DynamicLossScaler.update_scale; runtime/zero/stage_1_and_2.py: step",
)


def _read_floor(values: Group) -> Group:
    if not values.get("fp16.enabled"):
        return {}
    # An overflow at the smallest scale ends the run, unless the scale is constant.
    final = None if values.get("fp16.loss_scale") else True
    return {
        "precision.loss_scale.minimum": values.get("fp16.min_loss_scale"),
        "precision.loss_scale.final": final,
    }


def _write_floor(values: Group, context: Context) -> Group:
    minimum = values.get("precision.loss_scale.minimum")
    if minimum is not None:
        # From 0.19.3 on DeepSpeed refuses a smallest scale of 0.
        minimum = max(1 if context.since("0.19.3") else 0, round(minimum))
    return {"fp16.min_loss_scale": minimum} if values.get("precision.compute") == "fp16" else {}


FLOOR = convert(
    "fp16.min_loss_scale",
    ("precision.loss_scale.minimum", "precision.loss_scale.final"),
    _read_floor,
    _write_floor,
    effect=_effect_of_scale,
    sees=("fp16.enabled", "fp16.loss_scale", "precision.compute"),
    lossy=(
        "DeepSpeed's smallest scale is a whole number, and an overflow at this scale ends the run"
    ),
    source="runtime/fp16/loss_scaler.py: DynamicLossScaler.update_scale, raise_error_at_min_scale",
)


def _write_loss_scale(values: Group) -> Group:
    if values.get("precision.compute") != "fp16":
        return {}
    static, initial, hysteresis = (values.get(f"precision.loss_scale.{name}") for name in SCALES)
    return {
        # 0 asks for a dynamic scale.
        "fp16.loss_scale": static or 0,
        # The key is the exponent: the nearest power of two from 1 on.
        "fp16.initial_scale_power": None if initial is None else max(0, round(log2(initial))),
        "fp16.hysteresis": hysteresis,
    }


LOSS_SCALE = convert(
    ("fp16.loss_scale", "fp16.initial_scale_power", "fp16.hysteresis"),
    tuple(f"precision.loss_scale.{name}" for name in SCALES),
    _read_loss_scale,
    _write_loss_scale,
    effect=_effect_of_scale,
    sees=("fp16.enabled", "precision.compute", "zero_optimization.stage"),
    carries={
        "fp16.loss_scale": "precision.loss_scale.static",
        "fp16.initial_scale_power": "precision.loss_scale.initial",
        "fp16.hysteresis": "precision.loss_scale.hysteresis",
    },
    lossy="DeepSpeed scales the loss only in fp16, and the first scale is a power of two",
    source="runtime/fp16/loss_scaler.py; runtime/fp16/fused_optimizer.py: _update_scale at stage 0",
)


def _read_recompute(values: Group) -> Group:
    has_pipeline = (values.get("code.pipeline_stages") or 1) > 1
    # Both count layers. Only the pipeline engine reads the file's
    # key; elsewhere the model's code calls the function.
    interval = (
        values.get("pipeline.activation_checkpoint_interval")
        if has_pipeline
        else values.get("code.checkpoint_interval")
    )
    if not interval and not values.get("code.checkpointing"):
        return {"recompute.granularity": "none"}
    return {
        "recompute.granularity": "full",
        "recompute.method": "uniform",
        "recompute.layers": interval or 1,
        "recompute.partition": bool(values.get("activation_checkpointing.partition_activations")),
        "recompute.offload": bool(values.get("activation_checkpointing.cpu_checkpointing")),
    }


def _write_recompute(values: Group) -> Group:
    if values.get("recompute.granularity") != "full":
        return {}
    # "block" counts the layers that are recomputed in a stage;
    # DeepSpeed has no such number and recomputes each.
    interval = (
        (values.get("recompute.layers") or 1) if values.get("recompute.method") != "block" else 1
    )
    if (values.get("parallel.pipeline") or 1) > 1:
        # The reentrant form needs inputs with gradients, and token
        # ids have none (pipe/module.py: _is_checkpointable).
        calls: Group = {
            "pipeline.activation_checkpoint_interval": interval,
            "pipeline.use_reentrant": False,
        }
    else:
        calls = {"code.checkpoint_interval": interval, "code.checkpointing": True}
    return {
        **calls,
        "activation_checkpointing.partition_activations": bool(values.get("recompute.partition")),
        "activation_checkpointing.cpu_checkpointing": bool(values.get("recompute.offload")),
    }


RECOMPUTE = convert(
    (
        "pipeline.activation_checkpoint_interval",
        "pipeline.use_reentrant",
        "code.checkpointing",
        "code.checkpoint_interval",
        "activation_checkpointing.partition_activations",
        "activation_checkpointing.cpu_checkpointing",
    ),
    (
        "recompute.granularity",
        "recompute.method",
        "recompute.layers",
        "recompute.partition",
        "recompute.offload",
    ),
    _read_recompute,
    _write_recompute,
    effect=Effect.COST,
    sees=("code.pipeline_stages", "parallel.pipeline"),
    carries={
        "pipeline.use_reentrant": (),
        "activation_checkpointing.partition_activations": "recompute.partition",
        "activation_checkpointing.cpu_checkpointing": "recompute.offload",
    },
    lossy=(
        "DeepSpeed recomputes groups of whole layers; it has no selective recomputation, and no"
        " fixed number of recomputed layers in a stage"
    ),
    note="reentrant recomputation in DeepSpeed's pipeline engine fails if the first layer takes token ids",
    source=(
        "runtime/pipe/module.py: _is_checkpointable; activation_checkpointing has an effect only if"
        " the model calls deepspeed.checkpointing"
    ),
)


NO_FP8 = "DeepSpeed has no 8-bit matrix products"


def missing_rules() -> tuple[Rule, ...]:
    """Return the rules for plan fields for which DeepSpeed has no setting."""
    return (
        lacks("debug", "DeepSpeed has no per-layer logs", effect=Effect.NONE),
        only_ours(
            "recompute.ratio",
            note="DeepSpeed recomputes groups of whole layers",
            effect=Effect.COST,
        ),
        only_ours("precision.fp8", note=NO_FP8),
        only_ours(
            "precision.frozen",
            note="DeepSpeed keeps frozen weights in the format of the model",
            effect=Effect.COST,
        ),
        only_ours(
            "recompute.kept_microbatches",
            note="DeepSpeed recomputes the layers in every micro batch",
            effect=Effect.COST,
        ),
        convert(
            "code.loss",
            "loss",
            give("loss", of("code.loss", "mean_of_microbatches")),
            # Written by nobody: the script that DeepSpeed's file goes to takes the mean, or the Trainer.
            nothing,
            note="DeepSpeed averages over microbatches; the loss function in the script decides how"
            " tokens are averaged",
            source="runtime/engine.py: backward; transformers: trainer.py, num_items_in_batch",
        ),
    )


LACKS = {
    "model": "the model is defined by the training script",
    "parallel": "DeepSpeed has no key for this field",
    "parallel.dispatcher": (
        "DeepSpeed has a key for this field from 0.19.7 on, but only for experts that AutoEP"
        " inserts"
    ),
    "zero": "DeepSpeed has no key for this field",
    "precision": "DeepSpeed has no key for this field",
    "precision.fp8_recipe": NO_FP8,
    "precision.fp8_weights": NO_FP8,
    "optimizer": "the training script makes the groups of parameters",
    "adapters": "the training script adds adapters to the model",
    "recompute.modules": "DeepSpeed recomputes groups of whole layers",
    "run": "the training script decides",
}
"""Reasons why DeepSpeed lacks the plan fields that no rule in this module names. Each reason
applies to one field or to a section of the plan.
"""


@cache
def table() -> tuple[Rule, ...]:
    """Return all rules. Each key and each plan path is in exactly one rule."""
    rules = (
        BATCH,
        *OPTIMIZERS,
        rename("gradient_clipping", "optimizer.clip"),
        PRECISION,
        COMMUNICATION,
        LOSS_SCALE,
        WINDOW,
        FLOOR,
        ZERO,
        *exchange_rules(),
        *layout_rules(),
        *pipeline_rules(),
        RECOMPUTE,
        *run_length.RULES,
        *switches.RULES,
        *missing_rules(),
        *habits.RULES,
    )
    return complete_rules(rules, LACKS, fields(DeepSpeed), unmapped_settings.why)
