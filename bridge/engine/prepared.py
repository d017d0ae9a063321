"""Builds those parts of an engine from a model and a plan that need no communication between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from bridge.engine.fields import accumulation_of, check
from bridge.engine.layers import Arguments, as_module
from bridge.engine.models.blocks import Cut
from bridge.engine.models.cutting import plan_cut
from bridge.engine.runner import arguments_of, chain_of_model, pipeline_of
from bridge.layout.mesh import Mesh
from bridge.layout.pipeline import Pipeline
from bridge.plan.plan import Plan
from bridge.stack.findings import Finding


@dataclass(frozen=True)
class Prepared:
    """The parts of an engine that need no communication: the model as one module, how it is divided
    into layers, the mesh of all ranks, the pipeline, findings, and a batch on which the model was
    tried.
    """

    module: nn.Module
    cut: Cut | None
    mesh: Mesh
    pipeline: Pipeline
    findings: tuple[Finding, ...]
    sample: Arguments | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module | Sequence[nn.Module],
        plan: Plan,
        world: int,
        names: Sequence[Sequence[str]] | None = None,
        sample: Any = None,
        targets: bool = False,
        layers: Sequence[str] | None = (),
    ) -> Prepared:
        """Build these parts of an engine for `world` ranks.

        `names` are the names of the layers in each stage. `sample` is a batch that the model
        accepts; if `targets` is true, the last element of the batch are the targets. `layers` are
        the names of the model's blocks, or None for one layer. Raises
        `BridgeError` if the plan cannot run.
        """
        mesh, findings = check(plan, world)
        module = as_module(model)
        trial = None if sample is None else arguments_of(sample, targets).copy()
        cut, whole = plan_cut(module, plan, names, trial, layers)
        accumulation = accumulation_of(plan, mesh.sizes["data"])
        pipeline = pipeline_of(chain_of_model(module, cut), plan, accumulation, names)
        return cls(module, cut, mesh, pipeline, (*findings, *whole), trial)
