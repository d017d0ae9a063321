"""The same small training under everything that trace attaches to, in lines that a user would write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bridge.trace import attach
from tests.trace.planting import LOGS, Block, Loop, Small, started

STEPS = 2


def lossed(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def steps(
    model: nn.Module, optimizer: Any, rank: int, world: int, backward: Any = torch.Tensor.backward
) -> None:
    """A plain loop."""
    loop = Loop(rank, world, passes=1)
    for step in range(STEPS):
        ((tokens, targets),) = loop.data(step)
        optimizer.zero_grad()
        backward(lossed(model(tokens), targets))
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that does not hide small differences."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def small() -> Small:
    """Without ties, which torch's own export and sharding treat in ways of their own."""
    return Small(tied=False)


def plain(rank: int, world: int, folder: Path) -> Any:
    """One rank."""
    model = small()
    tracer = attach(model, LOGS, folder, optimizer=(optimizer := sgd(model)))
    steps(model, optimizer, 0, 1)
    return tracer


def replicas(rank: int, world: int, folder: Path) -> Any:
    """DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(small())
    tracer = attach(model, LOGS, folder, optimizer=(optimizer := sgd(model)))
    steps(model, optimizer, rank, world)
    return tracer


def fully_sharded(rank: int, world: int, folder: Path) -> Any:
    """FSDP2."""
    from torch.distributed.fsdp import fully_shard

    model = small()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    tracer = attach(model, LOGS, folder, optimizer=(optimizer := sgd(model)))
    steps(model, optimizer, rank, world)
    return tracer


def flat_sharded(rank: int, world: int, folder: Path) -> Any:
    """FSDP1, with parameters that are views of its own."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy, device = ModuleWrapPolicy({Block}), torch.device("cpu")
    model = FullyShardedDataParallel(
        small(), auto_wrap_policy=policy, use_orig_params=True, device_id=device
    )
    tracer = attach(model, LOGS, folder, optimizer=(optimizer := sgd(model)))
    steps(model, optimizer, rank, world)
    return tracer


def tensor_parallel(rank: int, world: int, folder: Path) -> Any:
    """DTensor, with feed-forward parts split."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh, model = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), small()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})  # type: ignore[arg-type]
    tracer = attach(model, LOGS, folder, optimizer=(optimizer := sgd(model)))
    steps(model, optimizer, 0, 1)
    return tracer


def compiled(rank: int, world: int, folder: Path) -> Any:
    """A model that a compiler runs as a whole."""
    model: Any = torch.compile(small(), backend="aot_eager")
    tracer = attach(model, LOGS, folder, optimizer=(optimizer := sgd(model)))
    steps(model, optimizer, 0, 1)
    return tracer


def accelerated(rank: int, world: int, folder: Path) -> Any:
    """accelerate's model and optimizer."""
    from accelerate import Accelerator

    started(Loop(rank, world))
    accelerator, model = Accelerator(cpu=True), small()
    wrapped, optimizer = accelerator.prepare(model, sgd(model))
    tracer = attach(wrapped, LOGS, folder, optimizer=optimizer)
    steps(wrapped, optimizer, rank, world, accelerator.backward)
    return tracer


class Stage(nn.Module):
    """A part of the model, under the names that it has there."""

    def __init__(self, whole: Small, first: bool) -> None:
        super().__init__()
        self.tok, self.pos = (whole.tok, whole.pos) if first else (None, None)
        self.blocks = nn.ModuleDict(
            {str(at): whole.blocks[at] for at in ((0,) if first else (1, 2))}
        )
        self.norm, self.head = (None, None) if first else (whole.norm, whole.head)
        self.register_buffer("scale", whole.scale)

    def forward(self, stream: Tensor) -> Tensor:
        if self.tok is not None and self.pos is not None:
            stream = self.tok(stream) + self.pos(torch.arange(stream.shape[1]))
        for block in self.blocks.values():
            stream = block(stream)
        return stream if self.head is None else self.head(self.norm(stream) * self.scale)  # type: ignore[misc, no-any-return]


def pipelined(rank: int, world: int, folder: Path) -> Any:
    """A schedule of torch.distributed.pipelining, of two microbatches."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(Stage(small(), rank == 0), rank, world, torch.device("cpu"))
    schedule, optimizer = Schedule1F1B(stage, 2, lossed), sgd(stage.submod)
    tracer = attach(schedule, LOGS, folder, optimizer=optimizer)
    loop = Loop(0, 1, passes=1)
    for step in range(STEPS):
        ((tokens, targets),) = loop.data(step)
        optimizer.zero_grad()
        # torch 2.11 takes only microbatches with the strides of those that it has seen in its trial.
        schedule.step(
            *((tokens.contiguous(),) if rank == 0 else ()),
            **({} if rank == 0 else {"target": targets}),
        )
        optimizer.step()
    return tracer


WAYS = {
    "DDP": (2, replicas),
    "FSDP2": (2, fully_sharded),
    "FSDP1": (2, flat_sharded),
    "DTensor": (2, tensor_parallel),
    "torch.compile": (1, compiled),
    "accelerate": (2, accelerated),
    "torch's pipelining": (2, pipelined),
}
"""Ranks and training."""


def attached(rank: int, world: int, way: str, folder: Path) -> list[str]:
    """What was found."""
    import logging

    logging.getLogger("bridge.trace").setLevel(logging.CRITICAL)
    tracer = (plain if way == "plain" else WAYS[way][1])(rank, world, folder)
    tracer.remove()
    return [
        str(finding)
        for finding in tracer.findings.found
        if finding.severity == "fault" or finding.id == "check-ended"
    ]
