"""Fit: changes a plan so that it runs on the ranks that were launched, with a finding for each
change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any

from bridge.engine.fields import accumulation_of
from bridge.errors import ConfigError
from bridge.layout.architecture import Architecture
from bridge.layout.pipeline import Pipeline, text_of
from bridge.plan.plan import Plan
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect

ONE = ("parallel.context", "parallel.expert", "parallel.expert_tensor", "model.experts")
"""Plan fields for which the engine supports only the value 1."""

STAGES = ("stages.rule", "stages.boundaries", "stages.layers_per_stage")
ORDER = ("schedule.name", "schedule.virtual", "schedule.group", "schedule.csv")
"""Plan fields that are unset if they do not fit the new number of layers or ranks."""


def fit(plan: Plan, world: int, shape: Architecture) -> tuple[Plan, tuple[Finding, ...]]:
    """Return `plan`, changed so that it runs on `world` ranks with a model of this `shape`, and a
    finding for each change. Sizes are reduced until they fit.
    """
    values = dict(plan.values())
    changes = _changes(values, world, shape)
    findings = []
    for path, new in changes.items():
        old = values.get(path)
        if old != new:
            # Another batch, other experts and other products change numbers. Every other change
            # only moves work between ranks.
            numbers = path in ("batch.global_", "model.experts", "precision.fp8")
            effect = Effect.NUMBERS if numbers else Effect.COST
            findings.append(
                Finding(
                    path,
                    f"changed from {old} to {new}, to fit {world} ranks",
                    effect,
                    True,
                    None,
                    old,
                    new,
                )
            )
    return Plan.of({**values, **changes}), tuple(findings)


def _changes(values: Mapping[str, Any], world: int, shape: Architecture) -> dict[str, Any]:
    """Return the plan fields to change, with their new values. The number of tensor ranks is chosen
    first. The number of pipeline ranks is then the largest one, up to the number in the plan, that
    divides the remaining ranks and for which a pipeline can be built.
    """
    # Tensor ranks have to divide both the ranks and the heads, and should divide the number that
    # was asked for.
    tensor = gcd(values.get("parallel.tensor", 1), gcd(world, shape.heads))
    ranks, stages = world // tensor, values.get("parallel.pipeline", 1)
    for pipeline in (number for number in range(min(stages, ranks), 1, -1) if ranks % number == 0):
        sizes = dict(_sizes(values, world, tensor, pipeline))
        # The rule for stages and the schedule are kept if they suit the pipeline; first the rule is
        # given up, then both.
        for paths in ((), STAGES, (*STAGES, *ORDER)):
            changes = sizes | {path: None for path in paths if path in values}
            if _runs(Plan.of({**values, **changes}), shape, ranks // pipeline):
                return changes
    alone = dict(_sizes(values, world, tensor, 1))
    # These two rules divide layers into any number of stages. Others name layers or stages that one
    # rank may not have.
    if values.get("stages.rule", "carry") not in ("carry", "ceil") or "stages.boundaries" in values:
        alone |= dict.fromkeys(STAGES)
    return alone


def _runs(plan: Plan, shape: Architecture, data: int) -> bool:
    """Return whether the plan's pipeline can be built for a model of `shape` on `data` data ranks."""
    try:
        Pipeline.of(plan, shape.facts(), accumulation_of(plan, data), text_of(plan))
    except ConfigError:
        return False
    return True


def _sizes(
    values: Mapping[str, Any], world: int, tensor: int, pipeline: int
) -> Iterator[tuple[str, Any]]:
    data = world // (tensor * pipeline)
    yield from ((path, 1) for path in ONE if values.get(path, 1) != 1)
    for path, size in (("parallel.tensor", tensor), ("parallel.pipeline", pipeline)):
        if path in values:
            yield path, size
    if values.get("parallel.sequence") and tensor == 1:
        yield "parallel.sequence", False
    if values.get("parallel.data", data) != data:
        yield "parallel.data", data
    if "batch.global_" in values:
        # The largest global batch, up to the one asked for, that microbatches on `data` ranks add
        # up to. A set accumulation leaves no choice: the three sizes have to agree.
        unit: int = values.get("batch.micro", 1) * values.get("batch.accumulation", 1) * data
        batch = int(values["batch.global_"])
        yield (
            "batch.global_",
            unit if "batch.accumulation" in values else max(batch // unit, 1) * unit,
        )
    if "precision.fp8" in values:
        yield "precision.fp8", None
