"""The table of rules between settings of a run under accelerate and `Plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.plan.plan import paths
from bridge.plan.section import fields
from bridge.stack.rules import (
    EFFECTS,
    Context,
    Effect,
    Group,
    Rule,
    Use,
    Why,
    complete_rules,
    convert,
    longest,
    only_ours,
    rename,
)
from compat.accelerate.schema import ARGUMENTS as A, FSDP, MEGATRON as M, SCHEMA, SIZES
from compat.accelerate.slots import CHEAP, QUIET

KIND, RANKS, MACHINES = "distributed_type", "num_processes", "num_machines"
TENSOR, STAGED, SPLIT, SHARDED, PARTS = (
    f"{M}{name}"
    for name in (
        *("tp_degree", "pp_degree", "context_parallel_size"),
        *("use_distributed_optimizer", "num_micro_batches"),
    )
)
"""Keys of Megatron-LM that give the mesh, the optimizer's shards, and the micro-batches of a step. Only its
runs have them.
"""
VERSION, STRATEGY, RESHARD = (
    FSDP + "version",
    FSDP + "sharding_strategy",
    FSDP + "reshard_after_forward",
)
AXES = {"dp_replicate_size": "zero.replicas", "dp_shard_size": "parallel.data", "tp_size": "parallel.tensor",
        "cp_size": "parallel.context"}  # fmt: skip
STAGES = {
    "FULL_SHARD": 3,
    "HYBRID_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "HYBRID_SHARD_ZERO2": 2,
    "NO_SHARD": 0,
}
"""The ZeRO level of each strategy of FSDP 1."""


def _read_mesh(values: Group, context: Context) -> Group:
    world, (replicas, _, tensor, split) = (
        values.get(RANKS) or context.world_size,
        [values.get(SIZES + axis) or 1 for axis in AXES],
    )
    tensor, split = tensor * (values.get(TENSOR) or 1), split * (values.get(SPLIT) or 1)
    copies = tensor * split * (values.get(STAGED) or 1)
    found = {
        "parallel.data": world // copies if world and world % copies == 0 else None,
        "parallel.tensor": tensor,
        "parallel.context": split,
        "zero.stage": int(bool(values.get(SHARDED))),
        "zero.replicas": replicas,
    }
    if values.get(KIND) != "FSDP":
        return found
    if values.get(VERSION) == 2:
        return {**found, "zero.stage": 3 if values.get(RESHARD) else 2}
    strategy = str(values.get(STRATEGY))
    # FSDP 1 shards within a machine, and holds a copy on each.
    copies = values.get(MACHINES) or 1 if strategy.startswith("HYBRID") else 1
    return {**found, "zero.stage": STAGES.get(strategy, 3), "zero.replicas": copies}


def _write_mesh(values: Group, context: Context) -> Group:
    data, tensor, split, replicas = (
        values.get(path) or 1
        for path in ("parallel.data", "parallel.tensor", "parallel.context", "zero.replicas")
    )
    world = data * tensor * split if values.get("parallel.data") else context.world_size
    stage = values.get("zero.stage") or 0
    if not stage and tensor * split == 1:
        return {KIND: "NO" if world == 1 else "MULTI_GPU", RANKS: world}
    axes = {"dp_replicate_size": replicas, "dp_shard_size": data // replicas, "tp_size": tensor, "cp_size": split}  # fmt: skip
    many = tensor * split * replicas > 1
    return {
        KIND: "FSDP",
        RANKS: world,
        VERSION: 2,
        RESHARD: stage == 3,
        FSDP + "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        **({SIZES + axis: size for axis, size in axes.items()} if many else {}),
    }


MESH = convert(
    (KIND, RANKS, VERSION, STRATEGY, RESHARD, FSDP + "auto_wrap_policy", *(SIZES + axis for axis in AXES),
     TENSOR, SPLIT, SHARDED),
    ("parallel.data", "parallel.tensor", "parallel.context", "zero.stage", "zero.replicas"),
    _read_mesh,
    _write_mesh,
    effect=Effect.COST,
    sees=(MACHINES, STAGED),
    carries={
        TENSOR: "parallel.tensor",
        SPLIT: "parallel.context",
        SHARDED: "zero.stage",
        **{SIZES + axis: path for axis, path in AXES.items()},
        RANKS: "parallel.data",
        KIND: "zero.stage",
        STRATEGY: ("zero.stage", "zero.replicas"),
        RESHARD: "zero.stage",
        VERSION: (),
        FSDP + "auto_wrap_policy": (),
    },
    lossy="FSDP 2 shards weights and gradients: reshard_after_forward is ZeRO level 3, without it level 2",
    source="accelerate/utils/dataclasses.py: FullyShardedDataParallelPlugin; accelerator.py: prepare_model",
)  # fmt: skip

FORMATS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}


MIXED: Mapping[str, Group] = {
    name: {"precision.compute": name, "precision.master": "fp32", "precision.reduce": reduce, **scale}
    for name, reduce, scale in (
        ("no", "fp32", {"precision.compute": "fp32"}),
        ("bf16", "fp32", {}),
        ("fp16", "fp16", {"precision.loss_scale.initial": 2.0**32, "precision.loss_scale.window": 1000,
                          "precision.loss_scale.hysteresis": 2}),
    )
}  # fmt: skip
"""The formats of Megatron-LM by the precision of a run; its plugin passes no other one on."""


def _precision(values: Group) -> str:
    """Return the precision of a run; the Trainer's own arguments win over accelerate's."""
    return next((name for name in ("fp16", "bf16") if values.get(A + name)), None) or str(
        values.get("mixed_precision") or "no"
    )


def _read_precision(values: Group, context: Context) -> Group:
    name = _precision(values)
    half, sharded = FORMATS.get(name, "fp32"), values.get(KIND) == "FSDP"
    if TENSOR in values:
        return MIXED.get(name, MIXED["no"])
    scaled = {"precision.loss_scale.initial": 65536.0, "precision.loss_scale.window": 2000,
              "precision.loss_scale.hysteresis": 1} if name == "fp16" else {}  # fmt: skip
    return {
        # FSDP computes in its own format; without it, weights stay as they are, under autocast.
        "precision.compute": half if sharded else "fp32",
        "precision.master": "fp32",
        "precision.reduce": half if sharded else "fp32",
        "precision.autocast": None if half == "fp32" else half,
        "precision.fp8": "hybrid" if name == "fp8" else None,
        **scaled,
    }


def _write_precision(values: Group, context: Context) -> Group:
    half = values.get("precision.autocast") or values.get("precision.compute")
    name = {"fp32": "no", "fp16": "fp16", "bf16": "bf16"}.get(str(half))
    return {"mixed_precision": "fp8" if values.get("precision.fp8") else name}


SCALES = tuple(f"precision.loss_scale.{name}" for name in ("initial", "window", "hysteresis"))
PRECISION = convert(
    ("mixed_precision", A + "bf16", A + "fp16"),
    ("precision.compute", "precision.master", "precision.reduce", "precision.autocast", "precision.fp8", *SCALES),
    _read_precision,
    _write_precision,
    sees=(KIND, TENSOR),
    lossy="under accelerate weights are fp32, and FSDP computes and reduces in the format of mixed_precision, under"
    " autocast; the scale of fp16 is torch's own",
    source="accelerate/utils/fsdp_utils.py: fsdp2_prepare_model; accelerator.py: prepare_model",
)  # fmt: skip

MICRO, STEPS = A + "per_device_train_batch_size", A + "gradient_accumulation_steps"


def _read_batch(values: Group, context: Context) -> Group:
    micro, steps = values.get(MICRO), values.get(PARTS) or values.get(STEPS)
    data = _read_mesh(values, context)["parallel.data"]
    return {
        "batch.micro": micro,
        "batch.accumulation": steps,
        "batch.global_": micro * steps * data if micro and steps and data else None,
    }


BATCH = convert(
    (MICRO, STEPS, PARTS),
    ("batch.micro", "batch.accumulation", "batch.global_"),
    _read_batch,
    lambda values, context: {
        MICRO: values.get("batch.micro"),
        STEPS: values.get("batch.accumulation"),
    },
    sees=(
        KIND,
        RANKS,
        VERSION,
        STRATEGY,
        RESHARD,
        MACHINES,
        *(SIZES + axis for axis in AXES),
        *(TENSOR, STAGED, SPLIT, SHARDED),
    ),
    carries={MICRO: "batch.micro", STEPS: "batch.accumulation", PARTS: "batch.accumulation"},
    source="transformers/training_args.py: train_batch_size",
)

OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_apex_fused": "adamw",
              "sgd": "sgd", "adagrad": "adagrad", "adafactor": "adafactor"}  # fmt: skip
BETAS = (A + "adam_beta1", A + "adam_beta2")
DECAY = A + "weight_decay"
PLAIN = {"optimizer.amsgrad": False, "optimizer.bias_correction": True}
SHAPES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
SHAPE, WARMUP, LENGTH, EPOCHS = (
    A + "lr_scheduler_type",
    A + "warmup_steps",
    A + "max_steps",
    A + "num_train_epochs",
)


def _read_schedule(values: Group, context: Context) -> Group:
    name = SHAPES.get(values.get(SHAPE) or "")
    steps, warm = values.get(LENGTH) or 0, values.get(WARMUP) or 0
    if values.get(SHAPE) == "constant":
        warm = 0
    # A number below 1 is a share of the run.
    warmup = int(warm) if warm >= 1 or not warm else -(-warm * steps // 1) if steps > 0 else None
    decays = name in ("linear", "cosine")
    return {
        "optimizer.schedule.name": name,
        "optimizer.schedule.warmup_steps": int(warmup) if name and warmup is not None else None,
        "optimizer.schedule.warmup_from": 0.0 if name and warm else None,
        "optimizer.schedule.total_steps": steps if decays and steps > 0 else None,
        "optimizer.schedule.minimum": 0.0 if decays else None,
        "run.steps": steps if steps > 0 else None,
        "run.epochs": None if steps > 0 else values.get(EPOCHS),
    }


def _write_schedule(values: Group, context: Context) -> Group:
    name, warmup = (values.get(f"optimizer.schedule.{key}") for key in ("name", "warmup_steps"))
    steps = values.get("run.steps") or values.get("optimizer.schedule.total_steps")
    shape = "constant_with_warmup" if name == "constant" and warmup else name
    return {
        SHAPE: shape if shape in SHAPES else None,
        WARMUP: None if warmup is None else float(warmup),
        LENGTH: steps,
        EPOCHS: None if steps else values.get("run.epochs"),
    }


SCHEDULE = convert(
    (SHAPE, WARMUP, LENGTH, EPOCHS),
    (*(f"optimizer.schedule.{name}" for name in ("name", "warmup_steps", "warmup_from", "total_steps", "minimum")),
     "run.steps", "run.epochs"),
    _read_schedule,
    _write_schedule,
    carries={SHAPE: ("optimizer.schedule.name", "optimizer.schedule.minimum"),
             WARMUP: ("optimizer.schedule.warmup_steps", "optimizer.schedule.warmup_from"),
             LENGTH: ("run.steps", "optimizer.schedule.total_steps"), EPOCHS: "run.epochs"},
    blurs=lambda values: values.get(SHAPE) not in (*SHAPES, None),
    lossy="the Trainer's rate rises from 0, falls to 0 at the end of the run, and has few shapes",
    source="transformers/optimization.py; training_args.py: get_warmup_steps",
)  # fmt: skip

OVER_RANKS, PER_TOKEN = A + "average_tokens_across_devices", M + "calculate_per_token_loss"
SUMMED = (
    "accelerate's step gives Megatron-LM the mean of a micro-batch, and with this switch Megatron-LM sums gradients over"
    " ranks in place of averaging them; others take the mean over tokens"
)
OFFLOAD, HOST = FSDP + "offload_params", M + "optimizer_cpu_offload"
CHECKPOINTS = (FSDP + "activation_checkpointing", A + "gradient_checkpointing")
AGAIN = tuple(f"{M}recompute_{name}" for name in ("granularity", "method", "num_layers"))
RECOMPUTE = ("recompute.granularity", "recompute.method", "recompute.layers")


def _read_offload(values: Group, context: Context) -> Group:
    device = "cpu" if values.get(KIND) == "FSDP" and values.get(OFFLOAD) else "none"
    return {
        "zero.offload.parameters": device,
        "zero.offload.optimizer": "cpu" if values.get(HOST) else device,
    }


def _write_offload(values: Group, context: Context) -> Group:
    devices = {
        values.get(path) or "none" for path in ("zero.offload.parameters", "zero.offload.optimizer")
    }
    return {OFFLOAD: True} if devices != {"none"} and values.get("zero.stage") else {}


def _read_recompute(values: Group, context: Context) -> Group:
    if AGAIN[0] in values:
        return {ours: values.get(theirs) for ours, theirs in zip(RECOMPUTE, AGAIN, strict=True)}
    if any(values.get(path) for path in CHECKPOINTS):
        return dict(zip(RECOMPUTE, ("full", "uniform", 1), strict=True))
    return {"recompute.granularity": "none"}


def _write_recompute(values: Group, context: Context) -> Group:
    return (
        {CHECKPOINTS[0 if values.get("zero.stage") else 1]: True}
        if values.get("recompute.granularity") in ("full", "selective")
        else {}
    )


def _every(theirs: str, ours: str) -> Rule:
    """Return the rule for an interval in steps; a number below 1 is a share of the run."""
    return convert(
        theirs,
        ours,
        lambda values, context: {ours: max(1, round(values[theirs]))} if values.get(theirs) else {},
        lambda values, context: {theirs: float(values[ours]) if values.get(ours) else None},
        effect=EFFECTS[ours],
        blurs=lambda values: 0 < (values.get(theirs) or 0) < 1,
        lossy="stagebridge translates only intervals in whole steps",
    )


ALONE: tuple[tuple[str, str, Mapping[Any, Any]], ...] = (
    ("pp_degree", "parallel.pipeline", {}),
    ("expert_model_parallel_size", "parallel.expert", {}),
    ("expert_tensor_parallel_size", "parallel.expert_tensor", {}),
    ("sequence_parallelism", "parallel.sequence", {}),
    ("hidden_dropout", "model.dropout", {}),
    ("attention_dropout", "model.attention.dropout", {}),
    ("no_load_optim", "run.load_optimizer", {True: False, False: True}),
    ("no_save_optim", "run.save_optimizer", {True: False, False: True}),
    ("use_rotary_position_embeddings", "model.embedding.positions", {True: "rotary", False: None}),
    ("eod_mask_loss", "habits.boundaries", {True: "masked", False: "trained"}),
)
"""Keys of Megatron-LM that stand for one field of a plan, with the plan's values where these differ."""
LOSSES = {
    "stages": Effect.COST,
    "schedule": Effect.COST,
    "zero": Effect.COST,
    "parallel": Effect.ROUNDING,
}


def _read_alone(theirs: str, ours: str, words: Mapping[Any, Any]) -> Rule:
    """Return the rule for a key of Megatron-LM that is read and not written; `words` has the plan's values that
    differ.
    """
    return convert(
        theirs,
        ours,
        lambda values, context: (
            {ours: words.get(values[theirs], values[theirs])} if theirs in values else {}
        ),
        lambda values, context: {},
        effect=EFFECTS.get(ours) or longest(ours, LOSSES, Effect.NUMBERS),
        note="accelerate has this for Megatron-LM alone, which stagebridge reads and does not write",
        source="accelerate/utils/dataclasses.py: MegatronLMPlugin",
    )


RULES: tuple[Rule, ...] = (
    MESH,
    PRECISION,
    BATCH,
    SCHEDULE,
    rename(A + "learning_rate", "optimizer.lr"),
    rename(DECAY, "optimizer.weight_decay"),
    rename(A + "adam_epsilon", "optimizer.eps"),
    convert(
        (A + "max_grad_norm", M + "gradient_clipping"),
        "optimizer.clip",
        lambda values, context: {
            "optimizer.clip": values.get(M + "gradient_clipping", values.get(A + "max_grad_norm"))
        },
        lambda values, context: {A + "max_grad_norm": values.get("optimizer.clip")},
        source="transformers/trainer.py: 0 is off",
    ),
    *(_read_alone(M + name, path, words) for name, path, words in ALONE),
    rename(A + "seed", "run.seed"),
    _every(A + "logging_steps", "run.log_interval"),
    _every(A + "save_steps", "run.save_interval"),
    convert(
        BETAS,
        "optimizer.betas",
        lambda values, context: (
            {"optimizer.betas": tuple(values[path] for path in BETAS)}
            if all(values.get(path) is not None for path in BETAS)
            else {}
        ),
        lambda values, context: dict(
            zip(BETAS, values.get("optimizer.betas") or (None, None), strict=True)
        ),
    ),
    convert(
        A + "optim",
        "optimizer.name",
        lambda values, context: {"optimizer.name": OPTIMIZERS.get(values.get(A + "optim") or "")},
        lambda values, context: {
            A + "optim": {ours: theirs for theirs, ours in reversed(OPTIMIZERS.items())}.get(
                values.get("optimizer.name") or ""
            )
        },
        blurs=lambda values: values.get(A + "optim") not in ("adamw_torch", *[*OPTIMIZERS][4:]),
        lossy="the Trainer builds few of the plan's optimizers",
        source="transformers/trainer_optimizer.py",
    ),
    Rule(
        (),
        ("optimizer.decay_scope", *PLAIN),
        lambda values, context: (
            {"optimizer.decay_scope": "matrices", **PLAIN} if DECAY in values else {}
        ),
        lambda values, context: {},
        Effect.NUMBERS,
        note="the Trainer leaves biases and norms out of weight decay, and its AdamW is plain",
        source="transformers/trainer.py: get_decay_parameter_names",
        sees=(DECAY,),
        carries={DECAY: ("optimizer.decay_scope", *PLAIN)},
    ),
    convert(
        (OVER_RANKS, PER_TOKEN),
        "loss",
        # Nobody but the Trainer has the first argument, and it takes the mean over tokens.
        lambda values, context: {
            "loss": "per_token"
            if values.get(PER_TOKEN) or values.get(OVER_RANKS) is not None
            else "mean_of_microbatches"
        },
        lambda values, context: {OVER_RANKS: True} if values.get("loss") == "per_token" else {},
        blurs=lambda values: bool(values.get(PER_TOKEN)) or values.get(OVER_RANKS) is False,
        tells=lambda values: SUMMED if values.get(PER_TOKEN) else "",
        lossy="a plan's mean over tokens is that of all ranks; without this, each rank takes its own",
        note="accelerate divides each loss by the steps of accumulation, the Trainer the sum of losses by tokens",
        source="accelerate/accelerator.py: backward; transformers/trainer.py: num_items_in_batch",
    ),
    convert(
        (OFFLOAD, HOST),
        ("zero.offload.parameters", "zero.offload.optimizer"),
        _read_offload,
        _write_offload,
        effect=Effect.COST,
        sees=(KIND, "zero.stage"),
        carries={HOST: "zero.offload.optimizer"},
        lossy="FSDP moves parameters, gradients and optimizer states to the host together, and has no NVMe",
    ),
    convert(
        (*CHECKPOINTS, *AGAIN),
        RECOMPUTE,
        _read_recompute,
        _write_recompute,
        effect=Effect.COST,
        sees=("zero.stage",),
        carries={
            **dict.fromkeys(CHECKPOINTS, "recompute.granularity"),
            **dict(zip(AGAIN, RECOMPUTE, strict=True)),
        },
        lossy="accelerate and the Trainer recompute whole layers",
    ),
)
SCRIPTS = "accelerate has no setting for this field; the training script decides"
LACKS = dict.fromkeys(
    ("model", "parallel", "stages", "schedule", "zero", "precision", "optimizer", "run", "adapters", "recompute",
     "debug", "loss", "batch"),
    SCRIPTS,
)  # fmt: skip


IDLE = (
    "main_process_ip",
    "main_process_port",
    "num_machines",
    "gpu_ids",
    "use_cpu",
    "command_file",
    "commands",
    M + "recompute_activations",
)
"""Settings of the machines, what such a run does not read, and what the plugin for Megatron-LM keeps to itself."""


def _why(path: str) -> Why:
    cheap = Use.PLACES if CHEAP.fullmatch(path) else Use.COMPUTES
    return Why(
        "a setting of accelerate itself",
        Use.UNREAD if QUIET.fullmatch(path) or path in IDLE else cheap,
    )


def table() -> tuple[Rule, ...]:
    """Return all rules."""
    known = {path for rule in RULES for path in rule.ours}
    rest = (
        only_ours(path, note=SCRIPTS, effect=longest(path, LOSSES, Effect.NUMBERS))
        for path in paths()
        if path not in known and path not in EFFECTS
    )
    return complete_rules((*RULES, *rest), LACKS, fields(SCHEMA), _why)
