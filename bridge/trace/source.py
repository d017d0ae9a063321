"""Sources: the interface by which traces read an engine, whatever its stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor, nn

from bridge.engine.comm import Comm
from bridge.trace.placement import Placement
from bridge.trace.record import Unit

Kind = Literal["weight", "gradient", "shard", "moment", "replica", "buffer", "state", "generator"]
"""Kinds of tensors that an engine holds between steps: the parts of weights, of gradients and of
moments that a rank owns; a rank's shards of the reduced gradients with their padding (shard); whole
parameters that all data ranks hold (replica); buffers; counters and learning rates (state); and
states of random generators.
"""
Moment = Literal["reduced", "updated", "ended"]
"""Points of a step that every rank reaches, even if the step is skipped. At "reduced", gradients
are complete, and no weight is updated yet. At "updated", all weights are updated, or the step was
skipped. At "ended", the step is over.
"""


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that an engine holds between steps. `layer` is its layer, and `tensor` its name
    within the layer, such as the name of a moment. If ranks along the pipeline axis hold copies of
    it, `holders` are the pipeline ranks that do (empty: all).
    """

    layer: str
    kind: str
    tensor: str
    local: Tensor
    placement: Placement
    holders: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Now:
    """The position of a run: the step, the current microbatch, and the number of microbatches in
    the step over all data ranks (None: unknown). `again` is true if a forward pass is a
    recomputation that does not run inside backward.

    If the number of microbatches is unknown, `part` may say which part of the microbatch this rank
    has: its index, and the number of equal parts.
    """

    step: int
    microbatch: int
    microbatches: int | None
    again: bool = False
    part: tuple[int, int] | None = None


class TraceSource(Protocol):
    """The interface that an engine has to implement so that `attach` can trace it."""

    @property
    def layers(self) -> Mapping[str, nn.Module]:
        """The layers by global name, in the order in which they run."""
        ...

    @property
    def entrance(self) -> str:
        """The first layer that this rank runs."""
        ...

    @property
    def recomputes(self) -> bool:
        """Whether backward may run the forward pass of a layer again."""
        ...

    @property
    def holders(self) -> Sequence[tuple[int, ...]]:
        """Sets of pipeline ranks that hold copies of some tensor, such as a tied embedding. The
        list is the same on all ranks.
        """
        ...

    @property
    def comm(self) -> Comm:
        """The communicator of this rank, with its groups."""
        ...

    def now(self) -> Now:
        """Return the present step and microbatch."""
        ...

    def factors(self) -> Mapping[Unit, float]:
        """Return factors by unit. Gradients of a unit times its factor are the gradients of the
        step's mean loss, without loss scale.
        """
        ...

    def activation(self, layer: str, tensor: Tensor, output: bool) -> Placement:
        """Return the placement of `tensor`, this rank's output (or input gradient) of a layer. The
        whole tensor is the output (or input gradient) for the whole microbatch.
        """
        ...

    def tensors(self, kind: Kind) -> Iterator[Held]:
        """Yield this rank's tensors of a kind. Gradients can be read once they are reduced."""
        ...

    def batch(self) -> Iterator[Held]:
        """Yield the inputs and labels of the current microbatch."""
        ...

    def on(self, moment: Moment, call: Callable[[], None]) -> None:
        """Have `call` called at a point of every step."""
        ...

    def settings(self) -> Mapping[str, object]:
        """Return the run's settings by dotted path. They are the same on all ranks."""
        ...

    def about(self) -> Mapping[str, object]:
        """Return the facts that run.json records: engine, mesh, settings."""
        ...
