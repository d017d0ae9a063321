"""What can be counted in a run: its sizes, calls, bytes and numbers, for a plan that states everything, the model too."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bridge.engine.comm import Comm
from bridge.engine.models.gpt import Architecture
from bridge.engine.training import Training
from bridge.layout.mesh import Mesh
from bridge.layout.shard import Layout
from bridge.layout.tensor import Site
from bridge.layout.traffic import Traffic
from bridge.plan.plan import Plan

ACTION = re.compile(r"\d+[A-Z_]+\d*( awaited)?")


@dataclass(frozen=True)
class Counts:
    """Counted on one rank, calls and tokens in the last step; of each collective, calls are `traffic` and bytes are `sent`.

    `actions` are those of the pipeline, and the receipts started ahead of them. `norm_tokens` are those that the last norm sees,
    `moved` is the norm of what all steps changed in the weights.
    """

    parameters: int
    stages: int
    data: tuple[int, ...]
    tensor: tuple[int, ...]
    line: tuple[int, ...]
    actions: tuple[str, ...]
    bytes: dict[str, int]
    traffic: dict[str, int]
    sent: dict[str, int]
    microbatches: int
    tokens: int
    layer_calls: int
    core_calls: int
    norm_tokens: int
    lrs: tuple[float, ...]
    scales: tuple[float, ...]
    moved: float


def counted(rank: int, world: int, values: Mapping[str, Any], steps: int) -> Counts:
    """Train the plan `values` for `steps` steps and count."""
    plan = Plan.of(values)
    training = Training.of(plan, Architecture.of(plan.model))
    engine, calls = training.engine, Counter[str]()
    before = {name: weight.clone() for name, weight in engine.state_dict()}
    _count_calls(engine.module, calls)
    reports, actions = [], tuple[str, ...]()
    for step in range(steps):
        calls.clear()
        engine.comm.ledger.clear()
        found = engine.comm.ledger.events = []
        reports += training.steps(step + 1)
        engine.comm.ledger.events = None
        actions = tuple(event for event in found if ACTION.fullmatch(event))
    traffic = {name: found.count for name, found in engine.comm.ledger.totals.items()}
    return Counts(
        parameters=engine.layout.parameters,
        stages=engine.layout.stages,
        line=engine.line.ranks,
        actions=actions,
        data=engine.data.ranks,
        tensor=engine.tensor.ranks,
        bytes=engine.bytes(),
        traffic=traffic,
        sent={name: found.bytes for name, found in engine.comm.ledger.totals.items()},
        microbatches=engine.accumulation,
        tokens=calls["tokens"],
        layer_calls=calls["layers"],
        core_calls=calls["cores"],
        norm_tokens=calls["norm tokens"],
        lrs=tuple(report.lr for report in reports),
        scales=tuple(report.loss_scale for report in reports),
        moved=_norm({name: weight - before[name] for name, weight in engine.state_dict()}),
    )


def _norm(tensors: Mapping[str, torch.Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors.values()]).norm())


def _count_calls(model: nn.Module, calls: Counter[str]) -> None:
    """Count what layers, the embedding and the last norm are called with. What is computed again counts
    again."""
    for layer in model.children():
        layer.register_forward_pre_hook(lambda module, inputs: calls.update({"layers": 1}))
    for name, module in model.named_modules():
        if name.endswith("attention.core"):
            module.register_forward_pre_hook(lambda module, inputs: calls.update({"cores": 1}))
    first, last = model.get_submodule("embedding"), model.get_submodule("head.norm")
    first.register_forward_pre_hook(
        lambda module, inputs: calls.update({"tokens": inputs[0].numel()})
    )
    last.register_forward_pre_hook(
        lambda module, inputs: calls.update({"norm tokens": inputs[0][..., 0].numel()})
    )


@dataclass(frozen=True)
class Live:
    """What one rank holds and sends: its layout and sites of activations, and the bytes and calls counted in the last of two
    steps.
    """

    layout: Layout
    sites: list[Site]
    bytes: dict[str, int]
    traffic: dict[str, Traffic]


def live(rank: int, world: int, values: Mapping[str, Any], shape: Architecture) -> Live:
    """Two steps of the plan `values` on a model of `shape`."""
    training = Training.of(Plan.of(values), shape)
    engine = training.engine
    for step in range(2):
        engine.comm.ledger.clear()
        list(training.steps(step + 1))
    return Live(engine.layout, engine.sites, engine.bytes(), dict(engine.comm.ledger.totals))


def reduced(rank: int, world: int, dtype: torch.dtype, alias: bool) -> tuple[torch.Tensor, Traffic]:
    """This rank's slice, three rows, of the sum of a tensor over ranks; `alias`: in the place where the slice lay."""
    comm = Comm(Mesh({"data": world}), rank)
    whole = (torch.arange(world * 6, dtype=torch.float64).view(world * 3, 2) + rank).to(dtype)
    part = whole[rank * 3 : rank * 3 + 3] if alias else torch.empty(3, 2, dtype=dtype)
    comm.reduce_scatter("sum", part, whole, comm.group("data"))()
    return part, comm.ledger.totals["sum"]


def gathered(rank: int, world: int) -> tuple[torch.Tensor, Traffic]:
    """Two numbers of each rank, from the place where they belong in the whole."""
    comm = Comm(Mesh({"data": world}), rank)
    whole = torch.zeros(2 * world, dtype=torch.float64)
    own = whole[2 * rank : 2 * rank + 2]
    own.copy_(torch.tensor([10 * rank, 10 * rank + 1]))
    comm.all_gather("gather", whole, own, comm.group("data"))()
    return whole, comm.ledger.totals["gather"]
