"""Sources: the interface of a traced engine, whatever its stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor, nn

from bridge.comm import Comm
from bridge.trace.placement import Placement
from bridge.trace.record import Unit

Kind = Literal["weight", "gradient", "shard", "moment", "replica", "buffer", "state", "generator"]
"""Kinds of tensors between steps.

They are owned parts of weights, gradients (also as reduced flat pieces: shards) and optimizer
state; whole parameters that data ranks hold alike (replicas); buffers; counters and rates (state);
and generators.
"""
Moment = Literal["reduced", "updated", "ended"]
"""Points of a step that every rank reaches, even if the step is skipped.

At "reduced" gradients are complete and nothing is updated; at "updated" weights are updated or
skipped; at "ended" the step is over.
"""


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that lives between steps. `layer` is its layer, and `tensor` its name, such as that
    of a moment.

    If its placement has the pipeline axis among its replicas, only the pipeline ranks `holders`
    hold it (empty: all).
    """

    layer: str
    kind: str
    tensor: str
    local: Tensor
    placement: Placement
    holders: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Now:
    """The present point of a run.

    It has the step, the current microbatch, the number of microbatches in the step over all data
    ranks (None: unknown), and whether the current forward pass is a recomputation outside of any
    backward pass. If the number is unknown, `part` may have this rank's index and the number of
    equal parts of the microbatch.
    """

    step: int
    microbatch: int
    microbatches: int | None
    again: bool = False
    part: tuple[int, int] | None = None


class Source(Protocol):
    """The interface that `attach` needs of an engine."""

    @property
    def layers(self) -> Mapping[str, nn.Module]:
        """Layers by global name, in order."""
        ...

    @property
    def entrance(self) -> str:
        """The first layer that this rank runs."""
        ...

    @property
    def recomputes(self) -> bool:
        """Whether the forward pass of a layer may run again for backward."""
        ...

    @property
    def holders(self) -> Sequence[tuple[int, ...]]:
        """The sets of pipeline ranks that hold some tensor alike, which all ranks know."""
        ...

    @property
    def comm(self) -> Comm:
        """The communicator with the groups of this rank."""
        ...

    def now(self) -> Now:
        """The present step and microbatch of the run."""
        ...

    def factors(self) -> Mapping[Unit, float]:
        """Factors that turn gradients of the ending step into those of its unscaled mean loss, by
        unit.
        """
        ...

    def activation(self, layer: str, tensor: Tensor, output: bool) -> Placement:
        """The placement of `tensor` within the microbatch's output (or input) of a layer."""
        ...

    def tensors(self, kind: Kind) -> Iterator[Held]:
        """Yield this rank's tensors of a kind; gradients are available after their reduction."""
        ...

    def batch(self) -> Iterator[Held]:
        """Yield the inputs and labels of the current microbatch."""
        ...

    def on(self, moment: Moment, call: Callable[[], None]) -> None:
        """Register `call` for a point of every step."""
        ...

    def settings(self) -> Mapping[str, object]:
        """The run's settings by dotted path, which are equal on all ranks."""
        ...

    def about(self) -> Mapping[str, object]:
        """Facts for the log's head: engine, mesh, settings."""
        ...
