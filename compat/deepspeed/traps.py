"""What DeepSpeed accepts and then ignores or gets wrong: one row for each, with what it does to the run and where it happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from bridge.findings import Finding, Origin
from bridge.rules import Effect
from compat.deepspeed.effective import OFFLOAD, PARAM, SCALE_KEYS, STEPS, TOTAL, ZERO, offloaded, ranks
from compat.deepspeed.releases import KEYS, Release, release

ADAM = ("adam", "adamw")
TESTED = ("adam", "adamw", "adagrad", "lion", "muon")
"""Optimizers that ZeRO takes without a switch (runtime/zero/utils.py, ZERO_SUPPORTED_OPTIMIZERS)."""
HALF = ("fp16", "bf16")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a row looks at: effective values, what was given, the release, and the world size in ranks."""

    values: Mapping[str, Any]
    given: Mapping[str, Any]
    at: Release
    world_size: int | None = None

    def __getitem__(self, path: str) -> Any:
        return self.values.get(path)

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return int(self.values[ZERO + "stage"])

    @property
    def piped(self) -> bool:
        """Whether the layers are split over pipeline ranks."""
        return int(self.values["code.pipeline_stages"]) > 1

    @property
    def precision(self) -> str:
        """The training precision: fp16, bf16 or fp32."""
        return next((name for name in HALF if self[f"{name}.enabled"]), "fp32")

    def wrote(self, *paths: str) -> bool:
        """Whether one of `paths`, or a key below it, was given."""
        return any(key == path or key.startswith(path + ".") for path in paths for key in self.given)


@dataclass(frozen=True, slots=True)
class Trap:
    """One row: the key it is about, when it applies, what to say, what it does to the run, and where it happens."""

    path: str
    when: Callable[[Seen], bool]
    message: str
    effect: Effect
    place: str
    since: str = ""
    until: str = ""

    def applies(self, seen: Seen) -> bool:
        """Whether it bites for this config."""
        return seen.at.within(self.since, self.until) and self.when(seen)


def _dead(path: str, message: str, place: str = "runtime/config.py: parsed, never read") -> Trap:
    return Trap(path, lambda seen: path in seen.given, message, Effect.NONE, place)


def _autotp(seen: Seen) -> bool:
    return (seen["tensor_parallel.autotp_size"] or 0) > 1


def _typed(kind: str) -> Callable[[Seen], bool]:
    section = kind.removesuffix("s")
    return lambda seen: seen[f"{section}.type"] is not None and not seen.at.forms(kind, seen[f"{section}.type"])


def _lr_differs(seen: Seen) -> bool:
    silent = seen["scheduler.type"] == "WarmupLR" and "scheduler.params.warmup_max_lr" not in seen.given
    return silent and seen["optimizer.params.lr"] != 0.001


def _lr_overridden(seen: Seen) -> bool:
    """WarmupDecayLR, and WarmupLR with a rate of its own, set the learning rate whatever the optimizer was given."""
    sets = seen["scheduler.type"] == "WarmupDecayLR" or "scheduler.params.warmup_max_lr" in seen.given
    warms = seen["scheduler.type"] in ("WarmupLR", "WarmupDecayLR")
    peak = seen["scheduler.params.warmup_max_lr"]
    wins = 0.001 if peak is None else peak
    return warms and sets and seen.wrote("optimizer.params.lr") and seen["optimizer.params.lr"] != wins


NOT_THERE = "DeepSpeed fails when it builds the engine"

TRAPS: tuple[Trap, ...] = (
    # Keys that nothing reads
    _dead("pipeline.stages", "no effect; the script's PipelineModule(num_stages=) counts: say code.pipeline_stages"),
    _dead("pipeline.partition", "no effect; the script's PipelineModule(partition_method=) counts: say code.partition_method"),
    _dead("pipeline.seed_layers", "no effect; the script's PipelineModule(seed_layers=) counts"),
    _dead("disable_allgather", "no effect; drop it"),
    _dead("tensor_parallel.tp.tp_size", "no effect; tensor_parallel.autotp_size counts", "runtime/engine.py, autotp_size"),
    _dead(ZERO + "allgather_partitions", "no effect; drop it"),
    _dead(ZERO + "cpu_offload_use_pin_memory", "no effect; use pin_memory in offload_optimizer or offload_param"),
    _dead("fp32_allreduce", "no effect since DeepSpeed 0.6; use communication_data_type"),
    Trap(
        "data_parallel_size",
        lambda seen: "data_parallel_size" in seen.given and "sequence_parallel_size" not in seen.given,
        "no effect without sequence_parallel_size; drop it",
        Effect.NONE,
        "__init__.py: initialize",
    ),
    Trap(
        "sequence_parallel_size",
        lambda seen: seen["sequence_parallel_size"] > 1 and not seen.wrote("data_parallel_size", "code"),
        "the batch arithmetic ignores it before DeepSpeed 0.17.0 unless data_parallel_size stands beside it",
        Effect.NUMBERS,
        "runtime/config.py: world_size",
        until="0.17.0",
    ),
    Trap(
        "optimizer.params",
        lambda seen: seen.wrote("optimizer.params") and seen["optimizer.type"] is None,
        "ignored without optimizer.type; the script's optimizer counts",
        Effect.NUMBERS,
        "runtime/config.py: get_optimizer_params",
    ),
    Trap(
        "scheduler.params",
        lambda seen: seen.wrote("scheduler.params") and seen["scheduler.type"] is None,
        "ignored without scheduler.type; the script's scheduler counts",
        Effect.NUMBERS,
        "runtime/config.py: get_scheduler_params",
    ),
    Trap(
        "pipeline",
        lambda seen: seen.wrote("pipeline.activation_checkpoint_interval") and not seen.piped,
        "no effect without a PipelineModule; say code.pipeline_stages if the script builds one",
        Effect.COST,
        "runtime/pipe/engine.py: the only reader",
    ),
    Trap(
        "activation_checkpointing",
        lambda seen: (
            any(seen.given[key] for key in seen.given if key.startswith("activation_checkpointing."))
            and not (seen["code.checkpointing"] or seen.piped)
        ),
        "no effect unless the model calls deepspeed.checkpointing; say code.checkpointing if it does",
        Effect.COST,
        "runtime/activation_checkpointing/checkpointing.py: configure",
    ),
    # ZeRO settings that a stage ignores
    Trap(
        PARAM,
        lambda seen: seen[PARAM + ".device"] != "none" and seen.stage < 3,
        "ignored below stage 3; drop it or use stage 3",
        Effect.COST,
        "runtime/engine.py: only stage 3 reads it",
    ),
    Trap(
        OFFLOAD,
        lambda seen: offloaded(seen.values) and seen.stage == 0,
        "ignored at stage 0; drop it or use stage 1",
        Effect.COST,
        "runtime/engine.py: only ZeRO optimizers read it",
    ),
    Trap(
        OFFLOAD + ".super_offload",
        lambda seen: bool(seen[OFFLOAD + ".super_offload"]) and seen.stage < 3,
        "ignored below stage 3; drop it or use stage 3",
        Effect.COST,
        "runtime/engine.py: _configure_zero_optimizer",
    ),
    Trap(
        PARAM + ".nvme_path",
        lambda seen: seen[PARAM + ".device"] == "nvme" and not seen[PARAM + ".nvme_path"] and seen.stage == 3,
        f"missing for device nvme: {NOT_THERE}; give a directory",
        Effect.STOPS,
        "runtime/zero/partition_parameters.py",
    ),
    Trap(
        OFFLOAD + ".nvme_path",
        lambda seen: seen[OFFLOAD + ".device"] == "nvme" and not seen[OFFLOAD + ".nvme_path"] and seen.stage == 3,
        f"missing for device nvme: {NOT_THERE}; give a directory",
        Effect.STOPS,
        "runtime/zero/stage3.py",
    ),
    Trap(
        ZERO + "legacy_stage1",
        lambda seen: bool(seen[ZERO + "legacy_stage1"]) and seen.stage > 0,
        f"gone since DeepSpeed 0.5.9: {NOT_THERE}; drop it",
        Effect.STOPS,
        "runtime/engine.py: _configure_zero_optimizer",
    ),
    Trap(
        "prescale_gradients",
        lambda seen: seen["prescale_gradients"] and seen.stage >= 2 and seen[ZERO + "reduce_scatter"],
        f"not possible at stage 2 and 3 with reduce_scatter: {NOT_THERE}; switch one of them off",
        Effect.STOPS,
        "runtime/zero/stage_1_and_2.py, stage3.py",
    ),
    Trap(
        "gradient_predivide_factor",
        lambda seen: seen["gradient_predivide_factor"] != 1 and seen.stage >= 2 and seen[ZERO + "reduce_scatter"],
        f"not possible at stage 2 and 3 with reduce_scatter: {NOT_THERE}; use 1.0",
        Effect.STOPS,
        "runtime/zero/stage_1_and_2.py, stage3.py",
    ),
    # Numbers
    Trap(
        "gradient_clipping",
        lambda seen: "gradient_clipping" not in seen.given,
        "not given: 0.0 (off) before DeepSpeed 0.19.3, 1.0 since; write it out",
        Effect.NUMBERS,
        "runtime/constants.py: GRADIENT_CLIPPING_DEFAULT",
    ),
    Trap(
        ZERO + "stage",
        lambda seen: (
            seen.stage == 0
            and (seen.precision == "fp16" or (seen.precision == "bf16" and not seen.piped))
            and seen["optimizer.type"] in ADAM
        ),
        "stage 0 in half precision takes an optimizer step with zero gradients before training, so Adam's bias correction is one "
        "step ahead; use stage 1",
        Effect.NUMBERS,
        "runtime/fp16/fused_optimizer.py, unfused_optimizer.py: initialize_optimizer_states",
    ),
    Trap(
        "gradient_clipping",
        lambda seen: seen.piped and seen.stage == 0 and seen.precision == "fp32" and seen["gradient_clipping"] > 0,
        "with a pipeline at stage 0 in fp32 the norm leaves out all stages but the first; use stage 1 or gradient_clipping 0",
        Effect.NUMBERS,
        "runtime/utils.py: clip_grad_norm_",
    ),
    Trap(
        "managed_gradient_accumulation",
        lambda seen: (
            bool(seen["code.manual_accumulation"]) and seen.stage in (1, 2) and seen["managed_gradient_accumulation"] is not False
        ),
        "stages 1 and 2 lose the gradients of all but the last backward before a step; set gradient_accumulation_steps, or "
        "(since DeepSpeed 0.19.4) managed_gradient_accumulation to false",
        Effect.NUMBERS,
        "runtime/zero/stage_1_and_2.py: gradients are averaged at the engine's own boundary",
    ),
    Trap(
        "managed_gradient_accumulation",
        lambda seen: (
            seen["managed_gradient_accumulation"] is False
            and (seen.piped or bool(seen["compile.deepcompile"]) or (seen.stage < 2 and bool(seen[ZERO + "overlap_comm"])))
        ),
        f"false does not go with a pipeline, DeepCompile, or overlap_comm below stage 2: {NOT_THERE}",
        Effect.STOPS,
        "runtime/engine.py: _do_sanity_check",
    ),
    Trap(
        TOTAL,
        lambda seen: _autotp(seen) and TOTAL in seen.given,
        "with AutoTP DeepSpeed divides it by all ranks, not by the data-parallel ones, so the batch is smaller by autotp_size; "
        f"give the micro batch and {STEPS} only",
        Effect.NUMBERS,
        "runtime/config.py: built before the tensor-parallel groups",
    ),
    Trap(
        "data_types.grad_accum_dtype",
        lambda seen: seen.stage == 0 and seen["data_types.grad_accum_dtype"] not in (None, seen.precision),
        f"another format than the model's is not possible at stage 0: {NOT_THERE}; use stage 1",
        Effect.STOPS,
        "runtime/engine.py: _do_optimizer_sanity_check",
    ),
    Trap(
        "data_types.param_dtype",
        lambda seen: seen["data_types.param_dtype"] not in (None, seen.precision),
        f"must be the training precision: {NOT_THERE}; drop it",
        Effect.STOPS,
        "runtime/engine.py: _assert_valid_mixed_precision_config",
    ),
    Trap(
        "fp16.initial_scale_power",
        lambda seen: (
            bool(seen["fp16.enabled"])
            and not seen["fp16.loss_scale"]
            and seen.stage > 0
            and not any(path in seen.given for path in SCALE_KEYS)
        ),
        "not given, nor any other scaling key: before DeepSpeed 0.17.1 ZeRO then starts at 2**32 with hysteresis 1; write it out",
        Effect.NUMBERS,
        "runtime/fp16/loss_scaler.py: CreateLossScaler",
        until="0.17.1",
    ),
    # Optimizers and schedulers
    Trap(
        "optimizer.type",
        _typed("optimizers"),
        f"not an optimizer of this release or of PyTorch: {NOT_THERE}",
        Effect.STOPS,
        "runtime/engine.py: _configure_basic_optimizer",
    ),
    Trap(
        "scheduler.type",
        _typed("schedulers"),
        f"not a scheduler of this release or of PyTorch: {NOT_THERE}",
        Effect.STOPS,
        "runtime/engine.py: _scheduler_from_config",
    ),
    Trap(
        "scheduler.type",
        lambda seen: seen["optimizer.type"] is not None and not seen.wrote("scheduler", "code.scheduler"),
        "not given: taken as a constant rate, which DeepSpeed keeps unless the script or a trainer brings a scheduler;"
        " if one does, say it, as in --code scheduler.name=linear --code scheduler.total_steps=1000",
        Effect.NONE,
        "runtime/engine.py: _configure_lr_scheduler",
    ),
    Trap(
        "optimizer.params.max_grad_norm",
        lambda seen: "optimizer.params.max_grad_norm" in seen.given,
        f"not an optimizer parameter: {NOT_THERE}; use gradient_clipping",
        Effect.STOPS,
        "runtime/engine.py: _configure_basic_optimizer",
    ),
    Trap(
        "optimizer.type",
        lambda seen: (
            seen["optimizer.type"] == "adam"
            and "optimizer.params.adam_w_mode" not in seen.given
            and bool(seen["optimizer.params.weight_decay"])
        ),
        "Adam decays weights as AdamW does unless adam_w_mode is false; write adam_w_mode",
        Effect.NUMBERS,
        "runtime/engine.py: _configure_basic_optimizer",
    ),
    Trap(
        "zero_allow_untested_optimizer",
        lambda seen: (
            seen.stage > 0
            and seen["optimizer.type"] not in (None, *TESTED)
            and not seen["zero_allow_untested_optimizer"]
            and bool(seen.at.forms("optimizers", seen["optimizer.type"]))
        ),
        f"ZeRO wants it true for this optimizer: {NOT_THERE}",
        Effect.STOPS,
        "runtime/engine.py: _do_optimizer_sanity_check",
    ),
    Trap(
        "scheduler.params.warmup_max_lr",
        _lr_differs,
        "not given: WarmupLR warms up to 0.001 before DeepSpeed 0.17.2, to the optimizer's rate since; write it out",
        Effect.NUMBERS,
        "runtime/lr_schedules.py: WarmupLR",
    ),
    Trap(
        "optimizer.params.lr",
        _lr_overridden,
        "replaced by the scheduler's warmup_max_lr (0.001 if not given); write the same rate there",
        Effect.NUMBERS,
        "runtime/lr_schedules.py: WarmupLR, WarmupDecayLR",
    ),
    # Pipeline
    Trap(
        ZERO + "overlap_comm",
        lambda seen: seen.piped and bool(seen.given.get(ZERO + "overlap_comm")),
        "ignored with a pipeline; drop it",
        Effect.COST,
        "runtime/engine.py: _configure_zero_optimizer",
    ),
    Trap(
        "steps_per_print",
        lambda seen: seen.piped and seen["wall_clock_breakdown"] and seen["steps_per_print"] is None,
        "missing: with a pipeline and wall_clock_breakdown the first step fails; give a number",
        Effect.STOPS,
        "runtime/pipe/engine.py: _exec_optimizer_step",
    ),
    Trap(
        "steps_per_print",
        lambda seen: seen.piped and seen["steps_per_print"] is None,
        "missing: with a pipeline the first step fails before DeepSpeed 0.16.5; give a number",
        Effect.STOPS,
        "runtime/pipe/engine.py: train_batch",
        since="0.15.2",
        until="0.16.5",
    ),
    Trap(
        "code.partition_method",
        lambda seen: "code.partition_method" in seen.given and not seen.piped,
        "no effect without code.pipeline_stages",
        Effect.NONE,
        "runtime/pipe/module.py",
    ),
)
"""Each row names its place in DeepSpeed's source."""


def inspect(
    values: Mapping[str, Any],
    given: Mapping[str, Any],
    version: str,
    world_size: int | None = None,
    origins: Mapping[str, Origin] | None = None,
) -> tuple[Finding, ...]:
    """Findings for a config with these effective and given values; `origins` say where keys were written."""
    seen = Seen(values, given, release(version), world_size)
    origins = origins or {}
    rows = [(trap.path, _worded(trap, seen), trap.effect) for trap in TRAPS if trap.applies(seen)]
    remarks = [*rows, *_old_names(given), *_arguments(seen), *_world(seen)]
    return tuple(
        Finding(path, message, effect, given=_given(path, given) and effect is not Effect.NONE, origin=origins.get(path))
        for path, message, effect in remarks
    )


def _given(path: str, given: Mapping[str, Any]) -> bool:
    return any(key == path or key.startswith(path + ".") for key in given)


def _worded(trap: Trap, seen: Seen) -> str:
    """The row's message; for an unknown type with the nearest known name."""
    kind = trap.path.removesuffix(".type") + "s"
    if kind in seen.at.types and seen[trap.path] is not None and not seen.at.forms(kind, seen[trap.path]):
        name = str(seen[trap.path])
        return f"{name}: {trap.message}{_closest(name, seen.at.types[kind])}"
    return trap.message


def _closest(name: str, known: tuple[str, ...]) -> str:
    proper = {each.lower(): each for each in known}
    close = get_close_matches(name.lower(), proper, n=1, cutoff=0.7)
    return f"; did you mean {proper[close[0]]}?" if close else ""


def _old_names(given: Mapping[str, Any]) -> Iterator[tuple[str, str, Effect]]:
    """Old names that still work (runtime/config_utils.py)."""
    for path in given:
        instead = "bf16" if path.startswith("bfloat16.") else KEYS[path].instead if path in KEYS else ""
        if instead and path not in ("optimizer.params.max_grad_norm", ZERO + "cpu_offload_use_pin_memory"):
            yield path, f"old name; use {instead}", Effect.NONE


def _arguments(seen: Seen) -> Iterator[tuple[str, str, Effect]]:
    """Arguments that another implementation of the same optimizer takes, and this one does not."""
    name = seen["optimizer.type"]
    forms = seen.at.forms("optimizers", name) if name else ()
    form = next((row for row in forms if row.form == _form(seen)), forms[0] if forms else None)
    for path in seen.given:
        argument = path.removeprefix("optimizer.params.")
        if form is None or form.args is None or argument == path or argument == "max_grad_norm":
            continue
        if argument not in (*form.args, *form.ignored):
            yield path, f"not an argument of the {form.form} {name} that these settings choose: {NOT_THERE}", Effect.STOPS


def _form(seen: Seen) -> str:
    return "torch" if seen["optimizer.params.torch_adam"] else "cpu" if offloaded(seen.values) else "fused"


def _world(seen: Seen) -> Iterator[tuple[str, str, Effect]]:
    """A batch solved for an assumed number of ranks."""
    if seen.world_size is None:
        assumed = ranks(seen.values, seen.at.version, None)
        how = (
            "as the batch keys imply"
            if all(key in seen.given for key in (TOTAL, STEPS, "train_micro_batch_size_per_gpu"))
            else "the least"
        )
        yield "world_size", f"not given; taken as {assumed.world} ({how})", Effect.NONE
