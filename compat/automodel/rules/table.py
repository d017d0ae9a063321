"""The table of rules between AutoModel's recipes and `Plan`, one rule for each group of
settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from math import isqrt

from bridge.plan.families.keys import USES
from bridge.plan.section import fields
from bridge.stack.rules import (
    HABITS,
    Context,
    Effect,
    Group,
    Rule,
    Switch,
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
    rename,
    worst,
)
from bridge.stack.words import above, either, every, give, has_value, no, of, off, on, some
from compat.automodel import habits
from compat.automodel.formats import NAMED
from compat.automodel.rules import model, run_length, switches, weight_decay
from compat.automodel.rules.learning_rate import RULE as LEARNING_RATE
from compat.automodel.rules.optimizers import RULE as OPTIMIZER, SWITCHED
from compat.automodel.rules.pipeline import PP, SCHEDULE, STAGES, D, pipeline_ranks, schedule_name
from compat.automodel.schedules import SCHEDULES
from compat.automodel.schema import AutoModel
from compat.automodel.sharding import (
    BUFFERED,
    STRATEGY_SEES,
    running,
    runs_megatron_fsdp,
    selects,
    strategy,
)

MANAGER = "nemo_automodel.components.distributed.fsdp2.FSDP2Manager"


# Mesh


def mesh_rules() -> tuple[Rule, ...]:
    """Return the rules for the sizes of the mesh axes."""
    return (
        _axis_rule("tp_size", "tensor"),
        _axis_rule("pp_size", "pipeline"),
        _axis_rule("cp_size", "context"),
        _axis_rule("ep_size", "expert"),
        convert(
            (),
            "parallel.expert_tensor",
            # Only a plan with expert ranks has a size for them.
            give("parallel.expert_tensor", 1, above(D + "ep_size")),
            nothing,
            effect=Effect.ROUNDING,
            sees=(D + "ep_size",),
            note=(
                "AutoModel does not split a single expert over ranks; its tensor ranks serve as"
                " expert ranks"
            ),
        ),
        convert(
            D + "sequence_parallel",
            "parallel.sequence",
            give("parallel.sequence", every(on(D + "sequence_parallel"), _can_split_norms)),
            lambda values, context: (
                {D + "sequence_parallel": True}
                if values.get("parallel.sequence") and strategy(values, context) == "fsdp2"
                else {}
            ),
            effect=Effect.COST,
            sees=(D + "tp_size", D + "strategy", *STRATEGY_SEES),
            blurs=no(_can_split_norms),
            lossy="only FSDP2's tensor-parallel plan has sequence parallelism in AutoModel",
            source="components/distributed/parallelizer.py: SequenceParallel in the tensor plan, as in Megatron;"
            " megatron_fsdp.py: parallelize passes False",
        ),
        only_ours(
            "parallel.order",
            note="AutoModel's mesh has one order: tensor, context, data, pipeline, fastest first",
            effect=Effect.COST,
        ),
    )


def _axis_rule(theirs: str, ours: str) -> Rule:
    return rename(
        D + theirs,
        f"parallel.{ours}",
        effect=Effect.ROUNDING,
        source="components/distributed/mesh.py: ParallelismSizes",
    )


def _can_split_norms(values: Group) -> bool:
    return (values.get(D + "tp_size") or 1) > 1 and values.get(D + "strategy") == "fsdp2"


# Batch

STEP, PASS, MICRO = (
    "step_scheduler.global_batch_size",
    "step_scheduler.local_batch_size",
    PP + "pp_microbatch_size",
)


def _read_batch(values: Group) -> Group:
    total, data = values.get(STEP), values.get(D + "dp_size")
    local, size = values.get(PASS), values.get(PP + "pp_batch_size")
    # Without a pipeline the local batch is one micro batch; with
    # one it is all that pass the pipeline together.
    micro = values.get(MICRO) if pipeline_ranks(values) > 1 else local
    if pipeline_ranks(values) > 1 and local and size:
        # Packed tokens make a pass of rows, one for each micro
        # batch, and the samples are those of the local batch.
        micro = local * micro // size
    steps = total // (micro * data) if total and micro and data else None
    return {
        "batch.micro": micro,
        "batch.accumulation": steps,
        "batch.global_": total,
        "parallel.data": data,
    }


def _write_batch(values: Group) -> Group:
    micro, steps = values.get("batch.micro"), values.get("batch.accumulation")
    batch = {STEP: values.get("batch.global_"), D + "dp_size": values.get("parallel.data")}
    ranks = values.get("parallel.pipeline") or 1
    if ranks == 1:
        return {**batch, PASS: micro}
    if not micro or not steps:
        return {**batch, MICRO: micro, PASS: None}
    rounds = SCHEDULES[schedule_name(values)].rounds
    # The most micro batches that pass at once: bubbles are fewest
    # then. Torch's schedules with rounds need equal ones.
    counts = (count for count in divisors(steps) if count >= ranks)
    together = next(
        (count for count in counts if not rounds or count % (count // ranks) == 0), steps
    )
    return {**batch, MICRO: micro, PASS: micro * together}


BATCH = convert(
    (STEP, PASS, MICRO, D + "dp_size"),
    ("batch.micro", "batch.accumulation", "batch.global_", "parallel.data"),
    _read_batch,
    _write_batch,
    sees=(
        PP + "pp_batch_size",
        D + "pp_size",
        "parallel.pipeline",
        "schedule.name",
        "schedule.virtual",
        "stages.boundaries",
    ),
    blurs=every(above(D + "pp_size"), no(every(has_value(STEP), has_value(D + "dp_size")))),
    carries={
        STEP: ("batch.global_", "batch.accumulation"),
        PASS: ("batch.micro", "batch.accumulation"),
        MICRO: "batch.micro",
        D + "dp_size": "parallel.data",
    },
    lossy=(
        "in other stacks all micro batches of a step run through the pipeline in one pass; AutoModel may"
        " run several passes in a step"
    ),
    source="recipes/llm/train_ft.py: pp_batch_size is the local batch size; training/step_scheduler.py: grad_acc_steps",
)


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, largest first."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return tuple(dict.fromkeys((*(number // size for size in small), *reversed(small))))


# Sharding

SHARDED = ("zero.stage", "zero.replicas")


def _is_split(name: str | None) -> bool:
    kind = SCHEDULES.get((name or "").lower())
    return kind is not None and kind.split


def _read_zero(values: Group) -> Group:
    kind = running(values)
    if kind == "ddp":
        return {"zero.stage": 0, "zero.replicas": 1}
    if kind == "megatron_fsdp":
        return {"zero.stage": values.get(D + "zero_dp_strategy"), "zero.replicas": 1}
    # FSDP2 shards gradients in any case. Weights that stay
    # gathered after forward are those of ZeRO stage 2.
    breaks = pipeline_ranks(values) > 1 and _is_split(values.get(PP + "pp_schedule"))
    reshards = values.get(D + "reshard_after_forward") and not breaks
    return {
        "zero.stage": 3 if reshards else 2,
        "zero.replicas": values.get(D + "dp_replicate_size"),
    }


MANAGERS = {
    "fsdp2": MANAGER,
    "megatron_fsdp": "nemo_automodel.components.distributed.megatron_fsdp.MegatronFSDPManager",
    "ddp": "nemo_automodel.components.distributed.ddp.DDPManager",
}


def _write_zero(values: Group, context: Context) -> Group:
    kind = strategy(values, context)
    choice = {D + "strategy": kind} if context.since("0.3.0") else {D + "_target_": MANAGERS[kind]}
    if kind == "megatron_fsdp":
        return {**choice, D + "zero_dp_strategy": values.get("zero.stage")}
    if kind == "ddp":
        return choice
    stage, has_pipeline = values.get("zero.stage"), (values.get("parallel.pipeline") or 1) > 1
    # Schedules with a split backward lose gradients if weights are resharded after forward (see `checks`).
    breaks = has_pipeline and values.get("schedule.name") in ("zero_bubble", "zero_bubble_v")
    resharding = {} if stage is None else {D + "reshard_after_forward": stage == 3 and not breaks}
    replicas, data = values.get("zero.replicas"), values.get("parallel.data")
    # AutoModel refuses groups that do not divide the data ranks,
    # and groups of one rank, which would shard nothing.
    if replicas and data and replicas > 1 and (data % replicas or replicas >= data):
        replicas = None
    return {**choice, **resharding, D + "dp_replicate_size": replicas}


ZERO = convert(
    (
        D + "strategy",
        D + "_target_",
        D + "reshard_after_forward",
        D + "zero_dp_strategy",
        D + "dp_replicate_size",
    ),
    SHARDED,
    _read_zero,
    _write_zero,
    effect=Effect.COST,
    sees=(
        "parallel.data",
        D + "pp_size",
        PP + "pp_schedule",
        "parallel.tensor",
        "parallel.pipeline",
        "parallel.context",
        "parallel.expert",
        "schedule.name",
        *BUFFERED,
    ),
    carries={
        D + "_target_": (),
        D + "dp_replicate_size": "zero.replicas",
        D + "reshard_after_forward": "zero.stage",
    },
    blurs=lambda values: (
        values.get(D + "strategy") == "megatron_fsdp" or _is_split(values.get(PP + "pp_schedule"))
    ),
    lossy="with a pipeline or experts AutoModel uses FSDP2, which shards weights and gradients (ZeRO stages 2 and 3)",
    note="the manager class of the older layout",
    source="components/distributed/config.py: reshard_after_forward; ZeRO level 3 breaks schedules with a split backward pass",
)


# Precision

POLICY = D + "mp_policy."
MODEL_DTYPE = "model.torch_dtype"


def read_precision(values: Group) -> Group:
    """Return the number formats of a recipe as fields of the plan."""
    kind = running(values)
    storage = values.get(MODEL_DTYPE)
    storage = None if storage == "auto" else storage
    if kind == "fsdp2":
        # Weights are gathered in one format, and stored and updated in another.
        compute = values.get(POLICY + "param_dtype") or storage
        return {
            **_format_fields(compute, storage, values.get(POLICY + "reduce_dtype") or compute),
            **_read_autocast(values),
        }
    if kind == "ddp":
        return {**_format_fields(storage, storage, storage), **_read_autocast(values)}
    # Megatron-FSDP computes in the stored format, and has a switch for each of the other two.
    reduce = "fp32" if values.get(D + "grad_reduce_in_fp32") else storage
    return _format_fields(
        storage, "fp32" if storage and values.get(D + "preserve_fp32_weights") else storage, reduce
    )


def _read_autocast(values: Group) -> Group:
    return {"precision.autocast": values.get(D + "autocast_dtype")}


def _format_fields(compute: str | None, master: str | None, reduce: str | None) -> Group:
    return {"precision.compute": compute, "precision.master": master, "precision.reduce": reduce}


def _write_precision(values: Group, context: Context) -> Group:
    compute, master, reduce, cast = (
        values.get(f"precision.{name}") for name in ("compute", "master", "reduce", "autocast")
    )
    kind = strategy(values, context)
    if kind == "fsdp2":
        policy = {
            "param_dtype": compute,
            "reduce_dtype": reduce,
            # Weights of one format give outputs of this format without a cast.
            "output_dtype": None if context.since("0.7.0") else compute,
        }
        return {
            MODEL_DTYPE: master,
            D + "autocast_dtype": cast,
            **{POLICY + name: value for name, value in policy.items()},
        }
    if kind == "ddp":
        # DDP has one format for everything. Autocast is its only way to compute in another.
        return {
            MODEL_DTYPE: master,
            D + "autocast_dtype": cast or (compute if compute != master else None),
        }
    return {
        MODEL_DTYPE: compute,
        D + "preserve_fp32_weights": master == "fp32",
        D + "grad_reduce_in_fp32": reduce == "fp32",
    }


PRECISION = convert(
    (
        MODEL_DTYPE,
        POLICY + "param_dtype",
        POLICY + "reduce_dtype",
        POLICY + "output_dtype",
        POLICY + "cast_forward_inputs",
        D + "autocast_dtype",
        D + "grad_reduce_in_fp32",
        D + "preserve_fp32_weights",
    ),
    ("precision.compute", "precision.master", "precision.reduce", "precision.autocast"),
    read_precision,
    _write_precision,
    sees=(D + "strategy", D + "_target_", *STRATEGY_SEES),
    carries={
        MODEL_DTYPE: "precision.master",
        POLICY + "param_dtype": "precision.compute",
        POLICY + "reduce_dtype": "precision.reduce",
        POLICY + "output_dtype": (),
        POLICY + "cast_forward_inputs": (),
        D + "autocast_dtype": "precision.autocast",
        D + "grad_reduce_in_fp32": "precision.reduce",
        D + "preserve_fp32_weights": "precision.master",
    },
    mixed=True,
    note="FSDP2 casts inputs and outputs of a sharded module",
    lossy="AutoModel stores and updates weights in the model's format, and DDP reduces gradients in this format",
    source="docs/guides/mixed-precision-training.md; components/distributed/config.py: mp_policy",
)


# The rest of what both sides know

CHECKPOINTS = D + "activation_checkpointing"


def _read_mode(values: Group, context: Context) -> bool | str:
    granularity = values.get("recompute.granularity")
    if (
        granularity == "selective"
        and context.since("0.5.0")
        and selects(strategy(values, context), context)
    ):
        return "selective"
    return granularity in ("full", "selective")


def _read_recompute(values: Group) -> Group:
    mode = values.get(CHECKPOINTS)
    if mode is True:
        return {
            "recompute.granularity": "full",
            "recompute.method": "uniform",
            "recompute.layers": 1,
        }
    return {"recompute.granularity": "selective" if mode == "selective" else "none"}


RECOMPUTE = convert(
    CHECKPOINTS,
    ("recompute.granularity", "recompute.method", "recompute.layers"),
    _read_recompute,
    lambda values, context: {CHECKPOINTS: _read_mode(values, context)},
    effect=Effect.COST,
    sees=STRATEGY_SEES,
    carries={CHECKPOINTS: ("recompute.granularity",)},
    lossy="AutoModel recomputes either all layers, or parts that it selects itself",
    source="recipes/_dist_utils.py: _normalize_activation_checkpointing",
)


UNBOUND = 1e9
"""A bound on the gradient norm that no run reaches, which stands for no clipping. AutoModel always
clips, and a bound of 0 would stop all learning.
"""


def _is_unbounded(values: Group) -> bool:
    return (values.get("clip_grad_norm.max_norm") or 0) >= UNBOUND


CLIP = convert(
    "clip_grad_norm.max_norm",
    "optimizer.clip",
    give("optimizer.clip", either(_is_unbounded, 0.0, of("clip_grad_norm.max_norm"))),
    give("clip_grad_norm.max_norm", of("optimizer.clip", UNBOUND), has_value("optimizer.clip")),
    lossy="AutoModel always clips: 1e9 means no clipping, and before 0.3.0 the bound is always 1.0",
    blurs=_is_unbounded,
    source="recipes/llm/train_ft.py: max_grad_norm is 1.0 unless given",
)


PACKED, SAMPLE, DATA = "packed_sequence.packed_sequence_size", "dataset.seq_len", "dataset.*"

DOCUMENTS = {"attention": "document", "positions": "document", "boundaries": "masked"}
JOINED = {"attention": "sequence", "positions": "sequence", "boundaries": "trained"}
STREAMS = ("MegatronPretraining", "MegatronPretrainingConfig", "NanogptDataset")
"""Data sets whose sequences are cut from a stream of documents."""


def _read_sequence(values: Group, context: Context) -> Group:
    length = values.get(PACKED) or values.get(SAMPLE)
    name = str((values.get(DATA) or {}).get("_target_") or "").rpartition(".")[2]
    kept = DOCUMENTS if values.get(PACKED) else JOINED if name in STREAMS else {}
    return {"model.sequence": length, **{HABITS + name: value for name, value in kept.items()}}


def _write_sequence(values: Group, context: Context) -> Group:
    # Since 0.4.0 transformers' models refuse packed samples over context ranks.
    refuses = values.get("model.family") is not None and context.since("0.4.0")
    whole = (values.get("parallel.context") or 1) == 1 or not refuses
    packs = whole and values.get(HABITS + "attention") == DOCUMENTS["attention"]
    length = values.get("model.sequence")
    return {SAMPLE: length, **({PACKED: length} if packs else {})}


SEQUENCE = convert(
    (PACKED, SAMPLE),
    ("model.sequence", *(HABITS + name for name in DOCUMENTS)),
    _read_sequence,
    _write_sequence,
    sees=(DATA, "parallel.context", "model.family"),
    # The length at which samples are cut is a setting of the data, which no script of a model brings.
    model=False,
    lossy=(
        "AutoModel keeps documents apart where it packs them, which it does not over context ranks;"
        " without packing its data set decides"
    ),
    source=(
        "recipes/llm/train_ft.py: packed_sequence_size; components/datasets/llm/packed_sequence.py: positions"
        " restart, labels are shifted before; megatron_dataset.py: reset_attention_mask=False; data sets take seq_len"
    ),
)


def _read_async(values: Group) -> Group:
    works = (values.get(D + "tp_size") or 1) > 1 and running(values) == "fsdp2"
    return (
        {"parallel.tensor_overlap": values.get(D + "enable_async_tensor_parallel")} if works else {}
    )


ASYNC = convert(
    D + "enable_async_tensor_parallel",
    "parallel.tensor_overlap",
    _read_async,
    lambda values, context: (
        {D + "enable_async_tensor_parallel": values.get("parallel.tensor_overlap")}
        if (values.get("parallel.tensor") or 1) > 1 and strategy(values, context) == "fsdp2"
        else {}
    ),
    effect=Effect.COST,
    sees=(D + "strategy", D + "_target_", D + "tp_size", *STRATEGY_SEES),
    blurs=no(_read_async),
    lossy="only FSDP2 overlaps tensor-parallel communication",
    source="components/distributed/config.py: FSDP2Config.enable_async_tensor_parallel",
)


SIZES = {"tp_size": "tensor", "pp_size": "pipeline", "cp_size": "context", "ep_size": "expert"}
SWITCHES = (D + "overlap_grad_reduce", D + "overlap_param_gather")


def _read_overlap(values: Group, context: Context) -> Group:
    kind = running(values)
    if kind == "megatron_fsdp":
        # The plan of these settings may be written with another
        # strategy, whose overlap is then the one that the plan has.
        sizes = {f"parallel.{ours}": values.get(D + theirs) for theirs, ours in SIZES.items()}
        buffers = {ours: values.get(theirs) for theirs, ours in switches.BUFFERS.items()}
        kind = strategy(
            {**sizes, **buffers, "zero.stage": values.get(D + "zero_dp_strategy")}, context
        )
    if kind == "ddp":
        # Every rank holds all weights, so nothing is gathered.
        return {"zero.overlap": True}
    if kind == "fsdp2":
        return {"zero.overlap": True, "zero.overlap_gather": True}
    settings = {
        "zero.overlap": values.get(SWITCHES[0]),
        "zero.overlap_gather": values.get(SWITCHES[1]),
    }
    return {path: value for path, value in settings.items() if value is not None}


OVERLAP = convert(
    SWITCHES,
    ("zero.overlap", "zero.overlap_gather"),
    _read_overlap,
    lambda values, context: (
        dict(
            zip(
                SWITCHES,
                (values.get("zero.overlap"), values.get("zero.overlap_gather")),
                strict=True,
            )
        )
        if strategy(values, context) == "megatron_fsdp"
        else {}
    ),
    effect=Effect.COST,
    sees=(
        *(D + name for name in ("strategy", "_target_", "zero_dp_strategy", *SIZES)),
        *switches.BUFFERS,
        *STRATEGY_SEES,
    ),
    blurs=every(runs_megatron_fsdp, some(*map(off, SWITCHES))),
    carries={
        D + "overlap_grad_reduce": "zero.overlap",
        D + "overlap_param_gather": "zero.overlap_gather",
    },
    lossy="FSDP2 and DDP always overlap messages with compute; only Megatron-FSDP has switches for overlaps",
    source="components/distributed/config.py: MegatronFSDPConfig; FSDP2 and DDP reduce during backward",
)


def missing_rules() -> tuple[Rule, ...]:
    """Return the rules for plan fields for which AutoModel has no setting."""
    fsdp = "FSDP2 decides by itself"
    return (
        lacks("debug", "AutoModel has no per-layer logs", effect=Effect.NONE),
        # A constant scale of 1, also in fp16: no recipe builds a scaler.
        always("precision.loss_scale.static", 1.0, "AutoModel does not scale the loss"),
        only_ours(
            *(
                f"precision.loss_scale.{name}"
                for name in ("initial", "window", "hysteresis", "minimum", "late", "final")
            ),
            note="AutoModel does not scale the loss",
        ),
        only_ours(
            "precision.frozen",
            note="AutoModel keeps frozen weights in the format in which they are loaded",
            effect=Effect.COST,
        ),
        only_ours(
            "recompute.kept_microbatches",
            note="AutoModel recomputes the layers in every micro batch",
            effect=Effect.COST,
        ),
        only_ours(
            "recompute.ratio",
            "recompute.partition",
            "recompute.offload",
            note="AutoModel saves or drops the activations of whole layers",
            effect=Effect.COST,
        ),
        only_ours(
            "zero.weight_buffers",
            "zero.grad_buffers",
            "zero.bucket",
            "zero.gather_bucket",
            note=fsdp,
            effect=Effect.COST,
        ),
        *each_only_ours("zero.prescale", "zero.predivide", note="FSDP2 divides gradients once"),
        only_ours(
            "zero.offload.optimizer_ratio",
            note=("FSDP2 offloads either everything or nothing"),
            effect=Effect.COST,
        ),
        only_ours(
            "schedule.group",
            "schedule.depth_first",
            "schedule.breadth_first",
            "schedule.overlap",
            note="torch's schedules choose the order of micro batches",
            effect=Effect.COST,
        ),
        always(
            "loss",
            "per_token",
            "AutoModel divides the sum of losses by the tokens of the whole step",
        ),
    )


OFFLOADED, PINNED = (
    ("zero.offload.optimizer", "zero.offload.parameters"),
    D + "offload_policy.pin_memory",
)
OFFLOAD = convert(
    (D + "offload_policy._target_", D + "offload_policy.pin_memory"),
    (*OFFLOADED, "zero.offload.pinned"),
    lambda values, context: {
        **dict.fromkeys(OFFLOADED, _offload_device(values)),
        # Torch's CPUOffloadPolicy pins host memory by default.
        "zero.offload.pinned": values.get(PINNED) is not False
        if _offload_device(values) == "cpu"
        else None,
    },
    lambda values, context: (
        {PINNED: values.get("zero.offload.pinned") is not False}
        if any(values.get(path) in ("cpu", "nvme") for path in OFFLOADED)
        and strategy(values, context) == "fsdp2"
        else {}
    ),
    effect=Effect.COST,
    sees=STRATEGY_SEES,
    lossy="only FSDP2 offloads, and only to host memory: weights, gradients and optimizer state together",
    source="components/distributed/config.py: FSDP2Config.offload_policy",
)


def _offload_device(values: Group) -> str:
    return (
        "cpu"
        if any(
            values.get(f"{D}offload_policy.{name}") is not None
            for name in ("_target_", "pin_memory")
        )
        else "none"
    )


Weight = Use | Callable[[Group], Effect]


def _if_on(values: Group) -> Effect:
    """Return `NUMBERS` if at least one of the switches in `values` is on, else `NONE`."""
    return Effect.NUMBERS if any(values.values()) else Effect.NONE


def _uses_by_path(places: Mapping[Use, str]) -> Mapping[str, Use]:
    return {key: use for use, keys in places.items() for key in keys.split()}


FREE: Mapping[str, Mapping[str, Use]] = {
    "model.*": _uses_by_path(
        {
            Use.FORM: "attn_implementation use_liger_kernel use_sdpa_patching sdpa_method force_hf experts_implementation",
            Use.PLACES: "low_cpu_mem_usage device_map",
            Use.RECORDS: "trust_remote_code cache_dir local_files_only token",
        }
    ),
    "model.config.*": USES,
    "model.backend.*": _uses_by_path(
        {
            Use.FORM: "rms_norm rope_fusion gate_precision dispatcher",
            Use.PLACES: "enable_deepep dispatcher_num_sms dispatcher_share_token_dispatcher",
            Use.RECORDS: "enable_hf_state_dict_adapter",
        }
    ),
    "optimizer.*": _uses_by_path(
        {
            Use.FORM: "capturable foreach fused master_weights master_weight_dtype store_param_remainders use_decoupled_grad",
            Use.PLACES: "set_grad_none",
            Use.UNREAD: "differentiable",
        }
    ),
    "dataloader.*": _uses_by_path(
        {
            Use.PLACES: "num_workers pin_memory persistent_workers prefetch_factor in_order pin_memory_device",
            Use.CHECKS: "timeout multiprocessing_context",
        }
    ),
    "checkpoint.*": _uses_by_path(
        {
            Use.RECORDS: (
                "checkpoint_dir model_save_format save_consolidated v4_compatible diffusers_compatible staging_dir"
                " model_cache_dir best_metric_key"
            ),
            Use.WAITS: "single_rank_consolidation",
        }
    ),
}
"""Free-form sections, with the use of their known keys. A key without an entry may change the numbers.
"""
ENTROPIES = (
    "MaskedCrossEntropy",
    "ChunkedCrossEntropy",
    "FusedLinearCrossEntropy",
    "TEParallelCrossEntropy",
)
"""Classes that compute the cross entropy of the next token, the loss of every stack."""


def _worst_effect(path: str) -> Callable[[Group], Effect]:
    """Return a function for the worst effect of all keys in the free-form section at `path`."""

    def effect(values: Group) -> Effect:
        uses = (FREE[path].get(key, Use.COMPUTES) for key in values.get(path) or {})
        return worst(use.effect for use in uses)

    return effect


def _compile_effect(values: Group) -> Effect:
    """Return the effect of losing the section `compile`, which is off unless it says otherwise."""
    section = values.get("compile")
    return (
        Effect.ROUNDING if isinstance(section, Mapping) and section.get("enabled") else Effect.NONE
    )


def _loss_effect(values: Group) -> Effect:
    """Return the effect of losing the section `loss_fn`. Cross entropy is the default of every
    stack, so nothing is lost. Any other loss changes the numbers.
    """
    section = values.get("loss_fn")
    name = str(section.get("_target_")).rpartition(".")[2] if isinstance(section, Mapping) else ""
    return Effect.ROUNDING if name in ENTROPIES else Effect.NUMBERS


SECTIONS: dict[str, tuple[str, Weight]] = {
    "distributed": ("a setting of AutoModel's sharding", Use.PLACES),
    "autopipeline": ("a drawing of the schedule", Use.RECORDS),
    "distributed.check_for_nan_in_grad": ("a check without effect", Use.UNREAD),
    "distributed.report_nan_in_param_grad": ("a check of each parameter's gradient", Use.CHECKS),
    "distributed.calculate_per_token_loss": ("how losses are averaged", Use.COMPUTES),
    "distributed.moe.lm_head_precision": ("formats inside the model", Use.FORM),
    "distributed.moe.mp_policy": ("formats inside the model", Use.FORM),
    "distributed.enable_compile": ("torch.compile of the model", Use.FORM),
    **{
        f"distributed.{name}": ("the way in which modules are split over tensor ranks", Use.FORM)
        for name in ("tp_plan", "custom_tp_plan", "use_hf_tp_plan")
    },
    "distributed.mp_policy": ("formats inside the model", Use.FORM),
    "distributed.world_size": ("the launcher decides", Use.UNREAD),
    "processor": ("the processor makes samples of images and text", Use.SAMPLES),
    "step_scheduler": ("the steps at which AutoModel ends, saves and logs", Use.RECORDS),
    "step_scheduler.start_step": ("the point from which a resumed run starts", Use.STARTS),
    "step_scheduler.start_epoch": ("the point from which a resumed run starts", Use.STARTS),
    "lr_scheduler": ("a setting of AutoModel's own scheduler", Use.COMPUTES),
    "optimizer": ("an argument of the optimizer class", Use.COMPUTES),
    "optimizer.*": ("an argument of the optimizer class", _worst_effect("optimizer.*")),
    "optimizer.foreach": ("the kernels of the optimizer's step", Use.FORM),
    "optimizer.fused": ("the kernels of the optimizer's step", Use.FORM),
    "model": ("the choice of the model and of its initial weights", Use.COMPUTES),
    "model.*": ("the choice of the model and of its initial weights", _worst_effect("model.*")),
    "model.config.*": (
        "the choice of the model and of its initial weights",
        _worst_effect("model.config.*"),
    ),
    "model.backend.*": (
        "the implementation of the model's parts",
        _worst_effect("model.backend.*"),
    ),
    "model.backend": ("the implementation of the model's parts", Use.FORM),
    "model.backend.fake_balanced_gate": ("how tokens reach experts", _if_on),
    "model.backend.te_fp8": ("8-bit products", Use.COMPUTES),
    "fp8": ("8-bit products of torchao", Use.COMPUTES),
    "model.backend.enable_fsdp_optimizations": (
        "the way in which stages exchange gradients",
        Use.PLACES,
    ),
    "packed_sequence": ("how samples are packed", Use.SAMPLES),
    "dataset": ("the training data", Use.SAMPLES),
    "dataloader": ("the way in which training data is drawn", Use.SAMPLES),
    "dataloader.*": ("the way in which training data is drawn", _worst_effect("dataloader.*")),
    "peft": ("the choice of the weights that are trained", Use.COMPUTES),
    "freeze_config": ("the choice of the weights that are trained", Use.COMPUTES),
    "autocast": ("torch.autocast of the recipe", Use.COMPUTES),
    "teacher_model": ("distillation", Use.COMPUTES),
    "teacher_distributed": ("distillation", Use.PLACES),
    "compile": ("torch.compile of the model", _compile_effect),
    "rng": ("the way in which random states are kept", Use.SAMPLES),
    "checkpoint": ("AutoModel's checkpoints, and the weights that a run starts from", Use.STARTS),
    "checkpoint.*": ("place and format of AutoModel's checkpoints", _worst_effect("checkpoint.*")),
    "*": ("other sections of a recipe", Use.COMPUTES),
}
"""Sections and settings that no plan field stands for. Each has the reason, and the use, from which
the effect on the run follows.

If several entries match a setting, the longest entry applies.
"""
PIPELINE: tuple[str, Weight] = (
    "the way in which AutoModel splits a model into stages",
    Use.RECORDS,
)
SETTINGS: dict[str, tuple[str, Weight]] = {
    PP + "pp_batch_size": ("recipes overwrite this setting with the local batch size", Use.UNREAD),
    PP + "pp_recv_buffer_pool": ("the number of receive buffers of a stage", Use.PLACES),
    PP + "pp_recv_buffer_pool_slack": ("the number of receive buffers of a stage", Use.PLACES),
    PP + "dtype": ("the format in which stages send activations", Use.FORM),
    PP + "patch_stage_backward_maybe_with_nosync": (
        "the way in which stages exchange gradients",
        Use.PLACES,
    ),
    PP + "scale_grads_in_schedule": ("the setting divides gradients a second time", _if_on),
}
OTHER: tuple[str, Weight] = ("a section of AutoModel's own", Use.RECORDS)


UNDER = {"fp8": Switch("fp8.enabled")}


def _reason_for(path: str) -> Why:
    row = (
        SETTINGS[path]
        if path in SETTINGS
        else PIPELINE
        if path.startswith(PP)
        else longest(path, SECTIONS, OTHER)
    )
    switch = longest(path, UNDER, None)
    return Why(*row, under=None if switch is None or path in switch.paths.split() else switch)


LACKS = {
    "model": "the model's family determines this field",
    "parallel": "AutoModel has no switch for this field",
    "zero": "AutoModel has no switch for this field",
    "precision": "AutoModel has no switch for this field",
    "optimizer.update_scale": "AutoModel has no Muon",
    "optimizer": "AutoModel has factors for patterns of parameter names",
    "recompute.modules": "AutoModel saves or drops the activations of whole layers",
    "run": "AutoModel's recipes have no switch for this field",
}
"""Reasons why AutoModel has no counterpart of plan fields that no rule above claims. If several
entries match a field, the longest entry applies.
"""


CLASS = convert(
    "recipe",
    (),
    nothing,
    lambda values, context: (
        {"recipe": "TrainFinetuneRecipeForNextTokenPrediction"} if context.since(NAMED) else {}
    ),
    effect=Effect.NONE,
    note="the class that runs the recipe; the app refuses a file that names no class",
    source="cli/app.py: main",
)

ENTROPY = convert(
    "loss_fn",
    (),
    nothing,
    give("loss_fn", {"_target_": f"nemo_automodel.components.loss.masked_ce.{ENTROPIES[0]}"}),
    effect=_loss_effect,
    note="how the loss is computed",
    source="recipes/llm/train_ft.py: setup; components/loss/masked_ce.py: MaskedCrossEntropy",
)


@cache
def table() -> tuple[Rule, ...]:
    """Return every rule. Each setting and each plan field belongs to exactly one rule."""
    rules = (
        BATCH,
        OPTIMIZER,
        SWITCHED,
        *switches.RULES,
        *weight_decay.RULES,
        LEARNING_RATE,
        *run_length.RULES,
        CLASS,
        ENTROPY,
        CLIP,
        PRECISION,
        ZERO,
        OFFLOAD,
        *mesh_rules(),
        STAGES,
        SCHEDULE,
        RECOMPUTE,
        OVERLAP,
        ASYNC,
        *model.RULES,
        SEQUENCE,
        *missing_rules(),
        *habits.RULES,
    )
    return complete_rules(rules, LACKS, fields(AutoModel), _reason_for)
