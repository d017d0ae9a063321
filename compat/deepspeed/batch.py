"""DeepSpeed's batch arithmetic: the data-parallel ranks that it sees, and train batch = micro batch x accumulation x ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bridge.errors import ConfigError
from compat.deepspeed.releases import Release, release
from compat.deepspeed.seen import MICRO, STEPS, TOTAL, Flat


@dataclass(frozen=True, slots=True)
class Ranks:
    """World size, the number of ranks by which DeepSpeed divides the batch, and the keys that reduce that number, in words."""

    world: int
    dividing: int
    why: str


def ranks(values: Flat, version: str, world_size: int | None) -> Ranks:
    """The ranks that DeepSpeed's batch arithmetic counts. Raises `ConfigError` if the world size does not divide evenly."""
    at = release(version)
    shared = _shared(values, at)
    dividing = _dividing(values, at)
    # Without a world size: the one that the batch keys imply, else that of the mesh, else the smallest that divides evenly.
    world = world_size or _implied(values) * dividing
    least = world or _mesh(values, at) or dividing
    if _mesh(values, at) not in (0, least):
        raise ConfigError(_mesh_problem(values, least))
    if least % dividing:
        raise ConfigError(f"{shared} does not divide world size ({least}); use a multiple of {dividing} ranks")
    data = int(values["data_parallel_size"]) if _mesh(values, at) else least // dividing
    return Ranks(least, data, shared)


def unmeshed(values: Flat, world_size: int | None) -> Iterator[str]:
    """A problem if AutoTP's groups do not fill all ranks, as its mesh must (utils/groups.py, _init_tp_mesh_device)."""
    size = values.get("tensor_parallel.autotp_size") or 1
    if world_size is not None and world_size % size:
        yield f"tensor_parallel.autotp_size: {size} does not divide world size ({world_size}); use a divisor of it"


def _coded(values: Flat) -> int:
    """Ranks in the groups that the script builds. DeepSpeed learns of them through an mpu."""
    return math.prod(int(values[f"code.{axis}_parallel"]) for axis in ("tensor", "context")) * int(values["code.pipeline_stages"])


def _sequence(values: Flat, at: Release) -> int:
    """Sequence-parallel ranks that the batch arithmetic sees: the mpu's, or from 0.17.0 on also the file's."""
    seen = at.since("0.17.0") or _coded(values) > 1
    return max(int(values["code.context_parallel"]), int(values["sequence_parallel_size"]) if seen else 1)


def _dividing(values: Flat, at: Release) -> int:
    return int(values["code.tensor_parallel"]) * int(values["code.pipeline_stages"]) * _sequence(values, at)


def _mesh(values: Flat, at: Release) -> int:
    """World size of the mesh that data_parallel_size and sequence_parallel_size describe, or 0 (__init__.py, initialize)."""
    if values.get("data_parallel_size") is None or _coded(values) > 1:
        return 0
    return int(values["data_parallel_size"]) * int(values["sequence_parallel_size"])


def _mesh_problem(values: Flat, world: int) -> str:
    data, sequence = values["data_parallel_size"], values["sequence_parallel_size"]
    return f"data_parallel_size ({data}) x sequence_parallel_size ({sequence}) is not the world size ({world}); make them agree"


def _shared(values: Flat, at: Release) -> str:
    """The keys whose ranks share one batch, with their sizes, for a message."""
    sequence = _sequence(values, at)
    told = "code.context_parallel" if sequence == values["code.context_parallel"] else "sequence_parallel_size"
    sizes = {path: int(values[path]) for path in ("code.tensor_parallel", "code.pipeline_stages")} | {told: sequence}
    return " x ".join(f"{path} ({size})" for path, size in sizes.items() if size > 1)


def _implied(values: Flat) -> int:
    """Data-parallel ranks that the three batch keys imply; 0 if a key is missing or they do not divide evenly."""
    total, micro, steps = (values.get(path) for path in (TOTAL, MICRO, STEPS))
    if not (total and micro and steps) or total % (micro * steps):
        return 0
    return int(total // (micro * steps))


def solve(values: dict[str, Any], given: Flat, at: Release, world_size: int | None) -> list[str]:
    """Fill in and check the three batch keys as DeepSpeed does (runtime/config.py, _set_batch_related_parameters)."""
    try:
        data = ranks(values, at.version, world_size).dividing
    except ConfigError as error:
        return list(error.problems)
    total, micro, steps = (given.get(path) for path in (TOTAL, MICRO, STEPS))
    if total is None and micro is None:
        return [f"{MICRO}: missing; give it, or {TOTAL}"]
    values.update(_solved(total, micro, steps, data))
    return _uneven(values, data)


def _solved(total: int | None, micro: int | None, steps: int | None, data: int) -> dict[str, int]:
    """The missing batch keys from the given ones, with DeepSpeed's floor division."""
    if micro is None:
        assert total is not None
        steps = 1 if steps is None else steps
        micro = total // data // steps
    elif steps is None:
        steps = total // micro // data if total is not None else 1
    return {TOTAL: micro * steps * data if total is None else total, MICRO: micro, STEPS: steps}


def _uneven(values: Flat, data: int) -> list[str]:
    total, micro, steps = values[TOTAL], values[MICRO], values[STEPS]
    if total == micro * steps * data and micro * steps > 0:
        return []
    whole = f"{MICRO} ({micro}) x {STEPS} ({steps}) x data-parallel ranks ({data})"
    found = f"{TOTAL}: found {total}, expected {whole} = {micro * steps * data}"
    return [f"{found}; give two of the three, or make them agree{_apart(values, data)}"]


def _apart(values: Flat, data: int) -> str:
    """A hint if the sizes would agree once several ranks share a batch. Only the script or a code part tells that they do."""
    total, size = values[TOTAL], values[MICRO] * values[STEPS] * data
    # DeepSpeed expects `size` samples; if it is a multiple of the total, so many ranks may share each batch.
    shared = size // total if total and size % total == 0 else 1
    if shared < 2 or data % shared or _coded(values) > 1:
        return ""
    give = f"or give --code pipeline_stages={shared} or --code tensor_parallel={shared}"
    return f"; they agree if {shared} ranks share a batch: is the .code.json missing? put it beside the file, {give}"
