"""Steps: the collectives and messages of one rank in a step, derived from the layout of the rank
and the order of its actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bridge.layout.pipeline import Pipeline
from bridge.layout.recompute import Chunk, again_by_stage
from bridge.layout.schedule.action import Row
from bridge.layout.shard import Layout
from bridge.layout.tensor import Site
from bridge.layout.traffic import (
    Traffic,
    Visits,
    activation_traffic,
    add_traffic,
    message_traffic,
    sites_within,
    step_traffic,
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of one microbatch: the number of its tokens, the messages to each stage in forward
    (`taken`), and the messages with gradients that each stage sends back (`given`). With
    `variable`, microbatches may differ in size.
    """

    tokens: int
    taken: Mapping[int, Traffic]
    given: Mapping[int, Traffic]
    variable: bool = False


@dataclass(frozen=True)
class Step:
    """The work of one pipeline rank in a step. `row` are the actions of the rank, and `sites` are
    the points in its layers at which tensor ranks exchange activations. `parts` has the recomputed
    and other chunks of every stage, and `names` the names of all layers. With `sequence`, tokens
    are split over tensor ranks.
    """

    rank: int
    layout: Layout
    pipeline: Pipeline
    row: Row
    parts: Sequence[Sequence[Chunk]]
    names: Sequence[str]
    sites: Sequence[Site]
    sequence: bool

    def traffic(self, sizes: Sizes, world: int, index: int = 0) -> dict[str, Traffic]:
        """Return the collectives and messages in a step, for data rank `index` of a run of `world`
        ranks. The first steps are different, because they also fill buffers of frozen weights.
        """
        schedule = self.pipeline.schedule
        local = {stage: place for place, stage in enumerate(self.pipeline.local(self.rank))}
        # Micro batches of a depth-first step are all alike, so a few of them are simulated. Others
        # are followed action by action.
        order = None if schedule.name == "depth_first" else Visits.of(self.row, local)
        return add_traffic(
            step_traffic(self.layout, schedule.microbatches, world, index, order),
            self._activations(sizes.tokens),
            message_traffic(self.row, sizes.taken, sizes.given, sizes.variable),
        )

    def _activations(self, tokens: int) -> dict[str, Traffic]:
        """Return the exchanges of activations between tensor ranks in a step."""
        if not self.sites:
            return {}
        layers = again_by_stage(self.row, self.parts, self.pipeline.layers)
        exemptions, number = self.pipeline.schedule.kept, self.pipeline.schedule.microbatches
        alike: Counter[frozenset[int]] = Counter()
        for microbatch in range(number):
            again = (own for stage, own in layers.items() if (stage, microbatch) not in exemptions)
            alike[frozenset().union(*again)] += 1
        return add_traffic(*(self._of_one(again, tokens, times) for again, times in alike.items()))

    def _of_one(self, again: frozenset[int], tokens: int, times: int) -> dict[str, Traffic]:
        names = {
            site.name for site in sites_within(self.sites, (self.names[layer] for layer in again))
        }
        compute = self.layout.flats[0].dtype if self.layout.flats else "fp32"
        traffic = activation_traffic(self.sites, names, self.sequence, tokens, compute)
        return {name: part * times for name, part in traffic.items()}
