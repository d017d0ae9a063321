"""Records: the entries of a log, whose names do not depend on the layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from bridge.trace.placement import Placement
from bridge.trace.summary import Summary

PHASES = ("init", "forward", "backward", "reduce", "update")
"""Phases of a step, in order."""

MEMORY, SHARD = "memory", "gradient shard"
"""Kinds of tensors that depend on the layout, and are not compared between runs."""

Unit = Literal["own", "activation", "parameter"]
"""The unit of a tensor: its own values, a gradient of an activation as backward computes it, or a
gradient after the reduction.
"""


class Name(NamedTuple):
    """The name of a logged tensor. `kind` is its role in the layer (output, input gradient, weight,
    gradient, moment), and `tensor` its name among the tensors of this kind. `microbatch` is None if
    the microbatches of a step are concatenated to one tensor.
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
    """The record that one rank logged of one tensor at one point of a step. `placement` is the part
    of the tensor that the rank held, and `microbatch` the microbatch in which it was logged. Values
    times `factor` are in the unit of all layouts: that of the step's mean loss, unscaled.
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
        """The record as JSON values."""
        return asdict(self) | {"name": list(self.name)}
