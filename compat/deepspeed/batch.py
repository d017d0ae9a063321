"""Checks batch sizes as DeepSpeed does: train batch = micro batch x accumulation steps x
data-parallel ranks. DeepSpeed counts data-parallel ranks in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bridge.errors import ConfigError
from compat.deepspeed.checks_view import MICRO, STEPS, TOTAL, Flat
from compat.deepspeed.releases import Release, release


@dataclass(frozen=True, slots=True)
class Ranks:
    """The numbers of ranks for the batch equation: `world` is the world size, and `dividing` is the
    number of data-parallel ranks. `why` lists, for messages, the keys that make `dividing` smaller
    than `world`.
    """

    world: int
    dividing: int
    why: str


def ranks(values: Flat, version: str, world_size: int | None) -> Ranks:
    """Return the numbers of ranks that DeepSpeed's batch equation uses. Raises `ConfigError` if the
    world size does not fit the sizes of the mesh axes.
    """
    at = release(version)
    axes, mesh = _sharing_keys(values, at), _mesh(values)
    # Ranks that share one batch. AutoTP's are not among them:
    # DeepSpeed reads the batch before these groups exist.
    sharing = (
        int(values["code.tensor_parallel"])
        * int(values["code.pipeline_stages"])
        * _sequence(values, at)
    )
    # Without a world size: the one that the batch keys imply, else that of the mesh, else the smallest that divides evenly.
    world = world_size or _ranks_of_batch_keys(values) * sharing or mesh or sharing
    if mesh not in (0, world):
        data, sequence = values["data_parallel_size"], values["sequence_parallel_size"]
        product = f"data_parallel_size ({data}) x sequence_parallel_size ({sequence})"
        raise ConfigError(
            f"{product} is not the world size ({world}); change the sizes or the number of ranks"
        )
    if world % sharing:
        raise ConfigError(
            f"{axes} does not divide world size ({world}); use a multiple of {sharing} ranks"
        )
    # With a mesh DeepSpeed takes the size of its data axis, also
    # in releases that ignore the sequence axis otherwise.
    return Ranks(world, int(values["data_parallel_size"]) if mesh else world // sharing, axes)


def check_mesh(values: Flat, world_size: int | None) -> Iterator[str]:
    """Yield a problem if the number of ranks is no multiple of autotp_size. DeepSpeed needs groups
    of equal size (utils/groups.py, _init_tp_mesh_device).
    """
    size = values.get("tensor_parallel.autotp_size") or 1
    if world_size is not None and world_size % size:
        yield f"tensor_parallel.autotp_size: {size} does not divide world size ({world_size}); use a divisor of {world_size}"


def _ranks_of_script(values: Flat) -> int:
    """Return the number of ranks that share a batch because of the script: the product of the
    script's tensor, context and pipeline sizes.
    """
    axes = ("code.tensor_parallel", "code.context_parallel", "code.pipeline_stages")
    return math.prod(int(values[axis]) for axis in axes)


def _sequence(values: Flat, at: Release) -> int:
    """Return the number of sequence-parallel ranks in the batch equation: the larger of the
    script's number and the file's. Before 0.17.0 the file's number counts only if the script builds
    groups of ranks.
    """
    counts = at.since("0.17.0") or _ranks_of_script(values) > 1
    return max(
        int(values["code.context_parallel"]), int(values["sequence_parallel_size"]) if counts else 1
    )


def _mesh(values: Flat) -> int:
    """Return the number of ranks in the mesh of data_parallel_size and sequence_parallel_size; 0 if
    DeepSpeed makes no mesh.

    DeepSpeed ignores the two keys if the script passes an mpu (runtime/config.py,
    DeepSpeedConfig.__init__).
    """
    if values.get("data_parallel_size") is None or _ranks_of_script(values) > 1:
        return 0
    return int(values["data_parallel_size"]) * int(values["sequence_parallel_size"])


def _sharing_keys(values: Flat, at: Release) -> str:
    """Return, for a message, the keys that make several ranks share one batch, with their sizes."""
    sequence = _sequence(values, at)
    sequence_path = (
        "code.context_parallel"
        if sequence == values["code.context_parallel"]
        else "sequence_parallel_size"
    )
    sizes = {
        path: int(values[path]) for path in ("code.tensor_parallel", "code.pipeline_stages")
    } | {sequence_path: sequence}
    return " x ".join(f"{path} ({size})" for path, size in sizes.items() if size > 1)


def _ranks_of_batch_keys(values: Flat) -> int:
    """Return the number of data-parallel ranks that follows from the three batch keys; 0 if a key
    is missing or the division has a remainder.
    """
    total, micro, steps = (values.get(path) for path in (TOTAL, MICRO, STEPS))
    if not (total and micro and steps) or total % (micro * steps):
        return 0
    return int(total // (micro * steps))


def solve(values: dict[str, Any], settings: Flat, at: Release, world_size: int | None) -> list[str]:
    """Store the three batch keys in `values`, and compute missing ones as DeepSpeed does
    (runtime/config.py, _set_batch_related_parameters). Return the problems that DeepSpeed would
    find.
    """
    try:
        data = ranks(values, at.version, world_size).dividing
    except ConfigError as error:
        return list(error.problems)
    total, micro, steps = (settings.get(path) for path in (TOTAL, MICRO, STEPS))
    if total is None and micro is None:
        return [f"{MICRO}: missing; set this key or {TOTAL}"]
    values.update(_solve_batch(total, micro, steps, data))
    return _find_uneven(values, data)


def _solve_batch(
    total: int | None, micro: int | None, steps: int | None, data: int
) -> dict[str, int]:
    """Return the three batch keys. At least `total` or `micro` must be given. Missing keys are
    computed by floor division, as in DeepSpeed. If the division leaves a remainder, the keys
    contradict each other, and `_find_uneven` reports this.
    """
    if micro is None:
        assert total is not None
        steps = 1 if steps is None else steps
        micro = total // data // steps
    elif steps is None:
        steps = total // micro // data if total is not None else 1
    return {TOTAL: micro * steps * data if total is None else total, MICRO: micro, STEPS: steps}


def _find_uneven(values: Flat, data: int) -> list[str]:
    total, micro, steps = values[TOTAL], values[MICRO], values[STEPS]
    # A total below the number of ranks makes a micro batch of 0, whose product may still agree.
    if total == micro * steps * data and micro * steps > 0:
        return []
    product = f"{MICRO} ({micro}) x {STEPS} ({steps}) x data-parallel ranks ({data})"
    return [
        f"{TOTAL}: found {total}, expected {product} = {micro * steps * data}; set only two of the"
        f" three keys, or make them agree{_hint_on_ranks(values, data)}"
    ]


def _hint_on_ranks(values: Flat, data: int) -> str:
    """Return a hint if the batch keys would agree with each other on the condition that several
    ranks share each batch, or that there are fewer ranks. Otherwise return an empty string. Only
    the script, not the file, decides whether ranks share a batch.
    """
    total, step = values[TOTAL], values[MICRO] * values[STEPS]
    size = step * data
    # DeepSpeed expects `size` samples. If that is a multiple of
    # the total, so many ranks may share each batch.
    sharers = size // total if total and size % total == 0 else 1
    if sharers < 2 or data % sharers or _ranks_of_script(values) > 1:
        fewer = total and step and total % step == 0 and total < size
        agree = total // step if fewer else 0
        many = "" if agree == 1 else "s"
        return f"; the batch keys agree on {agree} data-parallel rank{many}" if agree else ""
    return (
        f"; the batch keys agree if {sharers} ranks share each batch: to say so, put the missing"
        f" .code.json beside the file, or pass --code pipeline_stages={sharers} or --code"
        f" tensor_parallel={sharers}"
    )
