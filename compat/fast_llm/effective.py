"""Computes the effective values of a Fast-LLM config: defaults and derived values. Reports every
reason why Fast-LLM refuses the config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bridge.errors import ConfigError
from compat.fast_llm.releases import Release, release
from compat.fast_llm.setting_types import DTYPES
from compat.fast_llm.value_types import as_typed, nullable

Flat = Mapping[str, Any]

STAGES, RANKS, BATCH, ORDER, DATA = (
    "model.multi_stage.",
    "model.distributed.",
    "batch.",
    "schedule.",
    "data.",
)
LEVEL, WEIGHTS, GRADS = (
    STAGES + name for name in ("zero_stage", "num_weight_buffers", "num_grad_buffers")
)
TENSOR, PIPELINE, SPLIT = (
    RANKS + name for name in ("tensor_parallel", "pipeline_parallel", "sequence_data_parallel")
)
WORLD, RANK, NODE = (RANKS + name for name in ("world_size", "rank", "local_world_size"))
SEQUENCE_TENSOR = RANKS + "sequence_tensor_parallel"
FORMATS = tuple(RANKS + name for name in ("compute_dtype", "training_dtype", "optimization_dtype"))
NEWER = {"uint64": "0.4.0", "uint32": "0.4.0", "uint16": "0.2.0"}
"""First release that has each of these number formats (engine/config_utils/data_type.py)."""
TEXT_SCHEDULE = "optimizer.learning_rate.schedule"
SHARED = 2
"""Number of buffers that a ZeRO level sets: one buffer is in use while the other one is being
gathered or reduced.
"""


def effective(settings: Flat, version: str, world_size: int | None = None) -> dict[str, Any]:
    """Return the effective values by path of `settings` in Fast-LLM `version` on `world_size`
    ranks.

    If neither the config nor the caller gives a world size, values that depend on it stay open.
    Raises one `ConfigError` with every refusal.
    """
    at = release(version)
    unknown = (
        f"{path}: not a field of Fast-LLM {at.version}; drop it or name another release"
        for path in settings
        if path not in at.keys
    )
    # Names and types first: the checks below compute with the values.
    ConfigError.raise_if((*unknown, *_find_wrong_types(settings)))
    values = {**at.defaults, **settings}
    values.setdefault(RANK, 0)
    if values.get(WORLD) is None and world_size is not None:
        values[WORLD] = world_size
    problems = [
        *_check_formats(values, at),
        *_set_buffers(values, settings, at),
        *_laid_out(values, at),
        *_check_others(values),
    ]
    ConfigError.raise_if(problems)
    for path in FORMATS:
        if path in values:
            values[path] = DTYPES.get(values[path], values[path])
    # Last, because it divides by the sizes that were checked above.
    if at.has_batch:
        ConfigError.raise_if(_fill_batch(values))
    return {
        path: value for path, value in values.items() if value is not None or path in at.defaults
    }


def _find_wrong_types(settings: Flat) -> Iterator[str]:
    for path, value in settings.items():
        try:
            if value is not None or not nullable(path):
                as_typed(path, value)
        except (KeyError, ValueError) as error:
            yield f"{path}: {error if isinstance(error, ValueError) else 'unknown key'}"


def _check_formats(values: Flat, at: Release) -> Iterator[str]:
    for path in FORMATS:
        since = NEWER.get(values.get(path, ""), "")
        if not at.since(since):
            yield (
                f"{path}: found {values[path]}, which is new in Fast-LLM {since}, but this is "
                f"{at.version}; use float32, float16 or bfloat16"
            )


# Sharding


def buffers_of_level(level: int | None) -> dict[str, int]:
    """Return the numbers of buffers that a ZeRO level sets, by path."""
    return {
        path: SHARED
        for path, least in ((GRADS, 2), (WEIGHTS, 3))
        if level is not None and level >= least
    }


def _set_buffers(values: dict[str, Any], settings: Flat, at: Release) -> Iterator[str]:
    """Set the numbers of buffers that the ZeRO level determines, and yield refusals.

    Source: multi_stage/config.py, MultiStageConfig._validate and Config._set_implicit_default.
    """
    for path, count in buffers_of_level(values.get(LEVEL)).items():
        if path in settings and not at.overwrites_buffers:
            yield (
                f"{path}: found {settings[path]} with zero_stage {values[LEVEL]}, which sets this "
                f"number to {count}; "
                f"keep one of the two, zero_stage or {path.removeprefix(STAGES)}"
            )
        values[path] = count


# Ranks


def _laid_out(values: dict[str, Any], at: Release) -> Iterator[str]:
    """Yield refusals of sizes that do not divide the number of ranks, and of ranks out of range
    (distributed/config.py, DistributedConfig._validate).
    """
    tensor, pipeline, split = values[TENSOR], values[PIPELINE], values[SPLIT]
    world, rank, node = values.get(WORLD), values[RANK], values.get(NODE)
    if tensor == 1:
        values[SEQUENCE_TENSOR] = False
    if node is not None and node % tensor:
        yield f"{TENSOR}: found {tensor}; expected a divisor of the {node} ranks of a node, because tensor groups stay in a node"
    if at.within("0.3.0", "0.4.0") and values[RANKS + "pipeline_first"] and split > 1:
        yield f"{SPLIT}: found {split} with pipeline_first; expected 1 in Fast-LLM {at.version}; drop pipeline_first"
    if world is None:
        return
    if rank >= world:
        yield f"{RANK}: found {rank}; expected less than world_size ({world})"
    if node is not None and at.counts_nodes and world % node:
        yield f"{WORLD}: found {world}; expected a multiple of the {node} ranks of a node; use whole nodes"
    if world % (tensor * pipeline):
        yield f"{WORLD}: found {world}; expected a multiple of tensor_parallel ({tensor}) x pipeline_parallel ({pipeline})"
    elif world // (tensor * pipeline) % split:
        data = world // (tensor * pipeline)
        yield f"{SPLIT}: found {split}; expected a divisor of the {data} data ranks (world_size / tensor / pipeline)"


def data_ranks(values: Flat) -> int | None:
    """Return the number of data ranks that get different samples; None if the world size is not
    known.
    """
    world, ranks = values.get(WORLD), values[TENSOR] * values[PIPELINE] * values[SPLIT]
    return None if world is None else world // ranks or None


def mesh(values: Flat) -> dict[str, int]:
    """Return the sizes and ranks that Fast-LLM derives, by name (distributed/config.py); empty if
    the world size is not known.
    """
    # pipeline_first decides which of data and pipeline ranks is contiguous; tensor ranks always are.
    world, rank = values.get(WORLD), values[RANK]
    if world is None:
        return {}
    tensor, pipeline, split = values[TENSOR], values[PIPELINE], values[SPLIT]
    # `place` numbers the tensor groups, which are then divided into pipeline and data ranks.
    data, place = world // (tensor * pipeline), rank // tensor
    first = values[RANKS + "pipeline_first"]
    data_rank, pipeline_rank = divmod(place, pipeline) if first else (place % data, place // data)
    return {
        "model_parallel": tensor * pipeline,
        "data_parallel": data,
        "batch_data_parallel": data // split,
        "tensor_rank": rank % tensor,
        "pipeline_rank": pipeline_rank,
        "data_rank": data_rank,
        "sequence_data_rank": data_rank % split,
        "batch_data_rank": data_rank // split,
    }


# The rest


def _check_others(values: Flat) -> Iterator[str]:
    saves = values.get("run.tensor_logs.save")
    if (
        saves and values.get("run.experiment_dir") is None
    ):  # config_utils/run.py, RunConfig._validate
        yield "run.tensor_logs.save: found true without run.experiment_dir; set run.experiment_dir"
    checkpoint = values.get("training.checkpoint") or {}
    if (
        checkpoint.get("interval") is not None and values.get("run.experiment_dir") is None
    ):  # training/config.py, TrainerConfig
        yield f"training.checkpoint.interval: found {checkpoint['interval']} without run.experiment_dir; set run.experiment_dir"
    yield from _check_stops(checkpoint, values.get("training.shutdown") or {})
    if values.get("reference_models"):  # training/config.py, TrainerConfig._validate
        for path in (PIPELINE, SPLIT):
            if values[path] > 1:
                yield f"{path}: found {values[path]} with reference_models; expected 1"


def _check_stops(checkpoint: Flat, shutdown: Flat) -> Iterator[str]:
    """Yield a refusal if the run would stop at a step without a checkpoint (training/config.py,
    TrainingConfig._validate; interval.py, is_sub_interval).
    """
    stop, every = shutdown.get("interval"), checkpoint.get("interval")
    # `type`, not isinstance: True is an int in Python, and no interval.
    if type(stop) is not int:
        return
    if type(every) is not int or every < 1:
        yield f"training.shutdown.interval: found {stop} without training.checkpoint.interval; set training.checkpoint.interval"
    elif stop % every:
        yield f"training.shutdown.interval: found {stop}; expected a multiple of training.checkpoint.interval ({every})"


MICRO, TOTAL, STEPS = (
    BATCH + "micro_batch_size",
    BATCH + "batch_size",
    BATCH + "sequential_micro_batches",
)
DEPTH, BREADTH = BATCH + "depth_first_micro_batches", BATCH + "breadth_first_micro_batches"
LENGTH, PART = BATCH + "sequence_length", BATCH + "micro_sequence_length"


def _fill_batch(values: dict[str, Any]) -> Iterator[str]:
    """Compute the sizes of the batch that are not set, and yield refusals (schedule/config.py,
    BatchConfig._validate of 0.1.0 to 0.3.0).
    """
    if values.get(TOTAL) is None or values.get(MICRO) is None:
        yield from _fill_total(values)
    else:
        yield from _fill_parts(values)
    if values[PIPELINE] > 1 and (values.get(DEPTH) or 1) > 1:
        yield f"{DEPTH}: found {values[DEPTH]} with a pipeline; expected 1; use {BREADTH.removeprefix(BATCH)} instead"
    part = values.get(PART) or values[LENGTH]
    if values[LENGTH] % part:
        yield f"{PART}: found {part}; expected a divisor of sequence_length ({values[LENGTH]})"
    values[PART] = part


def _fill_total(values: dict[str, Any]) -> Iterator[str]:
    data = data_ranks(values)
    # Without a total and a micro batch, the number of microbatches is what the two orders say, 1 by
    # default.
    values[DEPTH], values[BREADTH] = values.get(DEPTH) or 1, values.get(BREADTH) or 1
    values[STEPS] = values[DEPTH] * values[BREADTH]
    if values.get(TOTAL) is None:
        values[MICRO] = values.get(MICRO) or 1
        values[TOTAL] = None if data is None else values[MICRO] * values[STEPS] * data
    elif data is not None:
        values[MICRO], rest = divmod(values[TOTAL], values[STEPS] * data)
        if rest or not values[MICRO]:
            steps = values[STEPS]
            yield f"{TOTAL}: found {values[TOTAL]}; expected a multiple of {steps} sequential microbatches x {data} data ranks"


def _fill_parts(values: dict[str, Any]) -> Iterator[str]:
    data = data_ranks(values)
    if data is None:
        return
    steps, rest = divmod(values[TOTAL], values[MICRO] * data)
    if rest or not steps:
        yield f"{TOTAL}: found {values[TOTAL]}; expected a multiple of micro_batch_size ({values[MICRO]}) x {data} data ranks"
        return
    values[STEPS] = steps
    depth, breadth = values.get(DEPTH), values.get(BREADTH)
    if depth is None and breadth is None:
        depth, breadth = (1, steps) if values[PIPELINE] > 1 else (steps, 1)
    # One that is open is the quotient; the right side is computed before either is set.
    depth, breadth = depth or steps // (breadth or 1), breadth or steps // (depth or 1)
    if depth * breadth != steps:
        beside = BREADTH.removeprefix(BATCH)
        yield (
            f"{DEPTH}: found {depth}, and {beside} {breadth}; "
            f"expected their product to be {steps}, the number of microbatches of a step"
        )
    values[DEPTH], values[BREADTH] = depth, breadth
