"""Effects of a setting on a run. The command line imports this module at its start, so the module
imports nothing that is slow to load.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Effect(StrEnum):
    """The effect of a field, or of the loss of a field, on the run; the worst effect comes first.
    """

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


_RANKS: Mapping[Effect, int] = {effect: rank for rank, effect in enumerate(Effect)}
