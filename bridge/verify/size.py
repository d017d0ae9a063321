"""Size: a run made small enough for a few local ranks, and what was changed for that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from bridge.batch import solve
from bridge.layout.architecture import Architecture
from bridge.plan import Plan, paths

TWO = 2
"""What becomes of every size above one: the smallest that still splits, accumulates or repeats."""
LAYERS, SEQUENCE = 4, 16
"""Two pipeline ranks with two stages each have a layer in every one."""
WARMUP, LENGTH = 2, 8
"""Steps of warmup and of a whole learning-rate schedule at most, so that a few steps see its shape."""
SCALE = 2.0**10
"""First loss scale at most: a larger one would skip all of a few steps."""
AXES = ("pipeline", "tensor", "data")


@dataclass(frozen=True)
class Size:
    """Ranks along each axis, sequences in a microbatch and microbatches in a step."""

    data: int
    tensor: int
    pipeline: int
    micro: int
    accumulation: int

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.data * self.tensor * self.pipeline

    @property
    def batch(self) -> int:
        """Sequences in a step."""
        return self.micro * self.accumulation * self.data

    @classmethod
    def of(cls, plan: Plan, limit: int) -> Size:
        """A size for `plan` on at most `limit` ranks: what is split stays split as far as they go."""
        axes, batch = dict(_axes(plan, limit)), plan.batch
        solved = solve(batch.micro, batch.accumulation, batch.global_, plan.parallel.data)
        accumulation = max(min(solved.accumulation or 1, TWO), axes["pipeline"])
        return cls(axes["data"], axes["tensor"], axes["pipeline"], min(solved.micro or TWO, TWO), accumulation)

    def like(self, plan: Plan, other: Plan) -> Size:
        """The size of `other` that stands to this one, of `plan`, as the two plans stand to each other."""
        tensor = self.tensor if other.parallel.tensor != 1 else 1
        pipeline = self.pipeline if other.parallel.pipeline != 1 else 1
        data = self.world // (tensor * pipeline)
        whole = max(1, round(self.batch * _batch(other) / _batch(plan) / data))
        micro = self.micro if whole % self.micro == 0 else 1
        return Size(data, tensor, pipeline, micro, whole // micro)


def _axes(plan: Plan, limit: int) -> Iterator[tuple[str, int]]:
    """Pipeline and tensor ranks come first: where they split a model, more can go wrong than among data ranks."""
    sizes = {axis: getattr(plan.parallel, axis) or 1 for axis in AXES}
    if plan.parallel.data is None:
        sizes["data"] = TWO
    left = limit
    for axis in AXES:
        size = TWO if sizes[axis] > 1 and left >= TWO else 1
        left //= size
        yield axis, size


def _batch(plan: Plan) -> int:
    """Sequences in a step, as far as the plan says."""
    batch = plan.batch
    return batch.global_ or prod((batch.micro or 1, batch.accumulation or 1, plan.parallel.data or 1))


def architecture(plan: Plan) -> Architecture:
    """The small model that stands for that of `plan`: as tied and as grouped as it, without dropout."""
    heads, groups = plan.model.heads or 1, plan.model.kv_heads or plan.model.heads or 1
    return Architecture(
        layers=LAYERS,
        hidden=32,
        heads=4,
        kv_heads=TWO if groups < heads else 4,
        ffn=64,
        sequence=SEQUENCE,
        tied=bool(plan.model.tied),
        bias=False,
    )


def changes(plan: Plan, size: Size) -> dict[str, Any]:
    """What has to change in `plan`, by path, for it to be of that size; None: unset."""
    values, wanted = plan.values(), dict(_wanted(plan, size))
    known = {path: value for path, value in wanted.items() if path in values and values[path] != value}
    return {**known, **_length(plan)}


DECAYS = ("linear", "cosine", "wsd")


def _length(plan: Plan) -> dict[str, Any]:
    """The length of a schedule that ends, where it is left to the length of training."""
    schedule = plan.optimizer.schedule
    open_ = schedule.name in DECAYS and schedule.total_steps is None
    return {"optimizer.schedule.total_steps": LENGTH} if open_ else {}


def _wanted(plan: Plan, size: Size) -> Iterator[tuple[str, Any]]:
    yield from ((f"parallel.{axis}", getattr(size, axis)) for axis in AXES)
    yield from ((f"parallel.{axis}", 1) for axis in ("context", "expert", "expert_tensor"))
    if size.tensor == 1:
        yield "parallel.sequence", False
    yield from (("batch.micro", size.micro), ("batch.accumulation", size.accumulation), ("batch.global_", size.batch))
    broad = (plan.schedule.breadth_first or 1) > 1
    yield "schedule.depth_first", 1 if broad else size.accumulation
    yield "schedule.breadth_first", size.accumulation if broad else 1
    yield from _model(architecture(plan))
    yield from _stages(plan, size)
    yield from _schedule(plan)
    yield from _here()


def _model(shape: Architecture) -> Iterator[tuple[str, Any]]:
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence"):
        yield f"model.{name}", getattr(shape, name)
    yield "model.experts", None


def _stages(plan: Plan, size: Size) -> Iterator[tuple[str, Any]]:
    if plan.stages.rule == "explicit" or plan.stages.boundaries or size.pipeline == 1:
        yield from ((f"stages.{name}", None) for name in ("rule", "boundaries", "layers_per_stage"))
    if size.pipeline == 1:
        yield from ((f"schedule.{name}", None) for name in ("name", "virtual", "group"))
    elif (plan.schedule.virtual or 1) > 1:
        yield from (("schedule.virtual", TWO), ("schedule.group", size.pipeline))
    yield "recompute.layers", 1


def _schedule(plan: Plan) -> Iterator[tuple[str, Any]]:
    schedule, scale = plan.optimizer.schedule, plan.precision.loss_scale
    if (schedule.warmup_steps or 0) > WARMUP:
        yield "optimizer.schedule.warmup_steps", WARMUP
    if (schedule.total_steps or 0) > LENGTH:
        yield "optimizer.schedule.total_steps", LENGTH
    if (scale.initial or 0) > SCALE:
        yield "precision.loss_scale.initial", SCALE


OFF = (None, False, 0, 1, 1.0, "none", "fp32")
"""Values under which a feature is not there."""
NO_NUMBERS = ("zero.replicas", "zero.offload.", "recompute.", "stages.", "schedule.name", "schedule.group", "debug.")
"""What places or saves memory, and says nothing of numbers."""


def is_taken(path: str, before: Any, after: Any) -> bool:
    """Whether a change takes something out that numbers may depend on, rather than making it smaller."""
    return (
        after != before
        and (path == "precision.compute" or (after in OFF and before not in OFF))
        and not path.startswith(NO_NUMBERS)
    )


def _here() -> Iterator[tuple[str, Any]]:
    """What ranks on one machine, watched from outside, have no place for."""
    yield from (("zero.offload.optimizer", "none"), ("zero.offload.optimizer_ratio", None), ("zero.offload.parameters", "none"))
    yield from (("zero.replicas", None), ("precision.fp8", None))
    yield from ((path, None) for path in paths() if path.startswith("debug."))


def made(plan: Plan, changed: Mapping[str, Any]) -> Plan:
    """`plan` with those changes."""
    return Plan.of({**plan.values(), **changed})
