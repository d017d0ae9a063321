"""Plan fields that the engine does not fully support. Values that would change the numbers are
refused, and other values are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bridge.engine.learning_rate import learning_rate
from bridge.errors import ConfigError
from bridge.layout.mesh import Mesh
from bridge.plan.batch import solve
from bridge.plan.plan import Plan, paths
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of a plan field: the values that the engine can run (`runs`), the reason for the
    limit, and the effect on a run if another value is ignored.
    """

    runs: tuple[Any, ...]
    reason: str
    effect: Effect = Effect.COST


LIMITS: Mapping[str, Limit] = {
    "parallel.context": Limit((1,), "the engine does not split attention by tokens; set this field to 1", Effect.NUMBERS),
    "parallel.expert": Limit((1,), "the engine has no experts; set this field to 1", Effect.NUMBERS),
    "parallel.expert_tensor": Limit((1,), "the engine has no experts; set this field to 1", Effect.NUMBERS),
    "model.experts": Limit((1,), "the engine has no experts; set this field to 1", Effect.NUMBERS),
    "optimizer.name": Limit(("adam", "adamw", "sgd", "lion"), "use adam, adamw, sgd or lion", Effect.NUMBERS),
    "precision.fp8": Limit((), "the engine has no matrix products in 8 bits; leave this field unset", Effect.NUMBERS),
    "zero.replicas": Limit((1,), "shards are spread over all data ranks"),
    "zero.bucket": Limit((), "gradients are reduced stage by stage"),
    "zero.overlap": Limit((True,), "reductions always overlap backward"),
    "zero.overlap_gather": Limit((True,), "gathers overlap compute wherever a buffer is free"),
    "zero.offload.optimizer": Limit(("none",), "optimizer state stays on the device"),
    "zero.offload.optimizer_ratio": Limit((0,), "optimizer state stays on the device"),
    "zero.offload.parameters": Limit(("none",), "parameters stay on the device"),
    "recompute.partition": Limit((False,), "saved activations are kept whole"),
    "recompute.offload": Limit((False,), "saved activations stay on the device"),
    "parallel.tensor_overlap": Limit((False,), "collectives of tensor ranks do not overlap compute"),
    "zero.gather_bucket": Limit((), "weights are gathered stage by stage"),
    "zero.prescale": Limit((False,), "gradients are divided after they are summed", Effect.ROUNDING),
    "zero.predivide": Limit((1.0,), "gradients are divided after they are summed", Effect.ROUNDING),
    "optimizer.nesterov": Limit((False,), "the engine's sgd has no Nesterov form; leave it off", Effect.NUMBERS),
    "optimizer.update_scale": Limit((), "the engine has no Muon; leave this field unset", Effect.NUMBERS),
    "optimizer.amsgrad": Limit((False,), "the engine's Adam has no amsgrad; leave it off", Effect.NUMBERS),
    "optimizer.bias_correction": Limit((True,), "the engine always corrects the moments' bias; leave this on", Effect.NUMBERS),
    "optimizer.embedding_lr": Limit((1.0,), "the engine has one learning rate; leave this field unset", Effect.NUMBERS),
    "optimizer.output_lr": Limit((1.0,), "the engine has one learning rate; leave this field unset", Effect.NUMBERS),
    "adapters.rank": Limit((), "the engine has no adapters; leave this field unset", Effect.NUMBERS),
    "adapters.alpha": Limit((), "the engine has no adapters"),
    "adapters.dropout": Limit((0,), "the engine has no adapters"),
    "adapters.targets": Limit((), "the engine has no adapters"),
    "precision.fp8_recipe": Limit((), "the engine has no matrix products in 8 bits"),
    "precision.fp8_weights": Limit((False,), "the engine has no matrix products in 8 bits"),
    "precision.autocast": Limit((), "the engine does not use torch.autocast; leave this field unset", Effect.NUMBERS),
    "precision.residual": Limit((), "the residual stream has the format of `precision.compute`", Effect.ROUNDING),
    "precision.router": Limit((), "the engine has no experts"),
    "precision.moments": Limit((), "moments are in the format of the master weights", Effect.ROUNDING),
    "parallel.vocabulary": Limit((True,), "tensor ranks always split embedding and output layer"),
    "parallel.context_method": Limit((), "the engine does not split attention by tokens"),
    "parallel.dispatcher": Limit((), "the engine has no experts"),
    "zero.average_in_collective": Limit((False,), "gradients are divided after they are summed", Effect.ROUNDING),
    "zero.double_buffer": Limit((False,), "`zero.weight_buffers` sets the number of buffers"),
    "zero.registered": Limit((False,), "buffers are not registered"),
    "zero.fp8_transposes": Limit((False,), "the engine has no matrix products in 8 bits"),
    "zero.meta_init": Limit((False,), "the model is built with memory for its weights"),
    "zero.offload.pinned": Limit((), "nothing is stored outside the device"),
    "recompute.modules": Limit((), "whole layers are recomputed, not single modules"),
}  # fmt: skip
"""All plan fields of which the engine supports only some values. Another value is refused if
ignoring it would change the numbers, and reported otherwise.
"""


OF_OPTIMIZER = tuple(f"optimizer.{name}" for name in ("nesterov", "update_scale", "amsgrad"))
"""Plan fields that only some optimizers have."""


COURSE = tuple(path for path in paths() if path.startswith(("run.", "habits.")))
"""Plan fields that the engine leaves to the loop that calls it and to its model: the length of a
run, settings for saving, loading, evaluation and logs, and the habits of other stacks.
"""
DEFINED = tuple(
    path
    for path in paths()
    if path in ("model.family", "model.predicted", "model.dropout")
    or (path.startswith("model.") and path.count(".") > 1)
)
"""Plan fields that describe the model. The engine does not read them, because it gets the model as
an argument.
"""


def check(plan: Plan, world: int) -> tuple[Mesh, tuple[Finding, ...]]:
    """Return the mesh of `plan` on `world` ranks, and a finding for each field whose value the
    engine does not support. Raises `ConfigError` if such a value changes the numbers.
    """
    values = plan.values()
    findings = remarks(values)
    mesh = Mesh.of(plan.parallel, world)
    # The next two raise what they find wrong now, and not only in the first step.
    accumulation_of(plan, mesh.sizes["data"])
    learning_rate(0.0, plan.optimizer.schedule, plan.optimizer.schedule.warmup_steps or 0)
    return mesh, (*_idle(values), *findings)


def remarks(values: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Return a finding for each of the plan fields `values` that the engine does not support.
    Raises `ConfigError` if one of them would change the numbers.
    """
    beyond = tuple(find_limits(values))
    ConfigError.raise_if(
        f"{it.path}: found {it.before!r}; {it.message}"
        for it in beyond
        if it.effect is Effect.NUMBERS
    )
    return beyond


def beyond(values: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Return findings about limits of the native engine, for a plan that runs on another engine.
    There these limits have no effect.
    """
    return tuple(
        replace(
            it, effect=Effect.NONE, message=f"the native engine would not run this: {it.message}"
        )
        for it in find_limits(values)
    )


def accumulation_of(plan: Plan, data: int) -> int:
    """Return the number of microbatches in a step: the number in the plan, or the number that
    follows from the batch sizes, or 1.
    """
    batch = plan.batch
    return solve(batch.micro, batch.accumulation, batch.global_, data).accumulation or 1


def find_limits(values: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each field whose value the engine does not support."""
    # Sizes of expert axes have no effect on a model without experts.
    without_experts = values.get("model.experts", 1) == 1
    runs = {"precision.moments": ((values.get("precision.master", "fp32"),) * 2,)}
    # What belongs to an optimizer that does not run at all is no problem of its own.
    strange = values.get("optimizer.name", "adamw") not in LIMITS["optimizer.name"].runs
    for path, limit in LIMITS.items():
        if strange and path in OF_OPTIMIZER:
            continue
        if path in values and values[path] not in runs.get(path, limit.runs):
            idle = without_experts and path.startswith("parallel.expert")
            effect = Effect.NONE if idle else limit.effect
            yield Finding(path, limit.reason, effect, given=True, before=values[path])


def _idle(values: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each field that has no effect because of the values of other fields."""
    for paths_, (speaks, reason) in _SILENT.items():
        for path in paths_:
            if values.get(path) and not speaks(values):
                effect = Effect.COST if path == "parallel.sequence" else Effect.NONE
                yield Finding(path, reason, effect, True, before=values[path])


def _recomputes(values: Mapping[str, Any]) -> bool:
    """Return whether whole layers are recomputed in backward. A ratio without a granularity also
    means whole layers.
    """
    return bool(
        values.get("recompute.granularity", "full" if "recompute.ratio" in values else "none")
        == "full"
    )


_ADAM, _DECAY = ("adam", "adamw"), ("linear", "cosine", "wsd")
_SILENT: Mapping[tuple[str, ...], tuple[Callable[[Mapping[str, Any]], bool], str]] = {
    ("parallel.sequence",): (
        lambda values: values.get("parallel.tensor", 1) > 1,
        "there is one tensor rank, so tokens are not split",
    ),
    ("optimizer.momentum",): (
        lambda values: values.get("optimizer.name") == "sgd",
        "only sgd has momentum",
    ),
    ("optimizer.betas",): (
        lambda values: values.get("optimizer.name") != "sgd",
        "sgd has no moments",
    ),
    ("optimizer.eps",): (
        lambda values: values.get("optimizer.name", "adamw") in _ADAM,
        "only Adam and AdamW use eps",
    ),
    tuple(f"optimizer.decay_ramp.{name}" for name in ("start", "end", "steps")): (
        lambda values: "optimizer.decay_ramp.shape" in values,
        "weight decay is constant",
    ),
    ("optimizer.schedule.total_steps",): (
        lambda values: values.get("optimizer.schedule.name") in (*_DECAY, "inverse_sqrt"),
        "this schedule has no last step",
    ),
    ("optimizer.schedule.decay_steps", "optimizer.schedule.decay_shape"): (
        lambda values: values.get("optimizer.schedule.name") == "wsd",
        "only the schedule wsd has a separate decay",
    ),
    ("optimizer.schedule.minimum",): (
        lambda values: values.get("optimizer.schedule.name") in (*_DECAY, "inverse_sqrt"),
        "the learning rate is constant, so it has no minimum",
    ),
    ("optimizer.schedule.warmup_from",): (
        lambda values: bool(values.get("optimizer.schedule.warmup_steps")),
        "there is no warmup",
    ),
    tuple(path for path in paths() if path.startswith("precision.loss_scale.")): (
        lambda values: values.get("precision.compute") == "fp16",
        "only fp16 needs a loss scale",
    ),
    tuple(
        f"precision.loss_scale.{name}"
        for name in ("initial", "window", "hysteresis", "minimum", "late", "final")
    ): (lambda values: "precision.loss_scale.static" not in values, "the loss scale is constant"),
    ("recompute.method", "recompute.layers"): (_recomputes, "whole layers are not recomputed"),
    ("recompute.ratio",): (
        lambda values: values.get("recompute.granularity") not in ("none", "selective"),
        "whole layers are not recomputed",
    ),
    ("recompute.kept_microbatches",): (
        lambda values: values.get("parallel.pipeline", 1) > 1 and _recomputes(values),
        "only a pipeline with recomputation can keep the activations of some microbatches",
    ),
    ("stages.boundaries",): (
        lambda values: values.get("stages.rule", "explicit") == "explicit",
        "only the rule `explicit` uses boundaries",
    ),
    ("schedule.name", "schedule.group"): (
        lambda values: values.get("parallel.pipeline", 1) > 1,
        "there is one pipeline rank, so microbatches run depth first, or breadth first if schedule.breadth_first is set",
    ),
    ("schedule.virtual", "schedule.csv", "schedule.overlap"): (
        lambda values: values.get("parallel.pipeline", 1) > 1,
        "there is one pipeline rank, which has all stages",
    ),
    ("schedule.depth_first", "schedule.breadth_first"): (
        lambda values: (
            values.get("parallel.pipeline", 1) == 1
            or values.get("schedule.name", "looped_bfs") == "looped_bfs"
        ),
        "the schedule's name decides",
    ),
    ("stages.layers_per_stage",): (
        lambda values: (
            values.get("stages.rule") != "explicit"
            and ("stages.rule" in values or "stages.boundaries" not in values)
        ),
        "`stages.boundaries` already says where stages begin",
    ),
}
"""Plan fields that have an effect only with certain values of other fields. Each has a function
that says whether there is an effect, and the reason if there is none. A field that is off or unset
has no effect anyway, and is not looked up here.
"""
