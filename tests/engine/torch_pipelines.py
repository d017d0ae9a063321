"""torch.distributed.pipelining on real ranks: its schedules on our model, its runtime on our tables, and ours on its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bridge.engine import initialize
from bridge.engine.models.gpt import mean_cross_entropy
from bridge.layout.schedule.table import schedule_to_csv
from bridge.plan.plan import Plan
from tests.engine.pipelines import DEEP, RATE, SGD
from tests.engine.runs import Case, global_batch, microbatches, model_of

CASE = Case(SGD, replace(DEEP, tied=False), batch=8)


def pipelining(
    rank: int, world: int, theirs: str, values: Mapping[str, Any], folder: Path
) -> list[dict[str, Tensor]]:
    """Gradients of one step: torch's own schedule; torch's runtime on our table; our engine on torch's table."""
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import PipelineStage

    plan = Plan.of({**SGD, **values})
    engine = initialize(model_of(CASE), plan, mean_cross_entropy, seed=11)
    pipeline, local = engine.pipeline, engine.pipeline.local(rank)
    ours = folder / "ours.csv"
    ours.write_text(schedule_to_csv(pipeline.schedule))

    def stages(model: nn.Sequential) -> list[Any]:
        layers, found = list(model), []
        for stage in local:
            part = nn.Sequential(*(layers[layer] for layer in pipeline.layers[stage]))
            found.append(PipelineStage(part, stage, len(pipeline.layers), torch.device("cpu")))
        return found

    def gradients(schedule: Any, model: nn.Sequential) -> dict[str, Tensor]:
        inputs, targets = global_batch(CASE, 0)
        first, last = 0 in local, len(pipeline.layers) - 1 in local
        schedule.step(
            *((inputs,) if first else ()), **({"target": targets, "losses": []} if last else {})
        )
        number = engine.accumulation
        return {
            name: weight.grad / number
            for name, weight in model.named_parameters()
            if weight.grad is not None
        }

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mean_cross_entropy(output, target)

    found = []
    model = model_of(CASE)
    own = getattr(schedules, theirs)(stages(model), engine.accumulation, loss, scale_grads=False)
    found.append(gradients(own, model))
    table = folder / f"theirs{rank}.csv"
    own._dump_csv(table, format="compute_only")
    model = model_of(CASE)
    runtime = schedules._PipelineScheduleRuntime(
        stages(model), engine.accumulation, loss, scale_grads=False
    )
    runtime._load_csv(str(ours))
    found.append(gradients(runtime, model))
    dist.barrier()
    found.append(
        _by_engine(Plan.of({**SGD, **values, "schedule.name": "csv", "schedule.csv": str(table)}))
    )
    return found


SPLIT = {"parallel.pipeline": 2, "parallel.data": 2, "batch.accumulation": 4, "schedule.virtual": 2}


def split_backward(
    rank: int, world: int, theirs: str, ours: str, shards: bool
) -> list[dict[str, Tensor]]:
    """Gradients of one step on 2 pipeline x 2 data ranks: torch's own schedule, with its FSDP of every layer where this `shards`
    and else its DDP; and our engine's, at level 3 or 0.
    """
    level = {"zero.stage": 3 if shards else 0}
    return [
        _by_torch(theirs, shards),
        _by_engine(
            Plan.of({**SGD, **SPLIT, **level, "schedule.name": ours, "stages.layers_per_stage": 2})
        ),
    ]


def _by_torch(theirs: str, shards: bool) -> dict[str, Tensor]:
    """What this rank's stages got, averaged over data ranks; parameters without a gradient are left out."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import PipelineStage
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    line, data = mesh.get_local_rank("pipeline"), mesh.get_local_rank("data")
    model = model_of(CASE)
    layers, v = list(model), "ZBV" in theirs
    local = ((0, 3), (1, 2))[line] if v else (line, line + 2)

    def wrapped(stage: int) -> nn.Module:
        part = nn.Sequential(*layers[2 * stage : 2 * stage + 2])
        if not shards:
            return DistributedDataParallel(part, process_group=mesh["data"].get_group())
        for layer in part:
            fully_shard(layer, mesh=mesh["data"], reshard_after_forward=True)
        return fully_shard(part, mesh=mesh["data"], reshard_after_forward=True)

    group = mesh["pipeline"].get_group()
    stages = [
        PipelineStage(wrapped(stage), stage, 4, torch.device("cpu"), group=group) for stage in local
    ]
    number = SPLIT["batch.accumulation"]
    schedule = getattr(schedules, theirs)(stages, number, mean_cross_entropy, scale_grads=False)
    inputs, targets = (part.chunk(2)[data] for part in global_batch(CASE, 0))
    schedule.step(
        *((inputs,) if 0 in local else ()),
        **({"target": targets, "losses": []} if 3 in local else {}),
    )
    return {
        name: _whole(weight.grad) / number
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


def _whole(gradient: Any) -> Tensor:
    whole: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole


def _by_engine(plan: Plan) -> dict[str, Tensor]:
    engine = initialize(model_of(CASE), plan, mean_cross_entropy, seed=11)
    before = {name: weight.clone() for name, weight in engine.state_dict()}
    engine.train_batch(list(microbatches(CASE, engine, 0)))
    return {name: (before[name] - weight) / RATE for name, weight in engine.state_dict()}
