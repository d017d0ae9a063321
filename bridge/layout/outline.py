"""Outline: a whole run as values: the stages of each rank, the bytes that each rank stores, and its
collectives in a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from bridge.batch import solve
from bridge.errors import ConfigError
from bridge.findings import Finding
from bridge.layout.architecture import Architecture, Share
from bridge.layout.levels import dearer
from bridge.layout.mesh import Mesh
from bridge.layout.pipeline import Pipeline, described, name_of, period_of, stages_of, text_of
from bridge.layout.recompute import chunks
from bridge.layout.schedule import program
from bridge.layout.shard import BYTES, Layout, on_rank
from bridge.layout.step import Sizes, Step
from bridge.layout.tensor import Site
from bridge.layout.traffic import REPLICAS, Traffic, added, replica_traffic
from bridge.plan import Plan


@dataclass(frozen=True)
class Place:
    """Facts about all ranks with one pair of pipeline and tensor coordinates: the layout of their
    stages, the sites at which activations are exchanged, and a finding if a lower ZeRO level takes
    fewer bytes.
    """

    layout: Layout
    sites: tuple[Site, ...]
    costly: Finding | None


FOLLOWED = 4
"""Number of periods of a step's microbatches that are simulated one by one. Each further period
sends as much as the last simulated period.
"""


@dataclass(frozen=True)
class Outline:
    """A plan, on a mesh of ranks, with a model of known shape.

    A long step is not simulated as a whole. `pipeline` simulates a few periods of the step's
    microbatches, and each pipeline in `more` simulates one period more than the pipeline before.
    The traffic that the last period adds is counted for `periods` further periods. `notes` explain
    a schedule that differs from the plan's schedule.
    """

    plan: Plan
    shape: Architecture
    mesh: Mesh
    pipeline: Pipeline
    micro: int
    accumulation: int
    more: tuple[Pipeline, ...] = ()
    periods: int = 0
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: Plan, shape: Architecture, world: int) -> Outline:
        """Return the outline of `plan` for a model of this shape. Raises `ConfigError` if the sizes
        do not fit `world` ranks, the model or each other.
        """
        ConfigError.raise_if(shape.problems())
        mesh = Mesh.of(plan.parallel, world)
        shape.tensor_plan(mesh.sizes["tensor"])
        triangle = solve(
            plan.batch.micro, plan.batch.accumulation, plan.batch.global_, mesh.sizes["data"]
        )
        accumulation = triangle.accumulation or 1
        shown, notes = described(plan, accumulation, shape.facts())
        pipelines, periods = _pipelines(shown, shape, accumulation)
        found = cls(
            plan,
            shape,
            mesh,
            pipelines[0],
            triangle.micro or 0,
            accumulation,
            pipelines[1:],
            periods,
            notes,
        )
        ConfigError.raise_if(found._problems())
        return found

    @property
    def stages(self) -> tuple[range, ...]:
        """The layers of each stage, in model order."""
        return self.pipeline.layers

    @property
    def tokens(self) -> int:
        """Number of tokens of a microbatch on one context rank."""
        return self.micro * self.shape.sequence // self.mesh.sizes["context"]

    @property
    def shards(self) -> int:
        """Number of data ranks times number of context ranks. All these ranks hold the same
        weights, and the optimizer state is sharded over them.
        """
        return self.mesh.sizes["data"] * self.mesh.sizes["context"]

    def pipeline_rank(self, stage: int) -> int:
        """The pipeline rank that runs `stage`."""
        return self.pipeline.schedule.homes[stage]

    def held(self, pipeline: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, in order."""
        return self.pipeline.local(pipeline)

    def place(self, rank: int) -> Place:
        """The place of `rank`."""
        return self._places[self._at(rank)]

    def _at(self, rank: int) -> tuple[int, int]:
        return self.mesh.coordinate(rank, "pipeline"), self.mesh.coordinate(rank, "tensor")

    def kind(self, rank: int) -> tuple[int, int, int]:
        """Pipeline, tensor and shard coordinates of `rank`. Ranks with equal coordinates have the
        same bytes and traffic.
        """
        sizes, place = self.mesh.sizes, self.mesh.coordinates(rank)
        return *self._at(rank), place["data"] * sizes["context"] + place["context"]

    @property
    def costly(self) -> tuple[Finding, ...]:
        """Findings about pipeline ranks on which a lower ZeRO level takes fewer bytes, without
        repetition.
        """
        found = (self._places[rank, 0].costly for rank in range(self.mesh.sizes["pipeline"]))
        return tuple(dict.fromkeys(finding for finding in found if finding))

    def bytes(self, rank: int) -> dict[str, int]:
        """Return the bytes that `rank` stores between steps, by kind."""
        return self.place(rank).layout.bytes()

    def traffic(self, rank: int) -> Mapping[str, Traffic]:
        """Return the collectives of `rank` in a step, and the messages that `rank` sends."""
        same = {
            name: total for name, total in self._traffic[self._at(rank)].items() if name != REPLICAS
        }
        return same | replica_traffic(self.place(rank).layout, self.kind(rank)[2])

    @cached_property
    def _places(self) -> Mapping[tuple[int, int], Place]:
        sizes = self.mesh.sizes
        return {
            (rank, index): self._place(rank, index)
            for rank in range(sizes["pipeline"])
            for index in range(sizes["tensor"])
        }

    def _place(self, pipeline: int, tensor: int) -> Place:
        held, homes = self.held(pipeline), self.pipeline.schedule.homes
        # The first and the last layer may share a weight, whichever ranks they are on.
        mine = {*held, 0, len(self.stages) - 1}
        stages = {layer: stage for stage in sorted(mine) for layer in self.stages[stage]}
        share = self._share(tensor)
        parameters = on_rank(self.shape.parameters(stages, share), homes, pipeline)
        layout = Layout.of(self.plan, parameters, len(held), self.shards)
        layers = tuple(layer for stage in held for layer in self.stages[stage])
        return Place(
            layout, tuple(self.shape.sites(layers, share)), dearer(self.plan, layout, parameters)
        )

    def _share(self, index: int) -> Share:
        """Return the share of a tensor rank. Experts are spread over data and tensor ranks
        (Megatron: parallel_state.py).
        """
        parallel, ranks = self.plan.parallel, self.mesh.sizes["tensor"]
        experts, within = parallel.expert or 1, parallel.expert_tensor or ranks
        # All data, context and tensor ranks, divided by those that hold different experts or parts of them.
        same = max(1, self.shards * ranks // (experts * within))
        return Share(
            ranks,
            index,
            bool(parallel.sequence),
            experts,
            within,
            same if self.shape.experts else 0,
        )

    @cached_property
    def _traffic(self) -> Mapping[tuple[int, int], Mapping[str, Traffic]]:
        """Collectives of the first data rank, by pipeline and tensor coordinate."""
        first, *further = (self._followed(pipeline) for pipeline in (self.pipeline, *self.more))
        if not further:
            return first
        return {
            key: added(found, _times(further[-1][key], found, self.periods))
            for key, found in first.items()
        }

    def _followed(self, pipeline: Pipeline) -> Mapping[tuple[int, int], Mapping[str, Traffic]]:
        rows, parts = program(pipeline.schedule), chunks(self.plan.recompute, self.stages)
        found: dict[object, Mapping[str, Traffic]] = {}
        by_place = {}
        for (rank, tensor), place in self._places.items():
            # Tensor ranks whose flats have the same sizes send the same, so one of them is simulated.
            alike = (rank, *((flat.size, flat.shards) for flat in place.layout.flats))
            if alike not in found:
                names, sequence = self.shape.names, bool(self.plan.parallel.sequence)
                step = Step(
                    rank, place.layout, pipeline, rows[rank], parts, names, place.sites, sequence
                )
                found[alike] = step.traffic(self._sizes, self.mesh.world)
            by_place[rank, tensor] = found[alike]
        return by_place

    @property
    def _sizes(self) -> Sizes:
        """Tokens of a microbatch, and bytes of the hidden states that pass between stages. With
        sequence parallelism, only the tokens of one tensor rank count.
        """
        ranks = self.mesh.sizes["tensor"] if self.plan.parallel.sequence else 1
        dtype = self.plan.precision.compute or "fp32"
        # One message of tokens x hidden elements for each stage, the same size forward and
        # backward.
        message = Traffic(1, self.tokens // ranks * self.shape.hidden * BYTES[dtype])
        each = dict.fromkeys(range(len(self.stages)), message)
        return Sizes(self.tokens, each, each)

    def _problems(self) -> Iterator[str]:
        tensor = self.mesh.sizes["tensor"]
        if not self.micro:
            yield (
                "batch.micro: not set, and it does not follow from other settings;"
                " set the sequences in a microbatch"
            )
        if self.plan.parallel.sequence and self.shape.sequence % tensor:
            yield f"parallel.sequence: {self.shape.sequence} tokens do not divide into {tensor} tensor ranks; use a multiple"


def _times(
    after: Mapping[str, Traffic], before: Mapping[str, Traffic], times: int
) -> dict[str, Traffic]:
    """Return `times` x (`after` - `before`) for the traffic of each collective."""
    found = {}
    for name, total in after.items():
        less = before.get(name, Traffic())
        found[name] = Traffic(
            (total.count - less.count) * times, (total.bytes - less.bytes) * times
        )
    return found


def _pipelines(plan: Plan, shape: Architecture, number: int) -> tuple[tuple[Pipeline, ...], int]:
    """Return the pipelines to simulate, and the number of periods of the step that the first
    pipeline lacks.
    """
    layers, table = shape.facts(), text_of(plan)
    stages = stages_of(plan, layers)
    period = period_of(plan, number, stages)
    # Traffic repeats only once the pipeline is full, which takes about as many micro batches as there are stages.
    span = period if name_of(plan) == "depth_first" else max(period, stages)
    # Whole periods, and the rest of the step that is no whole period: that rest is part of every
    # simulated step.
    fewer = FOLLOWED * span // period * period + number % period if period else number
    if fewer + period >= number:
        return (Pipeline.of(plan, layers, number, table, short=True),), 0
    first, second = (
        Pipeline.of(plan, layers, few, table, short=True) for few in (fewer, fewer + period)
    )
    return (first, second), (number - fewer) // period
