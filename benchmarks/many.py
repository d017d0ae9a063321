"""A training step of models with very many small layers, on two ranks, as a ratio to DDP's and FSDP2's.

Each block has five parameters: a norm, a linear layer and a factor. Prints the table of README.md, row by row.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from engine import RANKS, TIMEOUT, Pair, line, ratios, timed

from bridge.engine import initialize
from bridge.plan.plan import Plan
from tests.engine.pool import Pool

BOUNDS = (
    *(("zero 0", "ddp", blocks, bound) for blocks, bound in ((200, 1.05), (1000, 1.15))),
    *((f"zero {level}", "ddp", 200, None) for level in (1, 2, 3)),
    ("zero 3", "fsdp2", 200, 1.0),
)
"""What is compared, with how many blocks, and the largest ratio wanted."""
CLIP, RATE = 1.0, 1e-3


class Block(nn.Module):
    """A residual layer of five parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.factor = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, value: Tensor) -> Tensor:
        """The input, and a part of what becomes of it."""
        found: Tensor = value + self.factor * self.linear(self.norm(value)).relu()
        return found


def model(blocks: int, width: int) -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def native(blocks: int, width: int, level: int) -> Any:
    """The engine."""
    values: Mapping[str, Any] = {"zero.stage": level, "optimizer.lr": RATE, "optimizer.clip": CLIP}
    engine = initialize(model(blocks, width), Plan.of(values), _mean)
    return lambda inputs, targets: engine.train_batch([(inputs, targets)])


def torch_step(blocks: int, width: int, sharded: bool) -> Any:
    """DDP, or FSDP2 with a unit for each block; torch's fused AdamW."""
    net: nn.Module = model(blocks, width)
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in net.children():
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    else:
        net = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.0, fused=True)

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = _mean(net(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        return float(mean)

    return step


def compared(
    rank: int, world: int, names: tuple[str, str], blocks: int, width: int, rows: int, pairs: int
) -> list[Pair]:
    """Times of both, measured in turns; the first of a pair changes from pair to pair."""
    steps = [
        native(blocks, width, int(name[-1]))
        if name.startswith("zero")
        else torch_step(blocks, width, name == "fsdp2")
        for name in names
    ]
    generator = torch.Generator().manual_seed(rank)
    data = tuple(torch.randn(rows, width, generator=generator) for _ in range(2))
    losses = [[step(*data) for _ in range(3)] for step in steps]
    assert torch.allclose(torch.tensor(losses[0]), torch.tensor(losses[1]) / world, rtol=1e-4), (
        losses
    )
    found = []
    for pair in range(pairs):
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        times = {index: timed(steps[index], data, 1) for index in order}
        found.append((times[0], times[1]))
    return found


def main() -> None:
    """Print one row for each comparison."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=512, help="tokens a rank")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--only", default="", help="compare only names that contain this")
    given = parser.parse_args()
    pool = Pool(RANKS)
    print(
        line(
            (
                "blocks",
                "engine",
                "beside",
                "engine",
                "other",
                "wall time",
                "processor time",
                "bound",
            )
        ),
        flush=True,
    )
    for ours, theirs, blocks, bound in BOUNDS:
        if given.only in f"{ours} {theirs} {blocks}":
            found = pool.run(
                compared,
                (ours, theirs),
                blocks,
                given.width,
                given.rows,
                given.pairs,
                timeout=TIMEOUT,
            )[0]
            print(row(blocks, ours, theirs, bound, found), flush=True)
    pool.close()


def row(blocks: int, ours: str, theirs: str, bound: float | None, found: list[Pair]) -> str:
    """One line of the table."""
    cells = [str(blocks), ours, theirs]
    cells += [
        f"{sorted(pair[index].wall for pair in found)[len(found) // 2] * 1e3:.0f} ms"
        for index in (0, 1)
    ]
    for kind in ("wall", "processor"):
        each = ratios(found, kind)
        cells.append(f"{each[len(each) // 2]:.2f} ({each[0]:.2f} to {each[-1]:.2f})")
    return line([*cells, "" if bound is None else f"{bound:.2f}"])


if __name__ == "__main__":
    main()
