"""Records: the entries of a log, one for each tensor that a rank logged. Their names do not depend
on the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from bridge.trace.placement import Placement
from bridge.trace.summary import Summary

PHASES = ("init", "forward", "backward", "reduce", "update")
"""The phases of a step, in order; "init" is the time before the first step."""

MEMORY, SHARD = "memory", "gradient shard"
"""Kinds of tensors that depend on the layout, and so are not compared between runs."""

Unit = Literal["own", "activation", "parameter"]
"""What a tensor's values have to be multiplied by at the end of a step: nothing ("own"), the
factor of gradients of activations, or the factor of reduced gradients of parameters.
"""


class Name(NamedTuple):
    """The name of a logged tensor. `kind` is what the tensor is in its layer (output, input
    gradient, weight, gradient, moment), and `tensor` tells tensors of one kind apart. `microbatch`
    is None if the tensor consists of all microbatches of a step.
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
    """What one rank logged of one tensor at one point of a step. `placement` is the part of the
    tensor that the rank held, and `microbatch` the microbatch in which it was logged. A gradient
    times `factor` is the gradient of the step's mean loss, without loss scale, whatever the layout.
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
        """Return the record as a dict of JSON values."""
        # `asdict` copies each value, which takes longer than all else of a line.
        parts = {name: getattr(self, name) for name in self.__slots__}
        inner = {"placement": self.placement} | ({"summary": self.summary} if self.summary else {})
        return parts | {
            "name": list(self.name),
            **{
                key: {name: getattr(part, name) for name in part.__slots__}
                for key, part in inner.items()
            },
        }
