"""Verdicts: the result of comparing one tensor in two runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bridge.trace.record import Name

Verdict = Literal[
    "equal",
    "rounding",
    "fault",
    "nan",
    "only in A",
    "only in B",
    "other shape",
    "too coarse",
    "unseen",
]

FAULTS: tuple[Verdict, ...] = ("fault", "nan", "only in A", "only in B", "other shape")
"""The verdicts that mean a difference which rounding does not explain."""


@dataclass(frozen=True, slots=True)
class TensorVerdict:
    """The result of comparing one tensor in two runs.

    `distance` is the root mean square of the difference, divided by that of the values, and `bound`
    is the largest distance that rounding may cause. `cause` describes a difference beyond the
    bound. `ranks` are the ranks whose logs differ (empty: all). The verdict is "unseen" if one of
    the runs did not log such tensors. For weights, the distance leaves out the share that the
    rounding of gradients may have caused through adaptive updates.
    """

    name: Name
    verdict: Verdict
    distance: float = 0.0
    bound: float = 0.0
    cause: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def is_fault(self) -> bool:
        """Whether the verdict means a difference that rounding does not explain."""
        return self.verdict in FAULTS


def share_of_bound(line: TensorVerdict) -> float:
    """Return the distance of a result divided by its bound. Without a bound, return infinity for a
    difference that rounding does not explain, and else 0.
    """
    if line.bound:
        return line.distance / line.bound
    return math.inf if line.is_fault else 0.0
