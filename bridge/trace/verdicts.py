"""Verdicts: the results of comparing one tensor of two runs."""

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
"""Verdicts that rounding does not explain."""


@dataclass(frozen=True, slots=True)
class Line:
    """The result for one tensor.

    `distance` is the root mean square of the difference divided by that of the values, and `bound`
    is the largest distance that rounding may cause. `cause` describes a fault. `ranks` are the
    ranks whose logs differ, if not all differ. The verdict is "unseen" if one of the runs does not
    log tensors of this kind. The distance of weights excludes the part that follows, through
    adaptive updates, from the distance of gradients.
    """

    name: Name
    verdict: Verdict
    distance: float = 0.0
    bound: float = 0.0
    cause: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def is_fault(self) -> bool:
        """Whether rounding does not explain the result."""
        return self.verdict in FAULTS


def share(line: Line) -> float:
    """Return the distance of a line as a share of its bound, or infinity for a fault without a
    bound.
    """
    if line.bound:
        return line.distance / line.bound
    return math.inf if line.is_fault else 0.0
