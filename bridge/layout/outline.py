"""Outline: a whole run on all its ranks, as values: stages by rank, the bytes that each keeps, its collectives in a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from bridge.batch import solve
from bridge.errors import ConfigError
from bridge.layout.architecture import Architecture, Share
from bridge.layout.mesh import Mesh
from bridge.layout.pipeline import Pipeline, text_of
from bridge.layout.recompute import chunks
from bridge.layout.schedule import program
from bridge.layout.shard import BYTES, Layout, on_rank
from bridge.layout.step import Sizes, Step
from bridge.layout.tensor import Site
from bridge.layout.traffic import REPLICAS, Traffic, replica_traffic
from bridge.plan import Plan


@dataclass(frozen=True)
class Place:
    """What the ranks of one pipeline and one tensor coordinate share: the layout of their stages, and sites of activations."""

    layout: Layout
    sites: tuple[Site, ...]


@dataclass(frozen=True)
class Outline:
    """A plan, on a mesh of ranks, with a model of known shape."""

    plan: Plan
    shape: Architecture
    mesh: Mesh
    pipeline: Pipeline
    micro: int
    accumulation: int

    @classmethod
    def of(cls, plan: Plan, shape: Architecture, world: int) -> Outline:
        """Raises `ConfigError` if the sizes do not fit `world` ranks, the model or each other."""
        ConfigError.raise_if(shape.problems())
        mesh = Mesh.of(plan.parallel, world)
        shape.tensor_plan(mesh.sizes["tensor"])
        triangle = solve(plan.batch.micro, plan.batch.accumulation, plan.batch.global_, mesh.sizes["data"])
        accumulation = triangle.accumulation or 1
        pipeline = Pipeline.of(plan, shape.facts(), accumulation, text_of(plan))
        found = cls(plan, shape, mesh, pipeline, triangle.micro or 0, accumulation)
        ConfigError.raise_if(found._problems())
        return found

    @property
    def stages(self) -> tuple[range, ...]:
        """The layers of each stage, in model order."""
        return self.pipeline.layers

    @property
    def tokens(self) -> int:
        """Tokens in a microbatch."""
        return self.micro * self.shape.sequence

    def pipeline_rank(self, stage: int) -> int:
        """The pipeline rank that runs `stage`."""
        return next(rank for rank in range(self.mesh.sizes["pipeline"]) if stage in self.held(rank))

    def held(self, pipeline: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, in order."""
        return self.pipeline.local(pipeline)

    def place(self, rank: int) -> Place:
        """What `rank` holds."""
        return self._places[self.mesh.coordinate(rank, "pipeline"), self.mesh.coordinate(rank, "tensor")]

    def bytes(self, rank: int) -> dict[str, int]:
        """Bytes that `rank` keeps between steps, by kind."""
        return self.place(rank).layout.bytes()

    def traffic(self, rank: int) -> Mapping[str, Traffic]:
        """Collectives of `rank` in a step, and the messages that it sends."""
        first = self._traffic[self.mesh.coordinate(rank, "pipeline"), self.mesh.coordinate(rank, "tensor")]
        same = {name: total for name, total in first.items() if name != REPLICAS}
        return same | replica_traffic(self.place(rank).layout, self.mesh.coordinate(rank, "data"))

    @cached_property
    def _places(self) -> Mapping[tuple[int, int], Place]:
        sizes = self.mesh.sizes
        return {(rank, index): self._place(rank, index) for rank in range(sizes["pipeline"]) for index in range(sizes["tensor"])}

    def _place(self, pipeline: int, tensor: int) -> Place:
        held, homes = self.held(pipeline), self.pipeline.schedule.homes
        stages = {layer: stage for stage, layers in enumerate(self.stages) for layer in layers}
        share = Share(self.mesh.sizes["tensor"], tensor, bool(self.plan.parallel.sequence))
        parameters = on_rank(self.shape.parameters(stages, share), homes, pipeline)
        layout = Layout.of(self.plan, parameters, len(held), self.mesh.sizes["data"])
        layers = tuple(layer for stage in held for layer in self.stages[stage])
        return Place(layout, tuple(self.shape.sites(layers, share)))

    @cached_property
    def _traffic(self) -> Mapping[tuple[int, int], Mapping[str, Traffic]]:
        """What the first data rank sends, by pipeline and tensor coordinate."""
        rows, parts = program(self.pipeline.schedule), chunks(self.plan.recompute, self.stages)
        sequence, names = bool(self.plan.parallel.sequence), self.shape.names
        return {
            (rank, tensor): Step(rank, place.layout, self.pipeline, rows[rank], parts, names, place.sites, sequence).traffic(
                self._sizes, self.mesh.world
            )
            for (rank, tensor), place in self._places.items()
        }

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
