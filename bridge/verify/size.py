"""Makes runs small enough for a few local ranks, and says which fields have to change for this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from bridge.plan.batch import solve
from bridge.plan.equality import plain
from bridge.plan.model import Model
from bridge.plan.plan import Plan, paths

TWO = 2
"""The value that replaces larger sizes, such as a number of ranks or of microbatches. It is the
smallest number with which a run still splits, accumulates or repeats.
"""
LAYERS, SEQUENCE = 4, 16
"""Number of layers in a small run (one for each of two stages on each of two pipeline ranks), and
number of tokens in a sequence.
"""
WARMUP, LENGTH, WINDOW = 2, 8, 2
"""Largest numbers of steps in a small run for warmup, for the schedule, and for the window of the
loss scale. So all three have an effect within few steps.
"""
FEW, ENOUGH = 3, 7
"""Numbers of steps to run: `FEW` if learning rate and loss scale are constant, else `ENOUGH`."""
SCALE = 2.0**10
"""Largest initial loss scale of a small run. With a larger one, gradients might overflow in each of
the few steps, and every step would be skipped.
"""
AXES = ("pipeline", "tensor", "data")


@dataclass(frozen=True)
class Size:
    """Sizes of a small run: the number of ranks along each axis, of sequences per microbatch, and
    of microbatches per step.
    """

    data: int
    tensor: int
    pipeline: int
    micro: int
    accumulation: int

    @property
    def world(self) -> int:
        """The number of ranks along all axes together."""
        return self.data * self.tensor * self.pipeline

    @property
    def batch(self) -> int:
        """The number of sequences per step."""
        return self.micro * self.accumulation * self.data

    @classmethod
    def of(cls, plan: Plan, limit: int) -> Size:
        """Return a size for `plan` on at most `limit` ranks. An axis with several ranks in the plan
        has two ranks here, as long as there are enough.
        """
        axes, batch = dict(_axes(plan, limit)), plan.batch
        solution = solve(batch.micro, batch.accumulation, batch.global_, plan.parallel.data)
        # With fewer microbatches than pipeline ranks, never are all ranks at work.
        accumulation = max(min(solution.accumulation or 1, TWO), axes["pipeline"])
        return cls(
            axes["data"],
            axes["tensor"],
            axes["pipeline"],
            min(solution.micro or TWO, TWO),
            accumulation,
        )

    def like(self, plan: Plan, other: Plan) -> Size:
        """Return the size for the plan `other`, where this object is the size for `plan`. The batch
        of `other` is larger or smaller by the same ratio as in the original plans.
        """
        tensor = self.tensor if other.parallel.tensor != 1 else 1
        pipeline = self.pipeline if other.parallel.pipeline != 1 else 1
        data = self.world // (tensor * pipeline)
        whole = max(1, round(self.batch * _batch(other) / _batch(plan) / data))
        micro = self.micro if whole % self.micro == 0 else 1
        return Size(data, tensor, pipeline, micro, whole // micro)


def _axes(plan: Plan, limit: int) -> Iterator[tuple[str, int]]:
    """Yield the name of each axis and the number of ranks along this axis."""
    # Pipeline and tensor ranks come first: where they split a model, more can go wrong than among
    # data ranks.
    sizes = {axis: getattr(plan.parallel, axis) or 1 for axis in AXES}
    if plan.model.experts:
        sizes["tensor"] = 1  # no engine here splits experts over tensor ranks
    if plan.parallel.data is None:
        sizes["data"] = TWO
    rest = limit
    for axis in AXES:
        size = TWO if sizes[axis] > 1 and rest >= TWO else 1
        rest //= size
        yield axis, size


def _batch(plan: Plan) -> int:
    """Return the number of sequences per step. Sizes that the plan leaves open count as 1."""
    batch = plan.batch
    return batch.global_ or prod(
        (batch.micro or 1, batch.accumulation or 1, plan.parallel.data or 1)
    )


USUAL: Mapping[str, Any] = {
    "model.tied": False,
    "model.norm.kind": "layer",
    "model.mlp.gated": False,
    "model.mlp.activation": "gelu",
    "model.mlp.bias": False,
    "model.attention.qkv_bias": False,
    "model.attention.output_bias": False,
    "model.embedding.positions": "rotary",
}
"""Values for plan fields of the model that a plan leaves open, because the user's own script builds
the model.
"""


def small_model(plan: Plan) -> Model:
    """Return the model of a small run of `plan`, without features that no engine here supports.

    Fields that the plan leaves open get the values of `USUAL` and `SIZES`.
    """
    values = {path: value for path, value in plan.values().items() if path.startswith("model.")}
    return change_plan(Plan(), {**USUAL, **SIZES, **values, **dict(_absent(plan))}).model


SIZES: Mapping[str, int] = {
    "model.layers": LAYERS,
    "model.hidden": 32,
    "model.heads": 4,
    "model.kv_heads": 4,
    "model.ffn": 64,
    "model.vocab": 256,
    "model.sequence": SEQUENCE,
}


def changes(plan: Plan, size: Size) -> dict[str, Any]:
    """Return the plan fields to change for the given size, with their new values. The value None
    unsets a field.
    """
    values, fields = plan.values(), dict(_required_fields(plan, size))
    edits = {
        path: value for path, value in fields.items() if path in values and values[path] != value
    }
    return {
        **edits,
        **_length(plan),
        **(PLAIN_CHOICE if plan.model.moe.balance == "sinkhorn" else {}),
    }


PLAIN_CHOICE: Mapping[str, Any] = {"model.moe.balance": "none", "model.moe.normalised": False}
"""Plan fields with values that turn off Sinkhorn's iteration for choosing experts. The iteration
looks at all tokens of a microbatch, so the choice of experts would depend on the size of the
microbatch.
"""


def changes_like(plan: Plan, size: Size, other: Plan, edits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `plan` to change for the given size, with their new values. `edits`
    are the changes that made the plan `other` small.

    Numbers that differ between the two large plans also differ between the small ones.
    """
    mine, theirs, own = plan.values(), other.values(), changes(plan, size)
    both = [
        path for path in SCALED if path in mine and theirs.get(path) and edits.get(path) is not None
    ]
    return {**own, **{path: _alike(theirs[path], edits[path], mine[path]) for path in both}}


SCALED = (
    *(f"optimizer.schedule.{name}" for name in ("warmup_steps", "total_steps", "decay_steps")),
    *("optimizer.decay_ramp.steps", "precision.loss_scale.window", "precision.loss_scale.initial"),
    *("model.ffn", "model.moe.ffn", "model.moe.top_k", "model.experts", "model.attention.window"),
)
"""Plan fields for which the ratio between source and target stays the same in the small runs."""


def _alike(full: float, small: float, other: float) -> Any:
    """Return a number that has the same ratio to `small` as `other` has to `full`. If `other` and
    `full` differ, the result differs from `small`.
    """
    if other == full:
        return small
    result = type(small)(max(1, round(small * other / full)))
    # A difference in the large must not be rounded away in the small.
    return result if result != small else type(small)(max(1, small + (1 if other > full else -1)))


def steps_for(plan: Plan) -> int:
    """Return the number of steps after which the schedules and the loss scale of the small `plan`
    have had an effect.
    """
    optimizer, scale = plan.optimizer, plan.precision.loss_scale
    dynamic = plan.precision.compute == "fp16" and scale.static is None
    moves = (
        optimizer.schedule.name not in (None, "constant")
        or optimizer.schedule.warmup_steps
        or optimizer.decay_ramp.shape
    )
    return ENOUGH if moves or dynamic else FEW


DECAYS = ("linear", "cosine", "wsd")


def _length(plan: Plan) -> dict[str, Any]:
    """Return a number of steps for the schedule, as a plan field, if the schedule ends with
    training and the plan leaves its length open.
    """
    schedule = plan.optimizer.schedule
    open_ = schedule.name in DECAYS and schedule.total_steps is None
    return {"optimizer.schedule.total_steps": LENGTH} if open_ else {}


def _required_fields(plan: Plan, size: Size) -> Iterator[tuple[str, Any]]:
    yield from ((f"parallel.{axis}", getattr(size, axis)) for axis in AXES)
    yield from ((f"parallel.{axis}", 1) for axis in ("context", "expert", "expert_tensor"))
    if size.tensor == 1:
        yield "parallel.sequence", False
    yield from (
        ("batch.micro", size.micro),
        ("batch.accumulation", size.accumulation),
        ("batch.global_", size.batch),
    )
    # All microbatches of a step run in the order that the plan asks for.
    broad = (plan.schedule.breadth_first or 1) > 1
    yield "schedule.depth_first", 1 if broad else size.accumulation
    yield "schedule.breadth_first", size.accumulation if broad else 1
    yield from _model(plan)
    yield from _stages(plan, size)
    yield from _schedule(plan)
    yield from here()


def _model(plan: Plan) -> Iterator[tuple[str, Any]]:
    """Yield plan fields of the model with their new values: small sizes, and values that turn off
    features that the native dense model lacks.
    """
    model = plan.model
    yield from SIZES.items()
    groups = model.kv_heads or model.heads or 1
    yield "model.kv_heads", TWO if groups < (model.heads or 1) else SIZES["model.heads"]
    # The small vocabulary gets rows without a word if the large one has some.
    has_empty_rows = (model.embedding.padded_vocab or 0) > (model.vocab or 0) > 0
    padded = SIZES["model.vocab"] + (FILLED if has_empty_rows else 0)
    yield from (
        ("model.embedding.max_positions", SEQUENCE),
        ("model.embedding.padded_vocab", padded),
    )
    # Random samples hold every token, also a padding token that the large run never meets.
    row = plain(plan.values()).get("model.embedding.padding")
    if isinstance(row, int):
        yield "model.embedding.padding", row % SIZES["model.vocab"]
    elif plan.model.embedding.padding is not None:
        yield "model.embedding.padding", "none"
    yield from (("model.embedding.begin", None), ("model.embedding.ends", None))
    # Heads that together are as wide as the stream stay so; others stay wider.
    square = (model.attention.head_size or 0) * (model.heads or 0) == model.hidden
    yield "model.attention.head_size", HEAD if square else TWO * HEAD
    yield "model.attention.window", min(model.attention.window or SEQUENCE, HEAD)
    for path in ("model.moe.layers", "model.attention.windowed", "model.rotary.layers"):
        if pattern := plan.values().get(path):
            yield path, tuple(pattern[index * len(pattern) // LAYERS] for index in range(LAYERS))
    yield from _experts(model)
    yield from _absent(plan)


FILLED = 16
"""Number of padding rows that a small vocabulary gets if the large one has some. Tensor ranks
divide it evenly.
"""


def _absent(plan: Plan) -> Iterator[tuple[str, Any]]:
    values = plan.values()
    yield from ((path, None) for path in values if path.startswith(LATENT))
    yield from ((path, value) for path, value in ABSENT.items() if values.get(path))


def _experts(model: Model) -> Iterator[tuple[str, Any]]:
    if model.experts:
        count = min(model.experts, EXPERTS)
        yield "model.experts", count
        yield (
            "model.moe.ffn",
            SIZES["model.ffn"] if model.moe.ffn == model.ffn else 32,
        )  # some families have one width for both
        yield "model.moe.top_k", min(model.moe.top_k or 1, max(1, count - 1))
    if model.moe.shared_ffn:
        yield "model.moe.shared_ffn", 32


HEAD, EXPERTS = 8, 8
LATENT = "model.attention.latent."
ABSENT: Mapping[str, Any] = {
    **dict.fromkeys(("model.dropout", "model.attention.dropout", "model.embedding.dropout"), 0.0),
    **dict.fromkeys(
        ("model.attention.sinks", "model.embedding.norm", "model.moe.balance_bias"), False
    ),
    **dict.fromkeys(
        ("model.embedding.width", "model.mlp.clamp", "model.mlp.offset", "model.predicted"), None
    ),
    **dict.fromkeys(
        ("model.moe.groups", "model.moe.top_groups", "model.moe.group_best", "model.moe.capacity"),
        None,
    ),
    **dict.fromkeys(("model.moe.aux_loss", "model.moe.z_loss", "model.moe.balance_rate"), 0.0),
}
"""Plan fields with values that turn features off: features that the native model lacks, or whose
random numbers differ between stacks.
"""


def _stages(plan: Plan, size: Size) -> Iterator[tuple[str, Any]]:
    # Explicit boundaries name layers that the small model does not have.
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
    if (schedule.total_steps or 0) > LENGTH or _outlasts_schedule(plan):
        yield "optimizer.schedule.total_steps", SHORT if _outlasts_schedule(plan) else LENGTH
    if (schedule.decay_steps or 0) > LENGTH // TWO:
        yield "optimizer.schedule.decay_steps", LENGTH // TWO
    if (plan.optimizer.decay_ramp.steps or 0) > LENGTH:
        yield "optimizer.decay_ramp.steps", LENGTH
    if (scale.initial or 0) > SCALE:
        yield "precision.loss_scale.initial", SCALE
    if (scale.window or 0) > WINDOW:
        passes = plan.run.steps is None or (scale.window or 0) < plan.run.steps
        yield "precision.loss_scale.window", WINDOW if passes else LENGTH


def _outlasts_schedule(plan: Plan) -> bool:
    """Return whether training goes on after the end of the schedule. Then the schedule of a small
    run has to end early too.
    """
    length, end = plan.run.steps, plan.optimizer.schedule.total_steps
    return length is not None and end is not None and length > end


SHORT = 5
"""Number of steps of a schedule that ends before training does: a step before the last of `ENOUGH`,
and two steps behind the warmup, as half-way a cosine and a line have the same value.
"""


OFF = (None, False, 0, 1, 1.0, "none", "fp32")
"""Values of plan fields that mean that a feature is off."""
NO_NUMBERS = ("zero.replicas", "zero.offload.", "recompute.", "stages.", "schedule.", "debug.")
"""Prefixes of plan fields that change no numbers, but only where tensors are stored or computed."""


def is_taken(path: str, before: Any, after: Any) -> bool:
    """Return whether the change of a plan field from `before` to `after` turns off a feature that
    the results of training may depend on. A change that only makes a size smaller does not.
    """
    if after == before or path.startswith(NO_NUMBERS):
        return False
    return path == "precision.compute" or (after in OFF and before not in OFF)


def here() -> Iterator[tuple[str, Any]]:
    """Yield plan fields with values that turn off what a single machine lacks or does not need:
    offloading, ZeRO replicas, fp8 and debugging.
    """
    yield from (
        ("zero.offload.optimizer", "none"),
        ("zero.offload.optimizer_ratio", None),
        ("zero.offload.parameters", "none"),
    )
    yield from (("zero.replicas", None), ("precision.fp8", None))
    yield from ((path, None) for path in paths() if path.startswith("debug."))


def change_plan(plan: Plan, edits: Mapping[str, Any]) -> Plan:
    """Return the plan with the fields `edits` set to their new values."""
    return Plan.of({**plan.values(), **edits})
