"""Every setting of Kite."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import Field as field

from bridge.plan.section import Count, Real, Section

Positive = Annotated[Real, Ge(0)]


class Ranks(Section):
    """Sizes of the mesh."""

    data: Count | None = field(None, description="Replicas; worked out from the ranks of the run.")
    tensor: Count | None = field(None, description="Ranks that split each matrix.")
    pipeline: Count | None = field(None, description="Ranks that split the layers.")


class Feed(Section):
    """The batch."""

    each: Count | None = field(None, description="Sequences in a microbatch.")
    times: Count | None = field(None, description="Microbatches in a step.")


class Update(Section):
    """The optimizer."""

    lr: Positive | None = field(None, description="Learning rate, until 1.0.")
    rate: Positive | None = field(None, description="Learning rate, since 2.0.")
    bound: Positive | None = field(None, description="Bound on the gradient norm; 0 is off.")


class Kite(Section):
    """A run of Kite."""

    ranks: Ranks = field(Ranks(), description="Mesh.")
    feed: Feed = field(Feed(), description="Batch.")
    update: Update = field(Update(), description="Optimizer.")
    spread: Literal[0, 1, 2, 3] | None = field(
        None, description="What is sharded: nothing, states, gradients, weights."
    )
    numbers: Literal["full", "half", "brain"] | None = field(
        None, description="Format of weights and activations."
    )
    tail: str | None = field(None, description="Name of the run in the log.")
    wind: bool | None = field(None, description="Logs the weather, since 2.0.")
