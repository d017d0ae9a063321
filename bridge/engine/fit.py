"""Fit: a plan made to run on the ranks at hand, and what was changed for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any

from bridge.findings import Finding
from bridge.plan import Plan
from bridge.rules import Effect

ONE = ("parallel.pipeline", "parallel.context", "parallel.expert", "parallel.expert_tensor", "model.experts")
"""Sizes that the engine runs at 1 only."""


def fit(plan: Plan, world: int, heads: int) -> tuple[Plan, tuple[Finding, ...]]:
    """`plan` for `world` ranks and a model of `heads` heads: sizes shrink until they fit; every change is a finding."""
    values = dict(plan.values())
    changes = dict(_changes(values, world, heads))
    fitted = {**values, **changes}
    findings = tuple(
        Finding(
            path,
            f"changed from {values.get(path)} to {new}, to fit {world} ranks",
            _effect(path),
            True,
            None,
            values.get(path),
            new,
        )
        for path, new in changes.items()
        if values.get(path) != new
    )
    return Plan.of(fitted), findings


def _changes(values: Mapping[str, Any], world: int, heads: int) -> Iterator[tuple[str, Any]]:
    yield from ((path, 1) for path in ONE if values.get(path, 1) != 1)
    tensor = gcd(values.get("parallel.tensor", 1), gcd(world, heads))
    if "parallel.tensor" in values:
        yield "parallel.tensor", tensor
    if values.get("parallel.sequence") and tensor == 1:
        yield "parallel.sequence", False
    if values.get("parallel.data", world // tensor) != world // tensor:
        yield "parallel.data", world // tensor
    if "batch.global_" in values:
        yield "batch.global_", _global(values, world // tensor)
    if "precision.fp8" in values:
        yield "precision.fp8", None
    if values.get("stages.rule", "carry") not in ("carry", "ceil") or "stages.boundaries" in values:
        yield from (("stages.rule", None), ("stages.boundaries", None), ("stages.layers_per_stage", None))


def _global(values: Mapping[str, Any], data: int) -> int:
    """The largest global batch, up to the one asked for, that microbatches on `data` ranks add up to."""
    unit: int = values.get("batch.micro", 1) * values.get("batch.accumulation", 1) * data
    asked = int(values["batch.global_"])
    return unit if "batch.accumulation" in values else max(asked // unit, 1) * unit


def _effect(path: str) -> Effect:
    return Effect.NUMBERS if path in ("batch.global_", "model.experts", "precision.fp8") else Effect.COST
