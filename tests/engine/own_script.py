"""A training script as a user writes it, run under a launcher; in the end it says which workers of process groups are left."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

import torch
from torch import nn

import bridge.engine
from bridge.plan.plan import Plan

WORKER = "runloop"
"""Part of the name of threads that let go of Python's objects, and so must end before the interpreter does."""


def say() -> None:
    """Print what is left."""
    names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    print(f"rank {os.environ['RANK']}: {[name for name in names if WORKER in name]}", flush=True)


def main() -> None:
    """Three steps, and no word to the engine that they were the last."""
    atexit.register(say)  # registered before the engine's own, it runs after that
    plan = Plan.of({"zero.stage": 2, "batch.accumulation": 2})
    engine = bridge.engine.initialize(
        [nn.Linear(4, 4), nn.Linear(4, 4)], plan, nn.functional.mse_loss
    )
    for _ in range(3):
        engine.train_batch([(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(2)])


if __name__ == "__main__":
    main()
