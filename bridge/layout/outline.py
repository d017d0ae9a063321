"""Outline of a run, computed from the plan alone: the stages of each rank, the bytes that each rank
stores, and the collectives of each rank in a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from bridge.errors import ConfigError
from bridge.layout.architecture import Architecture, Share
from bridge.layout.levels import find_dearer_level
from bridge.layout.mesh import Mesh
from bridge.layout.pipeline import (
    Pipeline,
    describe_pipeline,
    name_of,
    period_of,
    stages_of,
    text_of,
)
from bridge.layout.recompute import chunks_by_stage
from bridge.layout.schedule import program_rows
from bridge.layout.shard import BYTES, Layout, on_rank
from bridge.layout.step import Sizes, Step
from bridge.layout.tensor import Site
from bridge.layout.traffic import REPLICAS, Traffic, add_traffic, replica_traffic
from bridge.plan.batch import solve
from bridge.plan.plan import Plan
from bridge.stack.findings import Finding


@dataclass(frozen=True)
class OutlinePlace:
    """Facts that hold for all ranks with the same pipeline coordinate and the same tensor
    coordinate: the layout of their stages, and the sites at which these ranks exchange activations.
    `costly` is a finding if a lower ZeRO level takes fewer bytes.
    """

    layout: Layout
    sites: tuple[Site, ...]
    costly: Finding | None


FOLLOWED = 4
"""Number of periods of a step that are simulated one by one. A period is the number of microbatches
after which the schedule repeats. Each later period sends as much as the last simulated period.
"""


@dataclass(frozen=True)
class Outline:
    """A plan, on a mesh of ranks, with a model of known shape.

    A schedule repeats after some number of microbatches, its period. A long step is not simulated
    as a whole: `pipeline` simulates a step of a few periods, and `more` has a second pipeline with
    one period more. The traffic that this period adds is counted once for each of the `periods`
    that `pipeline` leaves out. `notes` say why a simulated schedule differs from the plan's
    schedule.
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
        runnable_plan, notes = describe_pipeline(plan, accumulation, shape.facts())
        pipelines, periods = _pipelines_to_simulate(runnable_plan, shape, accumulation)
        outline = cls(
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
        ConfigError.raise_if(outline._problems())
        _ = outline.experts  # refuses sizes that do not fit
        return outline

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

    @cached_property
    def experts(self) -> Mesh | None:
        """The mesh over which experts are spread; None for a model without experts."""
        return self.mesh.of_experts(self.plan.parallel) if self.shape.experts else None

    def pipeline_rank(self, stage: int) -> int:
        """The pipeline rank that runs `stage`."""
        return self.pipeline.schedule.homes[stage]

    def local_stages(self, pipeline: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, in order."""
        return self.pipeline.local(pipeline)

    def place(self, rank: int) -> OutlinePlace:
        """The facts about `rank` and all ranks with the same pipeline and tensor coordinates."""
        return self._places[self._at(rank)]

    def _at(self, rank: int) -> tuple[int, int]:
        return self.mesh.coordinate(rank, "pipeline"), self.mesh.coordinate(rank, "tensor")

    def kind(self, rank: int) -> tuple[int, int, int]:
        """The pipeline, tensor and shard coordinates of `rank`, as a tuple. Ranks with the same
        tuple store the same number of bytes and have the same traffic.
        """
        sizes, place = self.mesh.sizes, self.mesh.coordinates(rank)
        return *self._at(rank), place["data"] * sizes["context"] + place["context"]

    @property
    def costly(self) -> tuple[Finding, ...]:
        """Findings about pipeline ranks on which a lower ZeRO level takes fewer bytes. Equal
        findings of several ranks are listed once.
        """
        findings = (self._places[rank, 0].costly for rank in range(self.mesh.sizes["pipeline"]))
        return tuple(dict.fromkeys(finding for finding in findings if finding))

    def bytes(self, rank: int) -> dict[str, int]:
        """Return the number of bytes that `rank` stores between steps, for each of weights,
        gradients, master and moments.
        """
        return self.place(rank).layout.bytes()

    def traffic(self, rank: int) -> Mapping[str, Traffic]:
        """Return the collectives of `rank` in a step, and the messages that `rank` sends."""
        same = {
            name: total for name, total in self._traffic[self._at(rank)].items() if name != REPLICAS
        }
        return same | replica_traffic(self.place(rank).layout, self.kind(rank)[2])

    @cached_property
    def _places(self) -> Mapping[tuple[int, int], OutlinePlace]:
        sizes = self.mesh.sizes
        return {
            (rank, index): self._place(rank, index)
            for rank in range(sizes["pipeline"])
            for index in range(sizes["tensor"])
        }

    def _place(self, pipeline: int, tensor: int) -> OutlinePlace:
        local, homes = self.local_stages(pipeline), self.pipeline.schedule.homes
        # The first and the last layer may share a weight, whichever ranks they are on.
        mine = {*local, 0, len(self.stages) - 1}
        stages = {layer: stage for stage in sorted(mine) for layer in self.stages[stage]}
        share = Share.on(self.mesh, self.experts, self.plan.parallel, tensor)
        parameters = on_rank(self.shape.parameters(stages, share), homes, pipeline)
        layout = Layout.of(self.plan, parameters, len(local), self.shards)
        layers = tuple(layer for stage in local for layer in self.stages[stage])
        return OutlinePlace(
            layout,
            tuple(self.shape.sites(layers, share)),
            find_dearer_level(self.plan, layout, parameters),
        )

    @cached_property
    def _traffic(self) -> Mapping[tuple[int, int], Mapping[str, Traffic]]:
        """Collectives and messages of a step on the first data rank, for each pair of pipeline and
        tensor coordinates.
        """
        first, *further = (
            self._follow_traffic(pipeline) for pipeline in (self.pipeline, *self.more)
        )
        if not further:
            return first
        return {
            key: add_traffic(traffic, _multiply_traffic(further[-1][key], traffic, self.periods))
            for key, traffic in first.items()
        }

    def _follow_traffic(
        self, pipeline: Pipeline
    ) -> Mapping[tuple[int, int], Mapping[str, Traffic]]:
        rows, parts = (
            program_rows(pipeline.schedule),
            chunks_by_stage(self.plan.recompute, self.stages),
        )
        by_layout: dict[object, Mapping[str, Traffic]] = {}
        by_place = {}
        for (rank, tensor), place in self._places.items():
            # Tensor ranks whose flats have the same sizes send the same, so one of them is simulated.
            alike = (rank, *((flat.size, flat.shards) for flat in place.layout.flats))
            if alike not in by_layout:
                names, sequence = self.shape.names, bool(self.plan.parallel.sequence)
                step = Step(
                    rank, place.layout, pipeline, rows[rank], parts, names, place.sites, sequence
                )
                by_layout[alike] = step.traffic(self._sizes, self.mesh.world)
            by_place[rank, tensor] = by_layout[alike]
        return by_place

    @property
    def _sizes(self) -> Sizes:
        """Number of tokens of a microbatch, and number of bytes of the hidden states between two
        stages. With sequence parallelism, the hidden states are those of one tensor rank's tokens.
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
                "batch.micro: not set, and cannot be derived from the other batch sizes;"
                " set the number of sequences in a microbatch"
            )
        if self.plan.parallel.sequence and self.shape.sequence % tensor:
            yield f"parallel.sequence: {self.shape.sequence} tokens do not divide into {tensor} tensor ranks; use a multiple"


def _multiply_traffic(
    after: Mapping[str, Traffic], before: Mapping[str, Traffic], times: int
) -> dict[str, Traffic]:
    """Return, for each collective, the difference `after` - `before`, multiplied by `times`."""
    result = {}
    for name, total in after.items():
        less = before.get(name, Traffic())
        result[name] = Traffic(
            (total.count - less.count) * times, (total.bytes - less.bytes) * times
        )
    return result


def _pipelines_to_simulate(
    plan: Plan, shape: Architecture, number: int
) -> tuple[tuple[Pipeline, ...], int]:
    """Return the pipelines to simulate for a step of `number` microbatches: one pipeline for the
    whole step, or two pipelines that are shorter. The second result is the number of periods by
    which the first pipeline is shorter than the step.
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
