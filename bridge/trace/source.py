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
"""Kinds of tensors that persist between steps: owned parts of weights, gradients (also as reduced
flat slices: shards) and optimizer state; whole parameters that data ranks hold alike (replicas);
buffers; counters and rates (state); and generators.
"""
Moment = Literal["reduced", "updated", "ended"]
"""Points of a step that every rank reaches, even if the step is skipped. At "reduced", gradients
are complete and nothing is updated. At "updated", weights are updated or the step is skipped. At
"ended", the step is over.
"""


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that persists between steps. `layer` is its layer, and `tensor` its name in the
    layer, such as the name of a moment. If its placement has the pipeline axis among its replicas,
    only the pipeline ranks `holders` hold the tensor (empty: all).
    """

    layer: str
    kind: str
    tensor: str
    local: Tensor
    placement: Placement
    holders: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Now:
    """The present position of a run: the step, the current microbatch, the number of microbatches
    in the step over all data ranks (None: unknown), and whether the current forward pass is a
    recomputation outside any backward pass.

    If the number is unknown, `part` may hold this rank's index and the number of equal parts of the
    microbatch.
    """

    step: int
    microbatch: int
    microbatches: int | None
    again: bool = False
    part: tuple[int, int] | None = None


class Source(Protocol):
    """The interface that an engine must have for `attach`."""

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
        """The sets of pipeline ranks that hold some tensor alike. All ranks know these sets."""
        ...

    @property
    def comm(self) -> Comm:
        """The communicator with the groups of this rank."""
        ...

    def now(self) -> Now:
        """The present step and microbatch of the run."""
        ...

    def factors(self) -> Mapping[Unit, float]:
        """Return factors for gradients, by unit. Gradients times these factors are those of the
        step's unscaled mean loss.
        """
        ...

    def activation(self, layer: str, tensor: Tensor, output: bool) -> Placement:
        """Return the placement of `tensor` within the microbatch's output (or input) of a layer."""
        ...

    def tensors(self, kind: Kind) -> Iterator[Held]:
        """Yield this rank's tensors of a kind. Gradients are available after their reduction."""
        ...

    def batch(self) -> Iterator[Held]:
        """Yield the inputs and labels of the current microbatch."""
        ...

    def on(self, moment: Moment, call: Callable[[], None]) -> None:
        """Register `call` for a point of every step."""
        ...

    def settings(self) -> Mapping[str, object]:
        """The run's settings by dotted path. They are equal on all ranks."""
        ...

    def about(self) -> Mapping[str, object]:
        """Facts for the log's head: engine, mesh, settings."""
        ...
