"""Computes the values that Merak uses for a run: defaults of the release and derived values.
Reports every reason why Merak refuses the config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

from bridge.errors import ConfigError, nearest
from bridge.files.shown import show_value
from compat.merak.releases import REWRITTEN, Release, lifetime, release

AXES = ("init.pp", "init.tp", "init.dp", "init.sp")
PLAIN = ("1f1b", "ds_default")
"""Schedules that accept any number of micro batches."""
OLD_SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
)
SPLITS = ("farthest_min_deps", "nearest_min_deps", "layer_split")
TESTED = "Adam, AdamW, SGD, ASGD, Adadelta or Adamax"

Flat = Mapping[str, Any]


def effective(settings: Flat, version: str, world_size: int | None) -> dict[str, Any]:
    """Return every value that the release uses, by schema path. Values of None are left out.

    Raises one `ConfigError` with everything that Merak refuses. This includes refusals of
    transformers' TrainingArguments, from which Merak's arguments inherit.
    """
    at = release(version)
    unknown = []
    for path in settings:
        if path not in at.defaults:
            releases = lifetime(path)
            hint = (
                (f"; Merak {releases} has this setting")
                if releases != "none"
                else nearest(path, at.defaults)
            )
            unknown.append(f"{path}: not in Merak {version}{hint}")
    ConfigError.raise_if(unknown)
    values = {
        path: value for path, value in {**at.defaults, **settings}.items() if value is not None
    }
    _merge_arguments(values, at)
    # Without a value in `init`, data-parallel replicas are the ranks that the other axes leave.
    others = prod(values.get(axis) or 1 for axis in AXES if axis != "init.dp")
    if world_size and "init.dp" not in values and world_size % others == 0:
        values["init.dp"] = world_size // others
    # All checks are made, so that one error has every refusal; Merak itself stops at the first.
    ConfigError.raise_if(problem for check in CHECKS for problem in check(values, at, world_size))
    return values


def _merge_arguments(values: dict[str, Any], at: Release) -> None:
    """Apply the changes to values that `mergeargs` of Merak and `__post_init__` of
    TrainingArguments make.
    """
    # Merak's engine knows the schedule only by its other name.
    if values.get("args.train_schedule") == "shifted_critical_path":
        values["args.train_schedule"] = "full_critical_path_1f1b"
    if values.get("args.activation_checkpointing") is False:
        values["args.checkpoint_num_layers"] = 0
    if "args.shard_count" not in values and "args.num_layers" in values:
        values["args.shard_count"] = 2 * values["args.num_layers"] + 4
    if "args.evaluation_strategy" in values and at.since(REWRITTEN):
        values["args.eval_strategy"] = values["args.evaluation_strategy"]
    if _evaluates(values) != "no":
        values["args.do_eval"] = True
    if _evaluates(values) == "steps":
        values.setdefault("args.eval_steps", values.get("args.logging_steps"))
    if values.get("args.no_cuda") and "args.use_cpu" in at.defaults:
        values["args.use_cpu"] = True


def _evaluates(values: Flat) -> str:
    return str(values.get("args.eval_strategy") or values.get("args.evaluation_strategy") or "no")


Check = Callable[[Flat, Release, int | None], Iterator[str]]


def _check_mesh(values: Flat, at: Release, world_size: int | None) -> Iterator[str]:
    """Yield a problem if the product of the mesh sizes is not the number of ranks
    (core/mpu/topology.py: "Invalid Grid").
    """
    ranks = prod(values.get(axis) or 1 for axis in AXES)
    if world_size and ranks != world_size:
        sizes = " x ".join(
            f"{axis.partition('.')[2]} ({values.get(axis) or 1})" for axis in AXES if axis in values
        )
        yield f"init: {sizes} is {ranks}, which is not the world size ({world_size}); make the product {world_size}"


def _check_precision(values: Flat, at: Release, world_size: int | None) -> Iterator[str]:
    """Yield problems of number formats (transformers, training_args.py; merak_args/args.py;
    core/pipeline/module.py: configure_distributed_model).
    """
    backend = values.get("args.half_precision_backend")
    backends = ("cuda_amp", "apex", "cpu_amp") if at.since(REWRITTEN) else ("auto", "amp", "apex")
    if backend is not None and backend not in backends:
        yield (
            f"args.half_precision_backend: found {show_value(backend)}, expected one of"
            f" {', '.join(backends)} in Merak {at.version}"
        )
    if values.get("args.fp16") and values.get("args.bf16"):
        yield "args.bf16: fp16 and bf16 are both set; keep one of the two"
    if values.get("args.bf16") and backend == "apex":
        yield "args.half_precision_backend: apex does not support bf16; drop apex or bf16"
    if values.get("args.bf16") and backend == "cuda_amp" and at.since("2.2.2"):
        yield (
            "args.half_precision_backend: cuda_amp needs weights in fp32, but bf16 is set; drop"
            " cuda_amp or bf16"
        )


def _check_schedules(values: Flat, at: Release, world_size: int | None) -> Iterator[str]:
    """Yield problems of the pipeline schedule (core/merak_engine.py: scheduler_method)."""
    name, steps, ranks = (
        values["args.train_schedule"],
        values["args.gradient_accumulation_steps"],
        values.get("init.pp") or 1,
    )
    if name not in PLAIN and steps < ranks:
        yield (
            f"args.train_schedule: {name} needs at least as many micro batches as pipeline ranks; "
            f"found gradient_accumulation_steps ({steps}) < pp ({ranks})"
        )
    if name == "full_critical_path_1f1b":
        if "args.activation_checkpoint_ratio" not in values:
            yield (
                "args.activation_checkpoint_ratio: not set, but train_schedule"
                " shifted_critical_path needs it; set it to one number"
            )
        if steps < 4:
            yield f"args.gradient_accumulation_steps: found {steps}; train_schedule shifted_critical_path needs 4 or more"


def _check_partition(values: Flat, at: Release, world_size: int | None) -> Iterator[str]:
    """Yield problems of a custom partition (core/pipeline/layers_partition.py: custom_layer_idx,
    which reads only the first value).
    """
    method, words = values["args.partition_method"], values.get("args.custom_partition")
    if method == "custom" and not words:
        yield "args.custom_partition: not set, but partition_method custom needs it, such as 0,6,16"
    if method == "custom" and words:
        cuts, stages = _cuts(words[0]), values.get("init.pp")
        if cuts is None:
            yield f"args.custom_partition: found {show_value(words[0])}, expected whole numbers in one word, such as 0,6,16"
        elif stages and len(cuts) != stages + 1:
            yield (
                f"args.custom_partition: found {len(cuts)} numbers for pp ({stages}), expected"
                f" {stages + 1}: the first shard of each stage, then the number of shards, in one"
                " word with commas"
            )


def _cuts(word: str) -> tuple[int, ...] | None:
    try:
        return tuple(int(part) for part in word.split(","))
    except ValueError:
        return None


def _check_graph(values: Flat, at: Release, world_size: int | None) -> Iterator[str]:
    """Yield problems of tracing and splitting the model (core/fx/graph_shard/split_graph.py;
    merak_trainer.py: create_pipeline_module; core/fx/tracer).
    """
    split, trace = values.get("args.split_method"), values.get("args.trace_method", "fx")
    pipeline, tensor = values.get("init.pp") or 1, values.get("init.tp") or 1
    if split == "min_deps" and at.version != REWRITTEN:
        yield (
            f"args.split_method: found 'min_deps', expected one of"
            f" {', '.join(SPLITS)} in Merak {at.version}"
        )
    if trace not in ("fx", "dynamo") and pipeline * tensor > 1:
        yield (
            f"args.trace_method: {show_value(trace)} means no tracing, which needs pp x tp = 1; "
            f"found {pipeline} x {tensor}; use fx"
        )
    if trace == "dynamo" and tensor > 1:
        yield f"args.trace_method: dynamo needs tp = 1, found {tensor}; use fx"
    if "args.lora_config" in values and tensor > 1:
        yield f"args.lora_config: LoRA needs tp = 1, found {tensor}; use one tensor rank, or drop lora_config"


def _check_recompute(values: Flat, at: Release, world_size: int | None) -> Iterator[str]:
    """Yield problems of the values of activation_checkpoint_ratio, which Merak converts to numbers
    (core/pipeline/module.py).
    """
    for word in values.get("args.activation_checkpoint_ratio", ()):
        if number(word) is None:
            yield f"args.activation_checkpoint_ratio: found {show_value(word)}, expected a number"


def number(word: str) -> float | None:
    """Return the word as a number; None if it is not a number."""
    try:
        return float(word)
    except ValueError:
        return None


def _check_zero(values: Flat, at: Release, world_size: int | None) -> Iterator[str]:
    """Yield problems of ZeRO (core/merak_engine.py). With any ZeRO stage the engine leaves the
    reduction of gradients to the optimizer, and only the optimizer of stage 1 reduces them.
    """
    on = at.since(REWRITTEN) or values.get("args.zero_optimization")
    stage = values.get("args.zero_stage")
    if on and stage not in (None, 1):
        yield (
            f"args.zero_stage: found {show_value(stage)}; only stage 1 exists, other stages fail in the"
            " first step; use 1, or drop it"
        )
    allows = values.get("args.zero_allow_untested_optimizer")
    if on and stage == 1 and values.get("args.adafactor") and not allows:
        yield (
            f"args.zero_allow_untested_optimizer: without this switch ZeRO accepts only {TESTED};"
            " set it, or drop adafactor"
        )


def _learning_rate(values: Flat, at: Release, world_size: int | None) -> Iterator[str]:
    """Yield problems of the learning-rate schedule (transformers, optimization.py: get_scheduler
    and the functions that it calls).
    """
    name, kwargs = values["args.lr_scheduler_type"], values.get("args.lr_scheduler_kwargs") or {}
    if not at.since(REWRITTEN) and name not in OLD_SCHEDULES:
        yield (
            f"args.lr_scheduler_type: found {show_value(name)}, expected one of"
            f" {', '.join(OLD_SCHEDULES)} in Merak {at.version}"
        )
        return
    for key, value in kwargs.items():
        # One problem is enough: the checks of the shape below compute with these values.
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield f"args.lr_scheduler_kwargs.{key}: found {show_value(value)}, expected a number"
            return
    yield from _check_shape(name, kwargs, values["args.learning_rate"])


SHAPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_stable_steps", "num_decay_steps", "min_lr_ratio", "num_cycles"),
}
"""A table from learning-rate schedules to their arguments, without the numbers of warmup steps and
of all steps (transformers 4.47).
"""
FREE = ("reduce_lr_on_plateau",)


def _check_shape(name: str, kwargs: Flat, peak: float) -> Iterator[str]:
    for key in kwargs:
        if name not in FREE and key not in SHAPE_KEYS.get(name, ()):
            hint = nearest(key, SHAPE_KEYS.get(name, ()))
            yield f"args.lr_scheduler_kwargs.{key}: {name} does not have this argument{hint}"
        elif kwargs[key] < 0:
            yield f"args.lr_scheduler_kwargs.{key}: found {show_value(kwargs[key])}, expected 0 or more"
    # Exactly one of the two: neither and both are refused.
    if name == "cosine_with_min_lr" and ("min_lr" in kwargs) == ("min_lr_rate" in kwargs):
        yield (
            "args.lr_scheduler_kwargs: cosine_with_min_lr needs exactly one of min_lr and"
            " min_lr_rate"
        )
    end = kwargs.get("lr_end", POLYNOMIAL_END)
    if name == "polynomial" and not end < peak:
        yield f"args.lr_scheduler_kwargs.lr_end: found {end}, expected less than learning_rate ({peak})"
    for key in ("num_stable_steps", "num_decay_steps") if name == "warmup_stable_decay" else ():
        if not isinstance(kwargs.get(key), int):
            yield f"args.lr_scheduler_kwargs.{key}: found {show_value(kwargs.get(key))}, expected a whole number; {name} needs it"


POLYNOMIAL_END = 1e-7
"""Default of `lr_end` (transformers, optimization.py:
get_polynomial_decay_schedule_with_warmup).
"""


def _check_evaluation(values: Flat, at: Release, world_size: int | None) -> Iterator[str]:
    """Yield problems of the evaluation (transformers, training_args.py: `__post_init__`)."""
    when = _evaluates(values)
    if values["args.load_best_model_at_end"] and when != values["args.save_strategy"]:
        saves = values["args.save_strategy"]
        yield f"args.load_best_model_at_end: found eval_strategy ({when}) and save_strategy ({saves}); make them the same"
    if values["args.lr_scheduler_type"] == "reduce_lr_on_plateau" and when == "no":
        yield "args.lr_scheduler_type: reduce_lr_on_plateau needs an eval_strategy other than no"
    if values.get("args.fp16_full_eval") and values.get("args.bf16_full_eval"):
        yield (
            "args.bf16_full_eval: fp16_full_eval and bf16_full_eval are both set; keep one of the"
            " two"
        )


def _check_lists(values: Flat, at: Release, world_size: int | None) -> Iterator[str]:
    """Yield problems of the tensor-parallel lists (core/tensor_parallel/mp_attrs.py:
    set_tp_layer_lists).
    """
    lists = {
        path.partition(".")[2] for path in values if path.startswith("tp_lists.") and values[path]
    }
    enough = {"col_para_list", "row_para_list"} <= lists or lists & {
        "conv_para_list",
        "weight_change_list",
        "input_output_mapping",
    }
    if any(path.startswith("tp_lists.") for path in values) and not enough:
        yield (
            "tp_lists: set_tp_layer_lists needs col_para_list and row_para_list together, or input_output_mapping, "
            f"weight_change_list or conv_para_list; found {', '.join(sorted(lists)) or 'empty lists'}"
        )


CHECKS: tuple[Check, ...] = (
    _check_mesh,
    _check_precision,
    _check_schedules,
    _check_partition,
    _check_graph,
    _check_recompute,
    _check_zero,
    _learning_rate,
    _check_evaluation,
    _check_lists,
)
"""All checks of what Merak refuses, in the order in which Merak makes them. Each function's
docstring names the place in the source.
"""
