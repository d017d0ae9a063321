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
from bridge.layout.shard import Layout
from bridge.layout.tensor import Site
from bridge.layout.traffic import REPLICAS, Traffic, computed_again, replica_traffic, whole_traffic
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

    def traffic(self, rank: int) -> Mapping[str, Traffic] | None:
        """Collectives of `rank` in a step; None with pipelines, whose schedule decides on them."""
        if self.mesh.sizes["pipeline"] > 1:
            return None
        first = self._traffic[self.mesh.coordinate(rank, "tensor")]
        same = {name: total for name, total in first.items() if name != REPLICAS}
        return same | replica_traffic(self.place(rank).layout, self.mesh.coordinate(rank, "data"))

    @cached_property
    def _places(self) -> Mapping[tuple[int, int], Place]:
        sizes = self.mesh.sizes
        return {(rank, index): self._place(rank, index) for rank in range(sizes["pipeline"]) for index in range(sizes["tensor"])}

    def _place(self, pipeline: int, tensor: int) -> Place:
        held = self.held(pipeline)
        stages = {layer: local for local, stage in enumerate(held) for layer in self.stages[stage]}
        sequence = bool(self.plan.parallel.sequence)
        share = Share(self.mesh.sizes["tensor"], tensor, sequence)
        parameters = self.shape.parameters(stages, share)
        layout = Layout.of(self.plan, parameters, len(held), self.mesh.sizes["data"])
        return Place(layout, tuple(self.shape.sites(tuple(stages), share)))

    @cached_property
    def _traffic(self) -> Mapping[int, Mapping[str, Traffic]]:
        """Collectives of the first data rank, by tensor coordinate."""
        again = chunks(self.plan.recompute, self.stages)
        return {
            tensor: whole_traffic(
                place.layout,
                place.sites,
                computed_again(place.sites, self.shape.names, again),
                bool(self.plan.parallel.sequence),
                self.accumulation,
                self.tokens,
                self.mesh.world,
            )
            for (_, tensor), place in self._places.items()
        }

    def _problems(self) -> Iterator[str]:
        tensor = self.mesh.sizes["tensor"]
        if not self.micro:
            yield "batch.micro: neither given nor to be worked out; give the sequences in a microbatch"
        if self.plan.parallel.sequence and self.shape.sequence % tensor:
            yield f"parallel.sequence: {self.shape.sequence} tokens do not divide into {tensor} tensor ranks; use a multiple"
