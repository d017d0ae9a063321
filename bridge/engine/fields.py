"""What the engine does with each field of a plan: fields it cannot honour are refused if numbers depend on
them, else said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bridge.batch import solve
from bridge.errors import ConfigError
from bridge.findings import Finding
from bridge.layout.mesh import Mesh
from bridge.plan import Plan
from bridge.rules import Effect

HONOURED = (
    "model.", "stages.", "batch.", "loss", "optimizer.", "precision.compute", "precision.master", "precision.reduce",
    "precision.loss_scale.", "parallel.data", "parallel.tensor", "parallel.order", "zero.stage", "zero.weight_buffers",
    "zero.grad_buffers", "recompute.method", "recompute.layers", "recompute.ratio",
)  # fmt: skip
"""Fields, or sections, that the engine does as told."""

REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "parallel.pipeline": (lambda value: value == 1, "the engine runs no pipelines yet; use 1"),
    "parallel.context": (lambda value: value == 1, "the engine does not split attention by tokens; use 1"),
    "parallel.expert": (lambda value: value == 1, "the engine has no experts; use 1"),
    "parallel.expert_tensor": (lambda value: value == 1, "the engine has no experts; use 1"),
    "optimizer.name": (lambda value: value in ("adam", "adamw", "sgd"), "use adam, adamw or sgd"),
    "model.experts": (lambda value: value == 1, "the engine has no experts; use 1"),
    "precision.fp8": (lambda value: False, "the engine has no 8-bit products; leave it unset"),
}
"""Fields that change the numbers: the values that the engine runs, and what to do about others."""

COST_ONLY: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "schedule.name": (lambda value: False, "there is one pipeline rank, so microbatches run depth first"),
    "schedule.virtual": (lambda value: value == 1, "there is one pipeline rank"),
    "schedule.group": (lambda value: value == 1, "there is one pipeline rank"),
    "schedule.depth_first": (lambda value: False, "microbatches always run depth first"),
    "schedule.breadth_first": (lambda value: value == 1, "microbatches run depth first"),
    "schedule.csv": (lambda value: False, "there is one pipeline rank, so microbatches run depth first"),
    "schedule.overlap": (lambda value: False, "there is one pipeline rank, so there are no messages"),
    "zero.replicas": (lambda value: value == 1, "shards are spread over all data ranks"),
    "zero.bucket": (lambda value: False, "gradients are reduced stage by stage"),
    "zero.overlap": (lambda value: value, "reductions always overlap backward"),
    "zero.overlap_gather": (lambda value: value, "gathers overlap compute wherever a buffer is free"),
    "zero.offload.optimizer": (lambda value: value == "none", "optimizer state stays on the device"),
    "zero.offload.optimizer_ratio": (lambda value: value == 0, "optimizer state stays on the device"),
    "zero.offload.parameters": (lambda value: value == "none", "parameters stay on the device"),
    "recompute.granularity": (lambda value: value != "selective", "whole layers are computed again, or none"),
    "recompute.partition": (lambda value: not value, "saved activations are kept whole"),
    "recompute.offload": (lambda value: not value, "saved activations stay on the device"),
}
"""Fields that change memory or speed only: the values that the engine honours, and what it does instead of
others.
"""

NO_LOGS = "the engine writes no layer logs yet"
"""What becomes of the whole section `debug`."""


def check(plan: Plan, world: int) -> tuple[Mesh, tuple[Finding, ...]]:
    """The mesh of `plan` on `world` ranks and what the engine does otherwise than asked. Raises
    `ConfigError`.
    """
    values = plan.values()
    ConfigError.raise_if(_refusals(values))
    mesh = Mesh.of(plan.parallel, world)
    accumulation_of(plan, mesh.sizes["data"])
    return mesh, tuple(_findings(values))


def accumulation_of(plan: Plan, data: int) -> int:
    """Microbatches in a step: given, or worked out from the batch sizes, or one."""
    batch = plan.batch
    return solve(batch.micro, batch.accumulation, batch.global_, data).accumulation or 1


def _refusals(values: Mapping[str, Any]) -> Iterator[str]:
    for path, (runs, advice) in REFUSED.items():
        if path in values and not runs(values[path]):
            yield f"{path}: found {values[path]!r}; {advice}"


def _findings(values: Mapping[str, Any]) -> Iterator[Finding]:
    if values.get("parallel.sequence") and values.get("parallel.tensor", 1) == 1:
        yield Finding("parallel.sequence", "there is one tensor rank, so tokens are not split", Effect.COST, given=True)
    for path, (honoured, instead) in COST_ONLY.items():
        if path in values and not honoured(values[path]):
            yield Finding(path, instead, Effect.COST, given=True, before=values[path])
    for path in values:
        if path.startswith("debug.") and values[path]:
            yield Finding(path, NO_LOGS, Effect.NONE, given=True, before=values[path])
