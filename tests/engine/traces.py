"""What the ranks of a pool run for tests of traces."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from oracles import real_deepspeed
from runs import Case, global_batch, microbatches, model_of
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bridge.engine import initialize
from bridge.engine.models.gpt import mean_cross_entropy, summed_cross_entropy
from bridge.engine.runner import Engine
from bridge.engine.tracing import EngineSource
from bridge.plan import Plan
from bridge.trace import attach
from bridge.trace.desync import DesyncError, Policy
from bridge.trace.source import Kind
from compat.deepspeed.tracing import DeepSpeedSource


def traced(rank: int, world: int, case: Case, folder: Path, full: bool = False) -> list[float]:
    """Train with the plan's debug levels; the losses."""
    plan = Plan.of(case.plan)
    loss = summed_cross_entropy if plan.loss == "per_token" else mean_cross_entropy
    engine = initialize(model_of(case), plan, loss, seed=11, trace=folder, full=full)
    return [engine.train_batch(microbatches(case, engine, step)) for step in range(case.steps)]


def checked(rank: int, world: int, case: Case, fault: str | None, at: int) -> tuple[list[str], int]:
    """Train with desync checks while `fault` strikes rank `at` in the second step; what was reported, and steps done."""
    torch.manual_seed(5)
    plan = Plan.of({**case.plan, "debug.tensor_parallel": True})
    try:
        engine = initialize(model_of(case), plan, mean_cross_entropy, seed=11, policy=Policy())
        for step in range(case.steps):
            batches = list(microbatches(case, engine, step))
            if fault and step == 1 and (rank == at or fault in EVERYWHERE):
                batches = FAULTS[fault](engine, batches) or batches
            engine.train_batch(batches)
    except DesyncError as error:
        return [str(mismatch) for mismatch in error.mismatches], engine.progress.steps
    return [], engine.progress.steps


Batches = list[tuple[Tensor, Tensor]]


def flip(tensor: Tensor) -> None:
    """Flip the lowest bit of the third element."""
    tensor.view(-1).view(torch.int64)[2] ^= 1


def replicated(engine: Engine, kind: Kind) -> Tensor:
    """The first norm's weight, gradient or moment."""
    found = (held for held in EngineSource(engine).tensors(kind) if held.layer == "block0" and "norm1.weight" in held.tensor)
    return next(found).local


def flip_gradient(engine: Engine, batches: Batches) -> None:
    engine.watchers["reduced"].insert(0, lambda: flip(replicated(engine, "gradient")))


def other_inputs(engine: Engine, batches: Batches) -> Batches:
    return [(inputs.roll(1), targets) for inputs, targets in batches]


def other_labels(engine: Engine, batches: Batches) -> Batches:
    return [(inputs, targets.roll(1)) for inputs, targets in batches]


def lost_sum(engine: Engine, batches: Batches) -> None:
    """The layer norms' gradients are not summed over tensor ranks: what a forgotten all-reduce leaves."""
    engine.gradients._partial = dict  # type: ignore[method-assign, assignment]


def scaled_output(engine: Engine, batches: Batches) -> None:
    engine.model.get_submodule("block1").register_forward_hook(lambda module, inputs, output: output * 1.00001, prepend=True)


FAULTS: dict[str, Callable[[Engine, Batches], Batches | None]] = {
    "weight": lambda engine, batches: flip(replicated(engine, "weight")),
    "moment": lambda engine, batches: flip(replicated(engine, "moment")),
    "gradient": flip_gradient,
    "generator": lambda engine, batches: torch.manual_seed(3) and None,
    "learning rate": lambda engine, batches: setattr(engine.progress, "lr", 0.5),
    "inputs": other_inputs,
    "labels": other_labels,
    "partial sums": lost_sum,
    "activation": scaled_output,
    "buffer": lambda engine, batches: flip(next(EngineSource(engine).tensors("replica")).local),
}
EVERYWHERE = ("partial sums",)
"""Faults of all ranks alike: one that left out a collective alone would hang."""


def wrong(rank: int, world: int, case: Case, folder: Path, mistake: str) -> None:
    """Train with logs while the engine makes a `mistake` in its second step, on all ranks alike: no check sees that."""
    plan = Plan.of(case.plan)
    engine = initialize(model_of(case), plan, mean_cross_entropy, seed=11, trace=folder)
    for step in range(case.steps):
        batches = list(microbatches(case, engine, step))
        if step == 1:
            batches = MISTAKES[mistake](engine, batches) or batches
        engine.train_batch(batches)


def divided_loss(engine: Engine, batches: Batches) -> None:
    """The loss divided by the number of tensor ranks."""
    engine.loss_fn = lambda output, targets: mean_cross_entropy(output, targets) / engine.tensor.size


MISTAKES: dict[str, Callable[[Engine, Batches], Batches | None]] = {
    "divided loss": divided_loss,
    "swapped microbatches": lambda engine, batches: batches[::-1],
    "other activation": scaled_output,
}


def traced_module(rank: int, world: int, case: Case, folder: Path) -> None:
    """The same training by plain torch, in DistributedDataParallel on several ranks."""
    plan, module = Plan.of(case.plan), model_of(case)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    wrapped = DistributedDataParallel(module) if world > 1 else module
    accumulation = plan.batch.accumulation or 1
    attach(wrapped, plan.debug, folder, optimizer=optimizer, accumulation=accumulation, policy=Policy())

    def backward(loss: Tensor, last: bool) -> None:
        with nullcontext() if last or world == 1 else wrapped.no_sync():  # type: ignore[operator]
            torch.autograd.backward(loss / accumulation)

    for step in range(case.steps):
        optimizer.zero_grad()
        batches = fed(case, rank, world, accumulation, step)
        for place, (inputs, targets) in enumerate(batches):
            backward(mean_cross_entropy(wrapped(inputs), targets), place == accumulation - 1)
        optimizer.step()


def fed(case: Case, rank: int, world: int, accumulation: int, step: int) -> Batches:
    """What `microbatches` gives an engine on data ranks alone."""
    inputs, targets = global_batch(case, step)
    parts = torch.arange(case.batch).chunk(accumulation * world)
    return [(inputs[rows], targets[rows]) for rows in (parts[place * world + rank] for place in range(accumulation))]


def traced_deepspeed(rank: int, world: int, case: Case, folder: Path, level: int, adam: bool) -> None:
    """The same training by DeepSpeed itself, with ZeRO at `level`."""
    ds, plan, module = real_deepspeed(), Plan.of(case.plan), model_of(case)
    accumulation = plan.batch.accumulation or 1
    config = {
        "train_micro_batch_size_per_gpu": case.batch // accumulation // world,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": level},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    kind = torch.optim.AdamW if adam else torch.optim.SGD
    settings: Any = {"eps": plan.optimizer.eps, "weight_decay": 0.0} if adam else {}
    optimizer = kind(module.parameters(), lr=plan.optimizer.lr, **settings)
    engine, *_ = ds.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    attach(DeepSpeedSource(engine), plan.debug, folder, policy=Policy())
    for step in range(case.steps):
        for inputs, targets in fed(case, rank, world, accumulation, step):
            engine.backward(mean_cross_entropy(engine(inputs), targets))
            engine.step()
