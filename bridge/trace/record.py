"""Records: one line of a log, named the same on every layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from bridge.trace.placement import Placement
from bridge.trace.summary import Summary

PHASES = ("init", "forward", "backward", "reduce", "update")
"""What a step does, in order."""

MEMORY, SHARD = "memory", "gradient shard"
"""Kinds that tell of one rank, on its layout; runs are not compared by them."""

Unit = Literal["own", "activation", "parameter"]
"""The unit of a tensor: its own values, a gradient as backward leaves it at an activation, or one as the step reduced it."""


class Name(NamedTuple):
    """What was logged: `kind` is what the tensor is to its layer (output, input gradient, weight, gradient, moment), `tensor`
    which one of them. `microbatch` is None where the microbatches of a step make one tensor, one after the other.
    """

    step: int
    phase: str
    layer: str
    microbatch: int | None
    kind: str
    tensor: str = ""

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else f"microbatch {self.microbatch}"
        parts = (str(self.step), self.phase, self.layer, microbatch, self.kind, self.tensor)
        return "/".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Record:
    """What one rank logged of one tensor at one place in a step.

    `placement` tells which part of the named tensor it is, `microbatch` when it was seen. Logged values times `factor` are in
    the unit that all layouts share: of the step's mean loss, unscaled.
    """

    name: Name
    microbatch: int | None
    dtype: str
    device: str
    level: int
    placement: Placement
    factor: float
    summary: Summary | None
    samples: str | None = None
    full: str | None = None

    def fields(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"name": list(self.name)}
