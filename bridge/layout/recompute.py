"""Recomputation: the layers of each stage whose activations are recomputed in backward, grouped
into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from bridge.layout.schedule.action import WRITES, ActionKind, Row
from bridge.plan.plan import Recompute


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive layers of a stage. With `again`, the layers are recomputed: only the input of the
    first layer is stored until backward.
    """

    layers: range
    again: bool


def chunks_by_stage(recompute: Recompute, stages: Sequence[range]) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of each stage. With the method `uniform`, all layers are recomputed, in
    chunks of `recompute.layers` layers. With `block`, only the first `recompute.layers` layers of
    each stage are recomputed, in chunks of one layer. With `recompute.ratio`, the first layers of
    the model are recomputed.
    """
    chosen = _layer_choice(recompute, stages)
    together = (recompute.layers or 1) if recompute.method != "block" else 1
    return tuple(tuple(_stage_chunks(stage, chosen, together)) for stage in stages)


def again_by_stage(
    row: Row, parts: Sequence[Sequence[Chunk]], stages: Sequence[range]
) -> dict[int, frozenset[int]]:
    """Return the layers that a rank recomputes, for each of the rank's stages. Microbatches in
    `Schedule.kept` are not recomputed at all.

    If the schedule splits backward passes or has actions that recompute, a stage is recomputed as a
    whole if one of its layers is.
    """
    apart = any(action.kind in (ActionKind.INPUT, ActionKind.AGAIN) for action in row)
    writers = {action.stage for action in row if action.kind in WRITES}
    result = {}
    for stage in sorted({action.stage for action in row if action.kind is ActionKind.FORWARD}):
        layers = frozenset(index for chunk in parts[stage] if chunk.again for index in chunk.layers)
        result[stage] = (
            frozenset(stages[stage]) if layers and apart and stage in writers else layers
        )
    return result


def _layer_choice(recompute: Recompute, stages: Sequence[range]) -> Callable[[range, int], bool]:
    ratio = recompute.ratio
    if recompute.granularity in ("none", "selective") or (
        recompute.granularity is None and ratio is None
    ):
        return lambda stage, layer: False
    if ratio is not None:
        # The share of the whole model, counted from its first layer, and not of each stage.
        number = round(ratio * sum(map(len, stages)))
        return lambda stage, layer: layer < number
    if recompute.method == "block":
        return lambda stage, layer: layer - stage.start < (recompute.layers or 1)
    return lambda stage, layer: True


def _stage_chunks(
    stage: range, chosen: Callable[[range, int], bool], together: int
) -> Iterator[Chunk]:
    for again, group in groupby(stage, lambda layer: chosen(stage, layer)):
        layers, size = list(group), together if again else 1
        for start in range(0, len(layers), size):
            part = layers[start : start + size]
            yield Chunk(range(part[0], part[-1] + 1), again)
