"""A training step of the native engine on two ranks, as a ratio to DeepSpeed's, FSDP2's, DDP's, DTensor's and
torch's pipelines.

Prints the table of README.md, row by row.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the same steps that the tests compare

from bridge.engine.models.gpt import Architecture
from tests.engine.oracles import (
    BUILDERS,
    WHOLE_BATCH,
    Builder,
    Step,
    Task,
    batch_of,
    deepspeed,
    deepspeed_piped,
)
from tests.engine.pool import Pool

RANKS = 2
SEQUENCE, SEQUENCES = 256, 8
"""2,048 tokens a rank. Tensor ranks share the tokens of both, with half of the weights each."""
WIDTHS = (256, 512)
WARMUP = 1
TIMEOUT = 900.0
BOUNDS = (
    *((f"native zero {level}", f"deepspeed zero {level}", 1.0) for level in (1, 2, 3)),
    ("native zero 2", "fsdp2 whole until backward", 1.0),
    ("native zero 3", "fsdp2", 1.0),
    ("native zero 0", "ddp", 1.05),
    ("native zero 1", "ddp", 1.05),
    ("native tensor", "dtensor", 0.9),
    ("native 1f1b", "torch 1f1b", 1.0),
    ("native 1f1b", "deepspeed 1f1b", 1.0),
)
"""What is compared with what, and the largest ratio wanted."""
TITLES = {
    **{f"native zero {level}": f"ZeRO {level}" for level in range(4)},
    **{f"deepspeed zero {level}": f"DeepSpeed ZeRO {level}" for level in range(4)},
    "native tensor": "tensor",
    "fsdp2 whole until backward": "FSDP2, not resharded",
    "fsdp2": "FSDP2",
    "ddp": "DDP",
    "dtensor": "DTensor",
    "native 1f1b": "1F1B",
    "torch 1f1b": "torch pipelining, 1F1B",
    "deepspeed 1f1b": "DeepSpeed PipelineModule",
}
COLUMNS = ("width", "engine", "beside", "engine", "other", "wall time", "processor time", "bound")


@dataclass(frozen=True)
class Time:
    """Seconds a step: wall time, and processor time of all threads of one rank, which other programs hardly change."""

    wall: float
    processor: float


Pair = tuple[Time, Time]


def builder(name: str) -> Builder:
    """As in the tests, but DeepSpeed with the optimizer that it takes by default, compiled on first use."""
    if name == "deepspeed 1f1b":
        return deepspeed_piped
    return (
        partial(deepspeed, level=int(name[-1])) if name.startswith("deepspeed") else BUILDERS[name]
    )


def timed(step: Step, data: tuple[torch.Tensor, torch.Tensor], number: int) -> Time:
    """Time of one of `number` steps in a row, which all ranks start together."""
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(number):
        step(*data)
    return Time((time.perf_counter() - wall) / number, (time.process_time() - processor) / number)


def compared(
    rank: int, world: int, ours: str, theirs: str, task: Task, pairs: int, number: int
) -> list[Pair]:
    """Times of both, measured in turns; the first of a pair changes from pair to pair."""
    gc.collect()
    steps, data = [], []
    for name in (ours, theirs):
        place, places = (0, 1) if name in WHOLE_BATCH else (rank, world)
        steps.append(builder(name)(task))
        data.append(batch_of(task, 0, place, places))
        timed(steps[-1], data[-1], WARMUP)
    found = []
    for pair in range(pairs):
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        times = {index: timed(steps[index], data[index], number) for index in order}
        found.append((times[0], times[1]))
    return found


def task_of(width: int) -> Task:
    """Two blocks of `width`, with gradient clipping as is usual."""
    shape = Architecture(
        layers=2, hidden=width, heads=8, kv_heads=8, ffn=4 * width, sequence=SEQUENCE, tied=False
    )
    return Task(shape, batch=SEQUENCES * RANKS, lr=1e-3, eps=1e-8, clip=1.0)


def ratios(found: Iterable[Pair], kind: str) -> list[float]:
    """Ours to theirs of each pair, in increasing order; `kind` names a field of `Time`."""
    return sorted(getattr(ours, kind) / getattr(theirs, kind) for ours, theirs in found)


def row(width: int, ours: str, theirs: str, bound: float, found: list[Pair]) -> str:
    """One line of a table: median milliseconds of both, then wall and processor time as ratios with their spread."""
    times = [
        f"{statistics.median(pair[index].wall for pair in found) * 1e3:.0f} ms" for index in (0, 1)
    ]
    cells = [str(width), TITLES[ours], TITLES[theirs], *times]
    for kind in ("wall", "processor"):
        sorted_ = ratios(found, kind)
        cells.append(f"{statistics.median(sorted_):.2f} ({sorted_[0]:.2f} to {sorted_[-1]:.2f})")
    return line([*cells, f"{bound:.2f}"])


def line(cells: Iterable[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print one row for each comparison."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1, help="steps in one measurement")
    parser.add_argument("--width", type=int, choices=WIDTHS, action="append")
    parser.add_argument("--only", default="", help="compare only with names that contain this")
    given = parser.parse_args()
    start = time.perf_counter()
    print(line(COLUMNS), line("---" for _ in COLUMNS).replace(" ", ""), sep="\n", flush=True)
    for width in given.width or WIDTHS:
        pool = Pool(
            RANKS
        )  # new ranks: DeepSpeed's pipeline leaves its own grid of ranks behind, which its ZeRO trips over
        for ours, theirs, bound in BOUNDS:
            if given.only in (ours + " " + theirs):
                arguments = (ours, theirs, task_of(width), given.pairs, given.steps)
                found = pool.run(compared, *arguments, timeout=TIMEOUT)[0]
                print(row(width, ours, theirs, bound, found), flush=True)
        pool.close()
    print(
        f"\n{time.perf_counter() - start:.0f} s; load at the end {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
