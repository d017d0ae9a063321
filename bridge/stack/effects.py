"""Effects of a setting on a run. The command line imports this module at its start, so the module
imports nothing that is slow to load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum


class Effect(StrEnum):
    """The effect of a field, or of the loss of a field, on the run; the worst effect comes first."""

    STOPS = "the run stops"
    NUMBERS = "different numbers"
    ROUNDING = "same up to rounding"
    COST = "memory or speed"
    NONE = "same numbers"

    @property
    def rank(self) -> int:
        """The position of this effect in the order of effects, 0 for the worst."""
        return _RANKS[self]

    def reaches(self, threshold: Effect) -> bool:
        """Whether this effect is as bad as `threshold`, or worse."""
        return self.rank <= threshold.rank


def worst(effects: Iterable[Effect], default: Effect = Effect.NONE) -> Effect:
    """Return the worst of the effects, and `default` if there is none."""
    return min(effects, key=_RANKS.__getitem__, default=default)


class Use(StrEnum):
    """What the code of a stack does with a setting. The effect of the setting follows from it; see
    docs/effects.md.
    """

    COMPUTES = "a term, a factor, a shape or an order of steps of what is computed"
    SAMPLES = "the samples, their order or their masks, or random draws"
    STARTS = "the state that a run starts from"
    ENDS = "the steps that a run makes"
    FORM = "a kernel, a number format or an order of sums of the same computation"
    PLACES = "where tensors are kept, when they are sent, or what is computed twice"
    WAITS = "a measurement, a check or a file for which the run waits"
    RECORDS = "logs, names and files"
    CHECKS = "a check that stops the run or passes"
    UNREAD = "nothing that a training step reads"

    @property
    def effect(self) -> Effect:
        """The effect of a setting with this use on the run."""
        return _EFFECTS[self]


_EFFECTS: Mapping[Use, Effect] = {
    **dict.fromkeys((Use.COMPUTES, Use.SAMPLES, Use.STARTS, Use.ENDS), Effect.NUMBERS),
    Use.FORM: Effect.ROUNDING,
    **dict.fromkeys((Use.PLACES, Use.WAITS), Effect.COST),
    **dict.fromkeys((Use.RECORDS, Use.CHECKS, Use.UNREAD), Effect.NONE),
}
_RANKS: Mapping[Effect, int] = {effect: rank for rank, effect in enumerate(Effect)}
