"""What follows for the numbers if a run has other ranks, another arrangement of its ranks, or other
microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bridge.stack.effects import Effect

Values = Mapping[str, Any]
AXES = tuple(f"parallel.{axis}" for axis in ("data", "tensor", "pipeline", "context"))
DERIVED = ("parallel.data", "batch.accumulation")
"""Plan fields that follow from the number of ranks, the other axes and the global batch. The size
of the global batch decides what a step computes, and is compared by itself.
"""
STEP, MICRO = "batch.global_", "batch.micro"
DROPOUT = "model.dropout"
DROPOUTS = (DROPOUT, "model.attention.dropout", "model.embedding.dropout", "adapters.dropout")
MASKS = "each rank draws its own random numbers, so dropout spares other elements on other ranks"
SAME = "the sequences of a step are the same, on other ranks"
CUT = "the sequences of a step are the same, in other microbatches"
UNKNOWN = "; the numbers differ if the script's model has dropout"
LARGER = "this follows from the size of the global batch, which differs"
MOE = "model.moe."


def _drops(values: Values) -> bool:
    return any(values.get(path) for path in DROPOUTS)


def _balances(values: Values) -> bool:
    """Return whether the experts' capacity or their balancing depends on the tokens of a microbatch."""
    if not values.get("model.experts"):
        return False
    kind = values.get(f"{MOE}balance")
    by_loss = values.get(f"{MOE}aux_trained") and kind not in ("none", "sequence", "global")
    return bool(by_loss or kind == "sinkhorn" or values.get(f"{MOE}capacity"))


BY_MICROBATCH: Mapping[str, Callable[[Values], bool]] = {
    "dropout draws its masks for one microbatch after the other": _drops,
    "experts are balanced, or drop tokens, within a microbatch": _balances,
    "values are scaled to 8 bits by the largest of a microbatch": lambda values: bool(
        values.get("precision.fp8")
    ),
}
"""What a run computes for a microbatch as a whole, so that its size changes the numbers."""
UNEVEN = (
    "each microbatch counts the same in the mean, however many tokens the loss leaves out there"
)


def effect_of_ranks(
    ours: str, one: Values, other: Values, uneven: bool = False
) -> tuple[Effect, str] | None:
    """Return the effect on the run if the plan field `ours` differs, and the reason. Return None if
    the arrangement of ranks and microbatches does not decide this effect.

    `one` and `other` are the plan values that take effect in the two runs. With `uneven`, a setting
    leaves some tokens out of the loss.
    """
    sides = (one, other)
    if ours in AXES and any(map(_drops, sides)):
        return Effect.NUMBERS, MASKS
    steps = [values.get(STEP) for values in sides]
    if ours not in (*DERIVED, MICRO) or None in steps:
        return None
    cut = ours != "parallel.data" and one.get(MICRO) != other.get(MICRO)
    if cut and (reason := _by_microbatch(sides, uneven)):
        return Effect.NUMBERS, reason
    if steps[0] != steps[1]:
        return Effect.ROUNDING, LARGER
    certain, sentence = all(DROPOUT in values for values in sides), CUT if cut else SAME
    more = f"{UNKNOWN} or experts, or leaves tokens out of the loss" if cut else UNKNOWN
    return Effect.ROUNDING, sentence if certain else sentence + more


def _by_microbatch(sides: tuple[Values, Values], uneven: bool) -> str:
    """Return the reason why the size of a microbatch changes the numbers, or an empty string."""
    if uneven and any(values.get("loss") != "per_token" for values in sides):
        return UNEVEN
    reasons = (why for why, holds in BY_MICROBATCH.items() if any(map(holds, sides)))
    return next(reasons, "")
