"""What follows for the numbers if a run has other ranks, or another arrangement of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.effects import Effect

Values = Mapping[str, Any]
AXES = tuple(f"parallel.{axis}" for axis in ("data", "tensor", "pipeline", "context"))
DERIVED = ("parallel.data", "batch.accumulation")
"""Plan fields that follow from the number of ranks, the other axes and the global batch. The sizes
of the global batch and of a microbatch decide what a step computes, and are compared by themselves.
"""
STEP = "batch.global_"
DROPOUT = "model.dropout"
DROPOUTS = (DROPOUT, "model.attention.dropout", "model.embedding.dropout", "adapters.dropout")
MASKS = "each rank draws its own random numbers, so dropout spares other elements on other ranks"
SAME = "the sequences of a step are the same, on other ranks"
UNKNOWN = "; the numbers differ if the script's model has dropout"


def effect_of_ranks(ours: str, one: Values, other: Values) -> tuple[Effect, str] | None:
    """Return the effect on the run if the plan field `ours` differs, and the reason. Return None if
    the arrangement of ranks does not decide this effect.

    `one` and `other` are the plan values that take effect in the two runs.
    """
    sides = (one, other)
    if ours in AXES and any(values.get(path) for values in sides for path in DROPOUTS):
        return Effect.NUMBERS, MASKS
    steps = [values.get(STEP) for values in sides]
    if ours not in DERIVED or None in steps:
        return None
    if steps[0] != steps[1]:
        return Effect.ROUNDING, "this difference follows from the other differences"
    return Effect.ROUNDING, SAME if all(DROPOUT in values for values in sides) else SAME + UNKNOWN
