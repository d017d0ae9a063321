"""Sources: what a traced engine tells of itself, whichever stack it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor, nn

from bridge.comm import Comm
from bridge.trace.placement import Placement
from bridge.trace.record import Unit

Kind = Literal["weight", "gradient", "shard", "moment", "replica", "buffer", "state", "generator"]
"""Owned parts of weights, gradients (also as the flat pieces that were reduced: shards) and optimizer state; whole parameters
that data ranks hold alike; buffers; counters; generators.
"""
Moment = Literal["reduced", "updated", "ended"]
"""Points of a step that every rank reaches, also on a step that is skipped: gradients are whole and nothing was updated yet;
weights are updated, or left; the step is over."""


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that lives between steps. `tensor` tells which one of a parameter's (its name, a moment's), `layer` where.

    If its placement has the pipeline axis among its replicas, only the places `holders` on that axis
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
    """Where a run is: its step, the microbatch that runs, how many the step has over all data ranks
    (None: unknown), and whether a forward pass runs once more, outside of any backward. If the number is
    unknown, `part` may tell which of how many equal parts of that microbatch this rank has.
    """

    step: int
    microbatch: int
    microbatches: int | None
    again: bool = False
    part: tuple[int, int] | None = None


class Source(Protocol):
    """What `attach` needs to know of an engine."""

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
        """Whether the forward pass of a layer may run once more for backward."""
        ...

    @property
    def holders(self) -> Sequence[tuple[int, ...]]:
        """The sets of places along the pipeline axis that hold some tensor alike, as all ranks know them."""
        ...

    @property
    def comm(self) -> Comm:
        """The groups of this rank."""
        ...

    def now(self) -> Now:
        """Where the run is."""
        ...

    def factors(self) -> Mapping[Unit, float]:
        """What gradients of the step that ends are multiplied with to be those of its mean loss, unscaled."""
        ...

    def activation(self, layer: str, tensor: Tensor, output: bool) -> Placement:
        """Which part of the microbatch's output (or input) of that layer `tensor` is."""
        ...

    def tensors(self, kind: Kind) -> Iterator[Held]:
        """What this rank holds of that kind; gradients once they are reduced."""
        ...

    def batch(self) -> Iterator[Held]:
        """Inputs and labels of the microbatch that runs."""
        ...

    def on(self, moment: Moment, call: Callable[[], None]) -> None:
        """Call at that point of every step."""
        ...

    def settings(self) -> Mapping[str, object]:
        """The run's settings by dotted path, alike on all ranks."""
        ...

    def about(self) -> Mapping[str, object]:
        """Facts for the log's head: engine, mesh, settings."""
        ...
