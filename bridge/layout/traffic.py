"""Traffic: the collectives and messages of one optimizer step, by name, each with the number of
calls and of bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from bridge.layout.residency import Residency, reductions_by_stage, stage_visits
from bridge.layout.schedule.action import COMPUTE, WRITES, ActionKind, Row
from bridge.layout.shard import BYTES, Layout
from bridge.layout.tensor import Site
from bridge.plan.plan import Dtype

GATHER = "gather weights"
REDUCE = "reduce gradients"
REPLICAS = "sum replicas"
TIED = "sum tied gradients"
SEND = "send activations"
SEND_BACKWARD = "send input gradients"
HEADER = "send shapes"
SUM = "sum activations"
SUM_BACKWARD = "sum input gradients"
GATHER_TOKENS = "gather tokens"
SCATTER_TOKENS = "scatter tokens"
GATHER_FEATURES = "gather features"
LARGEST = "largest logit"
LOGITS = "sum logits"
AGREE = "agree"
"""Name of the only collective over all ranks in a step. It sums the squared norm of the gradients,
the loss, the number by which the loss is divided, and three numbers of ranks: those whose data ended,
those with late gradients, and those that lack a gradient.
"""

AGREED = 6
"""Number of values in the collective `AGREE`, each in fp64."""

HEADER_LENGTH = 64
"""Number of values in a header, the message that announces a microbatch: the number of tensors, and
for each tensor the format, the shape, and whether it needs a gradient.
"""
HEADER_BYTES = 8 * HEADER_LENGTH

FOLLOWED = 4
"""Number of microbatches that are simulated one by one to count gathers. All later microbatches
gather as often as the last simulated microbatch.
"""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Number of calls of one collective, and number of bytes of the whole tensors in these calls:
    the input of a scatter, the output of a gather.
    """

    count: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.count + other.count, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.count * times, self.bytes * times)


@dataclass(frozen=True, slots=True)
class Visits:
    """The stages of one rank in the order in which a step computes them (`path`), and in the order
    in which their gradients are written (`writers`).
    """

    path: tuple[int, ...]
    writers: tuple[int, ...]

    @classmethod
    def of(cls, row: Row, local: Mapping[int, int]) -> Visits:
        """Return the order of stages in `row`, the actions of one rank. `local` maps each stage to
        its number on this rank.
        """
        path = tuple(local[action.stage] for action in row if action.kind in COMPUTE)
        return cls(path, tuple(local[action.stage] for action in row if action.kind in WRITES))


def step_traffic(
    layout: Layout, accumulation: int, world: int, index: int = 0, order: Visits | None = None
) -> Mapping[str, Traffic]:
    """Return the collectives on data rank `index` in a step of `accumulation` microbatches. The
    first step of a run is different, because it also fills buffers of frozen weights.

    Without `order`, the step runs depth first. Recomputation adds no collectives, because it runs
    within backward, while the weights of the stage are whole. A step that is skipped because of an
    overflow has the same collectives, except the gathers after the update.
    """
    if order is None:
        times = _count_gathers(layout, accumulation)
        writers = tuple(reversed(range(layout.first_trained, layout.stages))) * accumulation
    else:
        times, writers = _gather_times(layout, order.path), order.writers
    # Tied gradients are summed over the pipeline ranks that hold the parameter, after the reduction
    # over data ranks: each rank sends its slice alone.
    with_replicas = [flat for flat in layout.flats if flat.trainable and flat.replicas]
    tied = sum((Traffic(1, flat.shard * BYTES[flat.reduce]) for flat in with_replicas), Traffic())
    traffic = {
        GATHER: _gather_traffic(layout, times),
        REDUCE: _reduction_traffic(layout, writers),
        TIED: tied,
    }
    if world > 1:
        traffic[AGREE] = Traffic(1, AGREED * BYTES["fp64"])
    return {name: total for name, total in traffic.items() if total.count} | replica_traffic(
        layout, index
    )


def message_traffic(
    row: Row, forward: Mapping[int, Traffic], backward: Mapping[int, Traffic], variable: bool
) -> dict[str, Traffic]:
    """Return the messages that a rank sends in a step. `row` are the actions of the rank. `forward`
    has the size of the message to each stage in forward, and `backward` the size of the message with
    gradients that each stage sends back.

    A header with the shapes comes before the first microbatch of a step. With `variable`, a header
    comes before every microbatch.
    """
    traffic: dict[str, Traffic] = defaultdict(Traffic)
    stages: set[int] = set()
    for action in row:
        if action.kind is ActionKind.SEND_FORWARD:
            traffic[SEND] += forward[action.stage]
            if variable or action.stage not in stages:
                traffic[HEADER] += Traffic(1, HEADER_BYTES)
            stages.add(action.stage)
        elif action.kind is ActionKind.SEND_BACKWARD:
            traffic[SEND_BACKWARD] += backward[action.stage + 1]
    return dict(traffic)


def add_traffic(*parts: Mapping[str, Traffic]) -> dict[str, Traffic]:
    """Return the sum of the traffic in all `parts`, for each collective."""
    traffic: dict[str, Traffic] = defaultdict(Traffic)
    for part in parts:
        for name, total in part.items():
            traffic[name] += total
    return dict(traffic)


def sites_within(sites: Iterable[Site], layers: Iterable[str]) -> list[Site]:
    """Return those of `sites` that are in the layers with these names."""
    prefixes = tuple(f"{name}." for name in layers)
    return [site for site in sites if f"{site.name}.".startswith(prefixes)]


def _gather_traffic(layout: Layout, times: Counter[int]) -> Traffic:
    flats = ((layout.flats[index], number) for index, number in times.items())
    return sum(
        (
            Traffic(number, number * flat.padded * BYTES[flat.dtype])
            for flat, number in flats
            if flat.sharded
        ),
        Traffic(),
    )


def _count_gathers(layout: Layout, accumulation: int) -> Counter[int]:
    """Return how often each flat is gathered in a step of `accumulation` microbatches. Only
    `FOLLOWED` microbatches are simulated, because all later ones gather equally often.
    """
    microbatches, path = min(accumulation, FOLLOWED), stage_visits(layout)
    times = _gather_times(layout, path * microbatches)
    if accumulation > microbatches:
        more = accumulation - microbatches
        before = _gather_times(layout, path * (microbatches - 1))
        # The difference between the last two simulated steps is what one further micro batch
        # gathers.
        times = Counter(
            {index: number + more * (number - before[index]) for index, number in times.items()}
        )
    return times


def _gather_times(layout: Layout, path: tuple[int, ...]) -> Counter[int]:
    """Return how often each flat is gathered in a step that computes the stages of `path`. Two
    steps are simulated and the second one is counted, because the first step also fills the buffers
    of frozen flats.
    """
    if not any(flat.weight_shared for flat in layout.flats):
        return Counter(index for index, flat in enumerate(layout.flats) if flat.trainable)
    residency = Residency(layout)
    _gathers_on_path(layout, residency, path)
    return Counter(_gathers_on_path(layout, residency, path))


def _gathers_on_path(layout: Layout, residency: Residency, path: tuple[int, ...]) -> list[int]:
    # The update of the step before has changed all trained weights, so gathered copies of them are out of date.
    residency.drop(index for index, flat in enumerate(layout.flats) if flat.trainable)
    return [
        index
        for place in range(len(path))
        for index in residency.due(path[place : place + gather_ahead(layout)])
    ]


def gather_ahead(layout: Layout) -> int:
    """Return the number of stage computations for which a rank gathers weights ahead: as many as
    one microbatch has, forward and backward.
    """
    return 2 * layout.stages


def _reduction_traffic(layout: Layout, writers: tuple[int, ...]) -> Traffic:
    if layout.data == 1:
        return Traffic()
    flats = (
        layout.flats[index] for indices in reductions_by_stage(layout, writers) for index in indices
    )
    return sum(
        (Traffic(1, flat.padded * BYTES[flat.exchange]) for flat in flats if not flat.alone),
        Traffic(),
    )


def replica_traffic(layout: Layout, index: int) -> dict[str, Traffic]:
    """Return the traffic of the collective that sums partial gradients over tensor ranks. It is the
    only collective whose size differs between data ranks, because data rank `index` sums only the
    slices that it owns.
    """
    sizes: Counter[str] = Counter()
    for flat in layout.flats:
        if flat.trainable:
            sizes[flat.reduce] += len(flat.own(flat.partial, index))
    traffic = Traffic(
        sum(size > 0 for size in sizes.values()),
        sum(size * BYTES[dtype] for dtype, size in sizes.items()),
    )
    return {REPLICAS: traffic} if traffic.count else {}


def activation_traffic(
    sites: Iterable[Site], again: Collection[str], sequence: bool, tokens: int, compute: Dtype
) -> Mapping[str, Traffic]:
    """Return the exchanges of activations between tensor ranks in one microbatch of `tokens`
    tokens, forward and backward.

    `again` are the names of the sites in recomputed layers, which exchange activations a second
    time. The loss is never recomputed. All parameters are assumed to be trained.
    """
    traffic: dict[str, Traffic] = defaultdict(Traffic)
    for site in sites:
        # The loss is computed in fp32 at least, whatever the format of activations.
        exact = site.exact or site.kind == "logits"
        size = BYTES["fp32" if exact and compute != "fp64" else compute]
        forward, backward = _CALLS[site.kind, sequence]
        # A recomputed layer runs forward twice, and with it its collectives.
        times = 2 if site.name in again and site.kind != "logits" else 1
        for name, width in forward * times + backward:
            traffic[name] += Traffic(1, tokens * (width or site.width) * size)
    return traffic


Calls = tuple[tuple[str, int], ...]
"""Collectives at a site: for each, the name and the number of elements that it moves for each
token. The number 0 stands for the width of the site.
"""

# As in Megatron's core/tensor_parallel/mappings.py: what is the identity in one direction is a sum
# in the other; with sequence parallelism the sum becomes a scatter, and its counterpart a gather of
# tokens.
_CALLS: Mapping[tuple[str, bool], tuple[Calls, Calls]] = {
    ("enter", False): ((), ((SUM_BACKWARD, 0),)),
    ("enter", True): (((GATHER_TOKENS, 0),), ((SCATTER_TOKENS, 0),)),
    ("leave", False): (((SUM, 0),), ()),
    ("leave", True): (((SCATTER_TOKENS, 0),), ((GATHER_TOKENS, 0),)),
    ("embed", False): (((SUM, 0),), ()),
    ("embed", True): (((SUM, 0),), ()),
    ("scatter", True): ((), ((GATHER_TOKENS, 0),)),
    ("gather", True): (((GATHER_TOKENS, 0),), ()),
    ("gather features", False): (((GATHER_FEATURES, 0),), ()),
    ("gather features", True): (((GATHER_FEATURES, 0),), ()),
    ("divide features", False): ((), ((GATHER_FEATURES, 0),)),
    ("divide features", True): ((), ((GATHER_FEATURES, 0),)),
    ("enter whole", False): ((), ((SUM_BACKWARD, 0),)),
    ("leave whole", False): (((SUM, 0),), ()),
    ("enter whole", True): ((), ((SUM_BACKWARD, 0),)),
    ("leave whole", True): (((SUM, 0),), ()),
    ("logits", False): (((LARGEST, 1), (LOGITS, 2)), ()),
    ("logits", True): (((LARGEST, 1), (LOGITS, 2)), ()),
}
"""A table from the kind of a site, and whether sequence parallelism is on, to two values: the
collectives at this site in forward, and those in backward.
"""
