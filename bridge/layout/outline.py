"""Outline: a whole run on all its ranks, as values: stages by rank, the bytes that each keeps, its collectives in a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from bridge.batch import solve
from bridge.errors import ConfigError
from bridge.findings import Finding
from bridge.layout.architecture import Architecture, Share
from bridge.layout.levels import dearer
from bridge.layout.mesh import Mesh
from bridge.layout.pipeline import Pipeline, described, name_of, period_of, stages_of, text_of
from bridge.layout.recompute import Chunk, chunks
from bridge.layout.schedule import program
from bridge.layout.schedule.action import Row
from bridge.layout.shard import BYTES, Layout, on_rank
from bridge.layout.step import Sizes, Step
from bridge.layout.tensor import Site
from bridge.layout.traffic import REPLICAS, Traffic, added, replica_traffic
from bridge.plan import Plan


@dataclass(frozen=True)
class Place:
    """What the ranks of one pipeline and one tensor coordinate share: the layout of their stages, sites of activations, and a
    finding if a lower ZeRO level keeps less on them.
    """

    layout: Layout
    sites: tuple[Site, ...]
    costly: Finding | None


FOLLOWED = 4
"""Periods of a step's microbatches that are followed one by one; each further one adds what the last one did."""


@dataclass(frozen=True)
class Outline:
    """A plan, on a mesh of ranks, with a model of known shape.

    `pipeline` runs the microbatches that are followed; with `more` pipelines of a period more each, and `periods` of them
    beyond those, what a step of all of them sends is known. `notes` say why the schedule is not the plan's own.
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
        """Raises `ConfigError` if the sizes do not fit `world` ranks, the model or each other."""
        ConfigError.raise_if(shape.problems())
        mesh = Mesh.of(plan.parallel, world)
        shape.tensor_plan(mesh.sizes["tensor"])
        triangle = solve(plan.batch.micro, plan.batch.accumulation, plan.batch.global_, mesh.sizes["data"])
        accumulation = triangle.accumulation or 1
        shown, notes = described(plan, accumulation, shape.facts())
        pipelines, periods = _pipelines(shown, shape, accumulation)
        found = cls(plan, shape, mesh, pipelines[0], triangle.micro or 0, accumulation, pipelines[1:], periods, notes)
        ConfigError.raise_if(found._problems())
        return found

    @property
    def stages(self) -> tuple[range, ...]:
        """The layers of each stage, in model order."""
        return self.pipeline.layers

    @property
    def tokens(self) -> int:
        """Tokens in a microbatch, on one of the ranks that split them by context."""
        return self.micro * self.shape.sequence // self.mesh.sizes["context"]

    @property
    def shards(self) -> int:
        """Ranks that hold the same weights, and over which state may be sharded: data and context ranks."""
        return self.mesh.sizes["data"] * self.mesh.sizes["context"]

    def pipeline_rank(self, stage: int) -> int:
        """The pipeline rank that runs `stage`."""
        return self.pipeline.schedule.homes[stage]

    def held(self, pipeline: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, in order."""
        return self.pipeline.local(pipeline)

    def place(self, rank: int) -> Place:
        """What `rank` holds."""
        return self._places[self._at(rank)]

    def _at(self, rank: int) -> tuple[int, int]:
        return self.mesh.coordinate(rank, "pipeline"), self.mesh.coordinate(rank, "tensor")

    def kind(self, rank: int) -> tuple[int, int, int]:
        """What ranks that keep and send the same share: place in the pipeline, in the tensor group, and among shards."""
        sizes, place = self.mesh.sizes, self.mesh.coordinates(rank)
        return *self._at(rank), place["data"] * sizes["context"] + place["context"]

    @property
    def costly(self) -> tuple[Finding, ...]:
        """Findings of pipeline ranks on which a lower ZeRO level keeps less, each once."""
        found = (self._places[rank, 0].costly for rank in range(self.mesh.sizes["pipeline"]))
        return tuple(dict.fromkeys(finding for finding in found if finding))

    def bytes(self, rank: int) -> dict[str, int]:
        """Bytes that `rank` keeps between steps, by kind."""
        return self.place(rank).layout.bytes()

    def traffic(self, rank: int) -> Mapping[str, Traffic]:
        """Collectives of `rank` in a step, and the messages that it sends."""
        same = {name: total for name, total in self._traffic[self._at(rank)].items() if name != REPLICAS}
        return same | replica_traffic(self.place(rank).layout, self.kind(rank)[2])

    @cached_property
    def _places(self) -> Mapping[tuple[int, int], Place]:
        sizes = self.mesh.sizes
        return {(rank, index): self._place(rank, index) for rank in range(sizes["pipeline"]) for index in range(sizes["tensor"])}

    def _place(self, pipeline: int, tensor: int) -> Place:
        held, homes = self.held(pipeline), self.pipeline.schedule.homes
        # The first and the last layer may share a weight, whichever ranks they are on.
        mine = {*held, 0, len(self.stages) - 1}
        stages = {layer: stage for stage in sorted(mine) for layer in self.stages[stage]}
        share = self._share(tensor)
        parameters = on_rank(self.shape.parameters(stages, share), homes, pipeline)
        layout = Layout.of(self.plan, parameters, len(held), self.shards)
        layers = tuple(layer for stage in held for layer in self.stages[stage])
        return Place(layout, tuple(self.shape.sites(layers, share)), dearer(self.plan, layout, parameters))

    def _share(self, index: int) -> Share:
        """A tensor rank's place; experts lie on data and tensor ranks (Megatron: parallel_state.py, expert groups)."""
        parallel, ranks = self.plan.parallel, self.mesh.sizes["tensor"]
        experts, within = parallel.expert or 1, parallel.expert_tensor or ranks
        same = max(1, self.shards * ranks // (experts * within))
        return Share(ranks, index, bool(parallel.sequence), experts, within, same if self.shape.experts else 0)

    @cached_property
    def _traffic(self) -> Mapping[tuple[int, int], Mapping[str, Traffic]]:
        """What the first of the ranks with the same weights sends, by pipeline and tensor coordinate."""
        first, *further = (self._followed(pipeline) for pipeline in (self.pipeline, *self.more))
        if not further:
            return first
        return {key: added(found, _times(further[-1][key], found, self.periods)) for key, found in first.items()}

    def _followed(self, pipeline: Pipeline) -> Mapping[tuple[int, int], Mapping[str, Traffic]]:
        rows, parts = program(pipeline.schedule), chunks(self.plan.recompute, self.stages)
        found: dict[object, Mapping[str, Traffic]] = {}
        by_place = {}
        for (rank, tensor), place in self._places.items():
            alike = (rank, *((flat.size, flat.shards) for flat in place.layout.flats))
            if alike not in found:
                found[alike] = self._step(pipeline, place, rank, rows[rank], parts)
            by_place[rank, tensor] = found[alike]
        return by_place

    def _step(
        self, pipeline: Pipeline, place: Place, rank: int, row: Row, parts: Sequence[Sequence[Chunk]]
    ) -> Mapping[str, Traffic]:
        sequence = bool(self.plan.parallel.sequence)
        step = Step(rank, place.layout, pipeline, row, parts, self.shape.names, place.sites, sequence)
        return step.traffic(self._sizes, self.mesh.world)

    @property
    def _sizes(self) -> Sizes:
        """One tensor goes from stage to stage, and its gradient back; with sequence parallelism each tensor rank's tokens."""
        ranks = self.mesh.sizes["tensor"] if self.plan.parallel.sequence else 1
        dtype = self.plan.precision.compute or "fp32"
        each = dict.fromkeys(range(len(self.stages)), Traffic(1, self.tokens // ranks * self.shape.hidden * BYTES[dtype]))
        return Sizes(self.tokens, each, each)

    def _problems(self) -> Iterator[str]:
        tensor = self.mesh.sizes["tensor"]
        if not self.micro:
            yield "batch.micro: neither given nor to be worked out; give the sequences in a microbatch"
        if self.plan.parallel.sequence and self.shape.sequence % tensor:
            yield f"parallel.sequence: {self.shape.sequence} tokens do not divide into {tensor} tensor ranks; use a multiple"


def _times(after: Mapping[str, Traffic], before: Mapping[str, Traffic], times: int) -> dict[str, Traffic]:
    """What `after` has more than `before`, so many times."""
    found = {}
    for name, total in after.items():
        less = before.get(name, Traffic())
        found[name] = Traffic((total.count - less.count) * times, (total.bytes - less.bytes) * times)
    return found


def _pipelines(plan: Plan, shape: Architecture, number: int) -> tuple[tuple[Pipeline, ...], int]:
    """The pipelines that are followed, and how many periods there are beyond the first of them."""
    layers, table = shape.facts(), text_of(plan)
    stages = stages_of(plan, layers)
    period = period_of(plan, number, stages)
    span = period if name_of(plan) == "depth_first" else max(period, stages)
    fewer = FOLLOWED * span // period * period + number % period if period else number
    if fewer + period >= number:
        return (Pipeline.of(plan, layers, number, table, short=True),), 0
    first, second = (Pipeline.of(plan, layers, few, table, short=True) for few in (fewer, fewer + period))
    return (first, second), (number - fewer) // period
