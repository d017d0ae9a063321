"""Splits layers into virtual stages and places the stages on ranks, as AutoModel does."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bridge.errors import ConfigError
from compat.automodel.schedules import Schedule, schedule

LAYER = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.(\d+)")
"""Pattern for the name of a decoder layer in most models of Hugging Face. Its group is the layer's
number.
"""


@dataclass(frozen=True, slots=True)
class Stages:
    """Virtual stages of a model. `layers` has the number of decoder layers of each stage.
    `stage_ids` has the stage numbers of each rank.
    """

    layers: tuple[int, ...]
    virtual_stages: int
    stages_per_rank: int
    stage_ids: tuple[tuple[int, ...], ...]


def stages(
    *,
    num_layers: int,
    layers_per_stage: int | None = None,
    pp_size: int,
    schedule: str = "1f1b",
    round_virtual_stages_to_pp_multiple: str | None = None,
) -> Stages:
    """Split `num_layers` decoder layers over `pp_size` pipeline ranks. Raises `ConfigError` if
    AutoModel would stop.

    The number of virtual stages is `num_layers` divided by `layers_per_stage`, rounded as
    `round_virtual_stages_to_pp_multiple` says. Layers are then spread evenly over the stages; the
    first stages get one layer more if needed. Source:
    components/distributed/pipelining/functional.py.
    """
    kind = _check_stages(
        num_layers, layers_per_stage, pp_size, schedule, round_virtual_stages_to_pp_multiple
    )
    count = count_stages(
        num_layers, layers_per_stage, pp_size, kind, round_virtual_stages_to_pp_multiple
    )
    size, longer = divmod(num_layers, count)
    layers = tuple(size + 1 if index < longer else size for index in range(count))
    return Stages(layers, count, count // pp_size, place_stages(count, pp_size, kind))


def _check_stages(
    num_layers: int, layers_per_stage: int | None, pp_size: int, name: str, rounding: str | None
) -> Schedule:
    sizes = {"num_layers": num_layers, "pp_size": pp_size, "layers_per_stage": layers_per_stage}
    problems = [
        f"{path}: found {size}, expected at least 1"
        for path, size in sizes.items()
        if size is not None and size < 1
    ]
    if rounding not in (None, "up", "down"):
        problems.append(
            f"round_virtual_stages_to_pp_multiple: found {rounding!r}, expected up or down"
        )
    ConfigError.raise_if(problems)
    return schedule(name, "schedule")


def count_stages(
    num_layers: int,
    layers_per_stage: int | None,
    pp_size: int,
    kind: Schedule,
    rounding: str | None,
) -> int:
    """Return the number of virtual stages. Raises `ConfigError` if a stage would have no layer
    (functional.py, generate_hf_model_fqn_per_model_part).
    """
    count = number(num_layers, layers_per_stage, pp_size, kind, rounding)
    if count > num_layers:
        raise ConfigError(
            f"layers_per_stage: found {count} virtual stages for {num_layers} layers; give each"
            " stage at least one layer"
        )
    if kind.pair and count != 2 * pp_size:
        raise ConfigError(
            f"pp_schedule: {kind.name} runs two stages on each rank; found {count} stages for {pp_size} ranks"
        )
    return count


def number(
    num_layers: int,
    layers_per_stage: int | None,
    pp_size: int,
    kind: Schedule,
    rounding: str | None,
) -> int:
    """Return the number of virtual stages on all ranks together (functional.py,
    calculate_virtual_stages).
    """
    if layers_per_stage is None:
        return pp_size if kind.single else 2 * pp_size
    # Rounded up: a last stage with fewer layers is a stage too.
    total = -(-num_layers // layers_per_stage)
    count = _round_count(total, pp_size, rounding)
    per_rank, where = (
        count // pp_size,
        f"layers_per_stage: {num_layers} layers in stages of {layers_per_stage} give",
    )
    if count % pp_size:
        raise ConfigError(
            f"{where} {total} virtual stages, no multiple of pp_size ({pp_size}); "
            "set round_virtual_stages_to_pp_multiple, or another number of layers"
        )
    if kind.single and per_rank != 1:
        raise ConfigError(
            f"{where} {per_rank} stages on each rank, but {kind.name} runs one; set"
            f" layers_per_stage to {-(-num_layers // pp_size)}"
        )
    if not kind.single and per_rank < 2:
        raise ConfigError(
            f"{where} {per_rank} stages on each rank, but {kind.name} runs two or more; use fewer"
            " layers in a stage"
        )
    return count


def _round_count(count: int, size: int, rounding: str | None) -> int:
    over = count % size
    if not over or rounding is None:
        return count
    return count - over if rounding == "down" else count + size - over


def place_stages(count: int, pp_size: int, kind: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return the stage numbers of each rank. Stages are placed round robin, or in a V for the one
    schedule that needs it (functional.py, stage_ids_this_rank).
    """
    # In a V the first rank also has the last stage, so that the
    # loss starts the backward pass where the forward pass began.
    if kind.v:
        return tuple((rank, count - 1 - rank) for rank in range(pp_size))
    return tuple(tuple(range(rank, count, pp_size)) for rank in range(pp_size))


def request(
    num_layers: int, pp_size: int, count: int, kind: Schedule
) -> tuple[int | None, str | None] | None:
    """Return values of `layers_per_stage` and of the rounding that result in `count` virtual
    stages. None if no values do.
    """
    if number(num_layers, None, pp_size, kind, None) == count:
        return None, None
    # Without rounding first; then numbers that round down to `count`, then numbers that round up to it.
    roundings = (
        ((count,), None),
        (range(count + 1, count + pp_size), "down"),
        (range(count - 1, max(0, count - pp_size), -1), "up"),
    )
    for candidates, rounding in roundings:
        for target in candidates:
            # The smallest size whose stages are few enough. They may
            # be fewer still: ten layers never make six stages.
            size = -(-num_layers // target)
            if -(-num_layers // size) == target:
                return size, rounding
    return None


# Named modules


def boundaries(parts: Sequence[Sequence[str]]) -> tuple[int, ...] | None:
    """Return the number of the first layer of each part, followed by the number of all layers. None
    if the parts do not hold layers 0, 1, 2, ... in order.
    """
    layers = [
        sorted({int(match[1]) for match in map(LAYER.fullmatch, part) if match}) for part in parts
    ]
    # One after the other they have to count up from 0, without a gap and without a layer twice.
    if [layer for part in layers for layer in part] != list(range(sum(map(len, layers)))):
        return None
    ends = [0]
    for part in layers:
        ends.append(ends[-1] + len(part))
    return tuple(ends) if ends[-1] else None


def stage_modules(cuts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Return the module names of each stage of a Hugging Face decoder. `cuts` are the first layers
    of the stages, followed by the number of layers.
    """
    parts = [
        [f"model.layers.{layer}" for layer in range(first, last)] for first, last in pairwise(cuts)
    ]
    parts[0].insert(0, "model.embed_tokens")
    parts[-1] += ["model.norm", "lm_head"]
    # Every stage computes rotary angles itself; a part without the module would have none.
    return tuple((*part, "model.rotary_emb") for part in parts)


def find_repeats(parts: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Return the decoder layers that are in more than one part."""
    names = [name for part in parts for name in set(part) if LAYER.fullmatch(name)]
    return tuple(sorted({name for name in names if names.count(name) > 1}))
