"""Estimates: the most memory that each kind of rank of a plan needs in a step, term by term."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from bridge.errors import ConfigError
from bridge.layout.architecture import Architecture, Share
from bridge.layout.memory.activations import Keeper, Kept, Tokens
from bridge.layout.memory.adapters import add_adapters
from bridge.layout.memory.families import uncounted
from bridge.layout.memory.margins import CONTEXT, RESERVED
from bridge.layout.memory.states import Moment, Rank, buffer_terms, state_terms, step_terms
from bridge.layout.memory.terms import GIB, STATES, Term, device_bytes, product
from bridge.layout.mesh import Mesh
from bridge.layout.partition import partition_layers
from bridge.layout.pipeline import Pipeline, describe_pipeline, period_of, stages_of, text_of
from bridge.layout.schedule import ActionKind
from bridge.layout.shard import BYTES, Parameter, on_rank
from bridge.plan.batch import solve
from bridge.plan.plan import Plan
from bridge.stack.memory_rules import MemoryRules

PERIODS = 3
"""Number of periods of a schedule that are followed: what is in flight does not grow after them."""


MOMENTS: Mapping[Moment, str] = {
    "forward": "a forward pass",
    "loss": "the loss",
    "output": "the backward pass of the output layer",
    "block": "the backward pass of a block",
    "reduce": "the end of a block's backward pass",
    "step": "the optimizer's step",
}
"""Moments of a step at which a rank may need the most memory, in words."""


@dataclass(frozen=True)
class RankEstimate:
    """The memory of one pipeline rank. `states` are kept between steps and, with buffers and
    workspaces, during a step. `moments` has what the rank needs beside them at each moment of a
    step that may be its peak, by name.
    """

    pipeline: int
    states: tuple[Term, ...]
    moments: Mapping[str, tuple[Term, ...]]

    @property
    def moment(self) -> str:
        """The moment at which the rank needs the most."""
        return max(self.moments, key=lambda name: device_bytes(self.moments[name]))

    @property
    def step(self) -> tuple[Term, ...]:
        """What the rank needs beside its states at the peak."""
        return self.moments[self.moment]

    @property
    def terms(self) -> tuple[Term, ...]:
        """All terms at the moment of the peak."""
        return (*self.states, *self.step)

    @property
    def peak(self) -> int:
        """Bytes of tensors at the peak, as an allocator counts them."""
        return device_bytes(self.terms)

    @property
    def needed(self) -> int:
        """Bytes that a device needs for the rank: those of tensors, with fragments and context."""
        return round(self.peak * RESERVED) + CONTEXT

    @property
    def between(self) -> tuple[Term, ...]:
        """The terms that are left between two steps."""
        return tuple(term for term in self.states if term.kind in (*STATES, "workspace"))

    @property
    def steady(self) -> int:
        """Bytes that are left between two steps."""
        return device_bytes(self.between)


@dataclass(frozen=True)
class Estimate:
    """The memory of all ranks of a plan: one estimate for each pipeline rank, which holds for all
    ranks of that stage. `notes` say what is not counted, or counted as if it were something else;
    `doubt` says so of the activations of the model's family, if they were not counted.
    """

    ranks: tuple[RankEstimate, ...]
    notes: tuple[str, ...] = ()
    doubt: str | None = None

    @property
    def largest(self) -> RankEstimate:
        """The rank that needs the most; of several, the first."""
        return max(self.ranks, key=lambda rank: (rank.peak, -rank.pipeline))


@dataclass(frozen=True)
class Estimator:
    """Estimates the memory of a plan with a model of known shape on a mesh of ranks."""

    plan: Plan
    shape: Architecture
    mesh: Mesh
    rules: MemoryRules
    micro: int
    microbatches: int

    @classmethod
    def of(cls, plan: Plan, shape: Architecture, world: int, rules: MemoryRules) -> Estimator:
        """Return the estimator of `plan`. Raises `ConfigError` if the sizes do not fit."""
        ConfigError.raise_if(shape.problems())
        if rules.level is not None:
            zero = plan.zero.model_copy(update={"stage": rules.level})
            plan = plan.model_copy(update={"zero": zero})
        mesh = Mesh.of(plan.parallel, world)
        triangle = solve(
            plan.batch.micro, plan.batch.accumulation, plan.batch.global_, mesh.sizes["data"]
        )
        if not triangle.micro:
            raise ConfigError(
                "batch.micro: not set, and cannot be derived from the other batch sizes;"
                " set the number of sequences in a microbatch"
            )
        return cls(plan, shape, mesh, rules, triangle.micro, triangle.accumulation or 1)

    def estimate(self) -> Estimate:
        """Return the memory of each pipeline rank."""
        pipeline, notes = self._pipeline
        ranks = range(self.mesh.sizes["pipeline"])
        found = Estimate(tuple(self._rank(pipeline, rank) for rank in ranks))
        notes = (*notes, *self._omissions(), *_imbalance_of(found.largest))
        doubt = None
        if self.rules.kernels == "torch":
            doubt = uncounted(self.plan.model.family, self.shape.norm, self.rules.attention)
        return replace(found, notes=notes, doubt=doubt)

    @cached_property
    def keeper(self) -> Keeper:
        """What the layers keep."""
        return Keeper(
            self.plan, self.shape, Tokens.of(self.plan, self.shape, self.micro), self.rules
        )

    @cached_property
    def _pipeline(self) -> tuple[Pipeline, tuple[str, ...]]:
        """The stages and a step of few microbatches, after which no more activations are in flight."""
        facts, number = self.shape.facts(), self.microbatches
        plan, notes = describe_pipeline(self.plan, number, facts)
        ranks = self.mesh.sizes["pipeline"]
        stages = stages_of(plan, facts) or None
        if ranks > 1 and stages:
            period = period_of(plan, number, stages)
            span = max(period, stages) // period * period if period else number
            number = min(number, PERIODS * span + number % period) if period else number
        if ranks == 1:
            parts: tuple[range, ...] | None = (range(facts.count),)
        else:
            parts = partition_layers(plan.stages, facts, stages) if stages else None
        table = text_of(plan)
        return Pipeline.of(plan, facts, number, table, parts, short=True), notes

    def _omissions(self) -> Iterator[str]:
        if self.plan.model.predicted:
            yield "blocks of multi-token prediction are not counted"
        if self.plan.adapters.rank and self.shape.latent:
            yield "adapters of the narrow projections of latent attention are not counted"
        if self.plan.precision.fp8:
            yield "8-bit copies of weights and activations are not counted: all is taken as 16-bit"
        if self.plan.recompute.offload:
            yield "activations that are moved to the host are counted on the device"

    # One rank

    def _rank(self, pipeline: Pipeline, rank: int) -> RankEstimate:
        local = pipeline.local(rank)
        parameters = self._parameters(pipeline, rank)
        shards = self.mesh.sizes["data"] * self.mesh.sizes["context"]
        held = Rank(parameters, len(local), shards)
        states = [*state_terms(self.plan, held, self.rules), *self._workspace(held)]
        moments: dict[str, tuple[Term, ...]] = {}
        update = step_terms(self.plan, held, self.rules)
        for kind, layer, extra in (*self._moments(pipeline, rank), ("step", 0, update)):
            name = MOMENTS[kind]
            terms = [*extra, *buffer_terms(self.plan, held, self.rules, kind)]
            terms += self._absent(states, parameters, layer)
            if name not in moments or device_bytes(terms) >= device_bytes(moments[name]):
                moments[name] = tuple(terms)
        return RankEstimate(rank, tuple(states), moments)

    @cached_property
    def _clears(self) -> bool:
        """Whether a step begins without gradients and sums none: torch's `zero_grad` frees them."""
        return self.microbatches == 1 and self.rules.sharding in ("fsdp", "ddp")

    def _absent(
        self, states: Sequence[Term], parameters: Sequence[Parameter], layer: int
    ) -> Iterator[Term]:
        """Yield the gradients of layers before `layer`, which do not exist yet."""
        trained = [one for one in parameters if one.trainable]
        later = set(self.shape.names[layer:])
        before = sum(one.size for one in trained if one.name.partition(".")[0] not in later)
        if self._clears and before:
            share = before / sum(one.size for one in trained)
            size = round(share * sum(one.bytes for one in states if one.kind == "gradients"))
            yield Term("gradients", "not there yet", -size, f"{share:.4g} of the gradients, less")

    def _parameters(self, pipeline: Pipeline, rank: int) -> list[Parameter]:
        local, homes = pipeline.local(rank), pipeline.schedule.homes
        # The first and the last layer may share a weight, whichever ranks they are on.
        mine = {*local, 0, len(pipeline.layers) - 1}
        stages = {layer: stage for stage in sorted(mine) for layer in pipeline.layers[stage]}
        whole = self.shape.parameters(stages, self._share())
        return on_rank(add_adapters(whole, self.plan.adapters), homes, rank)

    def _share(self) -> Share:
        parallel = self.plan.parallel
        experts = self.mesh.of_experts(parallel) if self.shape.experts else None
        return Share.on(self.mesh, experts, parallel)

    def _workspace(self, rank: Rank) -> Iterator[Term]:
        parameters = rank.parameters
        yield Term(
            "workspace", "libraries of matrix products", self.rules.workspace,
            f"{self.rules.workspace:,} bytes, a constant of the stack",
        )  # fmt: skip
        width, tokens = BYTES[self.plan.precision.compute or "fp32"], self.keeper.tokens
        if self.mesh.sizes["pipeline"] > 1 and self.rules.frees_outputs:
            # Measured: what was received and sent last is still there after a step.
            yield product(
                "workspace", "messages of the pipeline, two for each stage of the rank",
                (2 * rank.stages, "messages"), (tokens.count, "tokens"), (self.shape.hidden, "elements"),
                (width, "bytes"), (1 / tokens.sequence, f"(1/{tokens.sequence})"),
            )  # fmt: skip
        if tokens.sequence > 1 and any(one.name == "head.norm.weight" for one in parameters):
            yield product(
                "workspace", "input of the output layer, gathered", (tokens.count, "tokens"),
                (self.shape.hidden, "elements"), (width, "bytes"),
            )  # fmt: skip
        if self.rules.fused_gradients:
            fused = sum(map(prod, _fuse_shapes(parameters)))
            yield product(
                "workspace", "empty gradients, one for each shape of a weight",
                (fused, "elements"), (width, "bytes"),
            )  # fmt: skip

    def _moments(self, pipeline: Pipeline, rank: int) -> Iterator[tuple[Moment, int, list[Term]]]:
        """Yield the moments of a step at which a rank may need the most memory, with the first
        layer whose backward pass is done, and with the terms that the rank has beside its states.
        """
        kept = {stage: self._stage(pipeline.layers[stage]) for stage in pipeline.local(rank)}
        sizes = {stage: self.keeper.bytes(all_) for stage, all_ in kept.items()}
        fullest: dict[tuple[int, bool], tuple[int, dict[int, int]]] = {}
        held: dict[int, int] = dict.fromkeys(kept, 0)
        whole = {ActionKind.BACKWARD, ActionKind.WEIGHT}
        for action in pipeline.schedule.rows[rank]:
            if action.kind is ActionKind.FORWARD:
                held[action.stage] += 1
            if action.kind in (ActionKind.FORWARD, *whole, ActionKind.INPUT):
                size = sum(sizes[stage] * number for stage, number in held.items())
                key = action.stage, action.kind is ActionKind.FORWARD
                if size > fullest.get(key, (-1, {}))[0]:
                    fullest[key] = size, dict(held)
            if action.kind in whole:
                held[action.stage] -= 1
        for (stage, forward), (_, numbers) in fullest.items():
            base = [
                term for one, number in numbers.items() for term in self._held(kept[one], number)
            ]
            for name, layer, extra in self._extras(pipeline.layers[stage], forward):
                yield name, layer, [*base, *extra]

    def _held(self, kept: Mapping[Kept, int] | Sequence[Kept], number: int) -> Iterator[Term]:
        if not number:
            return
        counts: dict[Kept, int] = {}
        for one in kept:
            counts[one] = counts.get(one, 0) + 1
        for one, times in counts.items():
            of = "layers" if number == 1 else f"layers, {number} microbatches in flight"
            yield from self.keeper.terms([one], times * number, of)

    def _freed(self, layers: range) -> list[Term]:
        """What is gone after the backward pass of the last `layers` of a stage: all that they kept."""
        size = self.keeper.bytes(self._kept(layers))
        return [Term("activations", "freed by then", -size, f"less {size:,} bytes of later layers")]

    def _stage(self, layers: range) -> list[Kept]:
        """What a stage keeps of a microbatch."""
        kept = self._kept(layers)
        if layers[-1] <= self.shape.layers and not self.rules.frees_outputs:
            kept.append(self.keeper.input()._replace(what="output for the next stage"))
        return kept

    def _kept(self, layers: range) -> list[Kept]:
        """What some layers of a stage keep of a microbatch."""
        kept: list[Kept] = []
        again = self._again(layers)
        for layer in layers:
            if layer == 0:
                kept += self.keeper.embedding()
            elif layer <= self.shape.layers:
                block = layer - 1
                chunk = again.get(block)
                kept += self.keeper.kept(block) if chunk is None else [self.keeper.input()] * chunk
            elif self.shape.vocab:
                kept += self.keeper.head()
        return kept

    def _again(self, layers: range) -> dict[int, int]:
        """The blocks of a stage that are computed again: 1 for the first of a chunk, which keeps
        its input, and 0 for the others.
        """
        recompute = self.plan.recompute
        if recompute.granularity != "full" and recompute.ratio is None:
            return {}
        blocks = [layer - 1 for layer in layers if 0 < layer <= self.shape.layers]
        if recompute.ratio is not None:
            blocks = [one for one in blocks if one < round(recompute.ratio * self.shape.layers)]
            return dict.fromkeys(blocks, 1)
        if recompute.method == "block":
            return dict.fromkeys(blocks[: 1 if recompute.layers is None else recompute.layers], 1)
        size = recompute.layers or 1
        return {block: int(place % size == 0) for place, block in enumerate(blocks)}

    def _extras(self, layers: range, forward: bool) -> Iterator[tuple[Moment, int, list[Term]]]:
        has_head = layers[-1] == self.shape.layers + 1 and bool(self.shape.vocab)
        if forward:
            moment: Moment = "loss" if has_head else "forward"
            yield moment, layers.stop, self.keeper.loss() if has_head else []
            return
        if has_head:
            yield "output", layers.stop, self.keeper.output_backward()
        blocks = [layer - 1 for layer in layers if 0 < layer <= self.shape.layers]
        again = self._again(layers)
        experts = self.shape.has_experts
        ends = {*{experts(one): one for one in reversed(blocks)}.values()}
        if self._clears:
            # Later blocks have gradients in place of activations: the most is needed at one end.
            ends |= {*{experts(one): one for one in blocks}.values()}
        for block in ends:
            extra = self.keeper.block_backward(block)
            if block in again:
                size = (
                    1 if self.plan.recompute.method == "block" else self.plan.recompute.layers or 1
                )
                what = "layers that are computed again"
                extra += self.keeper.terms(self.keeper.block(block), size, what)
            done = range(block + 2, layers.stop)
            yield "block", done.start, [*extra, *(self._freed(done) if self._clears else [])]
            if self.rules.sharding == "fsdp":
                # Recomputation has the block's input, output and the gradients of both until then.
                hidden = self.keeper.residual(4 if block in again else 1)
                gone = range(block + 1, layers.stop if self._clears else block + 2)
                yield "reduce", done.start, [hidden, *self._freed(gone)]


def _fuse_shapes(parameters: Sequence[Parameter]) -> set[tuple[int, ...]]:
    """Return the shapes of the blocks' matrices as Transformer Engine has them: one for queries,
    keys and values together, and one for gate and up.
    """
    fused = {"query": "qkv", "key": "qkv", "value": "qkv", "up": "gated", "gate": "gated"}
    rows: dict[tuple[str, str, int], int] = {}
    for one in parameters:
        if len(one.shape) > 1 and one.name.startswith("block"):
            layer, part, _ = one.name.rsplit(".", 2)
            key = layer, fused.get(part, part), one.shape[-1]
            rows[key] = rows.get(key, 0) + one.shape[-2]
    return {(height, width) for (*_, width), height in rows.items()}


def _imbalance_of(rank: RankEstimate) -> Iterator[str]:
    """Yield a sentence on how much more a rank needs whose experts get twice their share of tokens."""
    size = sum(term.bytes for term in rank.terms if term.what.startswith(ROUTED))
    if size:
        yield (
            "experts are taken to get equal shares of the tokens; a rank that gets twice its share"
            f" needs {size / GIB:,.1f} GiB more"
        )


ROUTED = ("experts:", "tokens sent to experts", "results of experts")
"""What grows with the tokens that reach a rank's experts, by the beginning of its name."""
