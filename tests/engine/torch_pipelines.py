"""torch.distributed.pipelining on real ranks: its schedules on our model, its runtime on our tables, and ours on its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipelines import DEEP, RATE, SGD
from runs import Case, global_batch, microbatches, model_of
from torch import Tensor, nn

from bridge.engine import initialize
from bridge.engine.models.gpt import mean_cross_entropy
from bridge.layout.schedule.table import written
from bridge.plan import Plan

CASE = Case(SGD, replace(DEEP, tied=False), batch=8)


def pipelining(rank: int, world: int, theirs: str, values: Mapping[str, Any], folder: Path) -> list[dict[str, Tensor]]:
    """Gradients of one step: torch's own schedule; torch's runtime on our table; our engine on torch's table."""
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import PipelineStage

    plan = Plan.of({**SGD, **values})
    engine = initialize(model_of(CASE), plan, mean_cross_entropy, seed=11)
    pipeline, local = engine.pipeline, engine.pipeline.local(rank)
    ours = folder / "ours.csv"
    ours.write_text(written(pipeline.schedule))

    def stages(model: nn.Sequential) -> list[Any]:
        layers, found = list(model), []
        for stage in local:
            part = nn.Sequential(*(layers[layer] for layer in pipeline.layers[stage]))
            found.append(PipelineStage(part, stage, len(pipeline.layers), torch.device("cpu")))
        return found

    def gradients(schedule: Any, model: nn.Sequential) -> dict[str, Tensor]:
        inputs, targets = global_batch(CASE, 0)
        first, last = 0 in local, len(pipeline.layers) - 1 in local
        schedule.step(*((inputs,) if first else ()), **({"target": targets, "losses": []} if last else {}))
        number = engine.accumulation
        return {name: weight.grad / number for name, weight in model.named_parameters() if weight.grad is not None}

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mean_cross_entropy(output, target)

    found = []
    model = model_of(CASE)
    own = getattr(schedules, theirs)(stages(model), engine.accumulation, loss, scale_grads=False)
    found.append(gradients(own, model))
    table = folder / f"theirs{rank}.csv"
    own._dump_csv(table, format="compute_only")
    model = model_of(CASE)
    runtime = schedules._PipelineScheduleRuntime(stages(model), engine.accumulation, loss, scale_grads=False)
    runtime._load_csv(str(ours))
    found.append(gradients(runtime, model))
    dist.barrier()
    found.append(_by_engine(Plan.of({**SGD, **values, "schedule.name": "csv", "schedule.csv": str(table)})))
    return found


def _by_engine(plan: Plan) -> dict[str, Tensor]:
    engine = initialize(model_of(CASE), plan, mean_cross_entropy, seed=11)
    before = {name: weight.clone() for name, weight in engine.state_dict()}
    engine.train_batch(list(microbatches(CASE, engine, 0)))
    return {name: (before[name] - weight) / RATE for name, weight in engine.state_dict()}
