"""Trains five steps of a small model under torchrun: by DeepSpeed's own engine, or by accelerate on FSDP 2.

    torchrun --nproc-per-node 2 tests/engine/fsdp2_steps.py deepspeed FILE.json
    torchrun --nproc-per-node 2 tests/engine/fsdp2_steps.py accelerate FILE.yaml FILE.arguments.json

The first rank prints the losses, as JSON. accelerate has no FSDP on a CPU and would run DDP without a word, so its type
of run is set by hand.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

WIDTH, STEPS = 16, 5


class Block(nn.Module):
    """A layer that FSDP wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` (batch, WIDTH) with what the layer adds."""
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    """Two layers and a head."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the outputs for inputs (batch, WIDTH)."""
        for layer in self.layers:
            x = layer(x)
        return (self.head(x) - 1).square().mean()


def microbatches(micro: int, count: int) -> Iterator[torch.Tensor]:
    """Yield this rank's inputs of all steps."""
    drawn = torch.Generator().manual_seed(int(os.environ["RANK"]) + 1)
    for _ in range(STEPS * count):
        yield torch.randn(micro, WIDTH, generator=drawn)


def run_deepspeed(file: Path) -> list[float]:
    """Return the mean loss of each step on DeepSpeed's engine."""
    import deepspeed

    config = json.loads(file.read_text())
    model = Model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    losses, count = list[float](), config["gradient_accumulation_steps"]
    for x in microbatches(config["train_micro_batch_size_per_gpu"], count):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return _average(losses, count)


def run_accelerate(file: Path, arguments: Path) -> list[float]:
    """Return the mean loss of each step under accelerate, by a config file and arguments of the Trainer."""
    import yaml
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    config, own = yaml.safe_load(file.read_text()), json.loads(arguments.read_text())
    assert config["distributed_type"] == "FSDP"
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    os.environ["ACCELERATE_MIXED_PRECISION"] = config["mixed_precision"]
    os.environ |= {name.upper(): str(value) for name, value in config["fsdp_config"].items()}

    def choose(self: Any, *_: Any, **__: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    def place(self: Any) -> None:
        self.device = torch.device("cpu")

    with (
        patch.object(PartialState, "_prepare_backend", choose),
        patch.object(PartialState, "set_device", place),
    ):
        accelerator = Accelerator(gradient_accumulation_steps=own["gradient_accumulation_steps"])
    assert accelerator.distributed_type is DistributedType.FSDP
    model = Model()
    betas = (own["adam_beta1"], own["adam_beta2"])
    rate, rest = own["learning_rate"], (own["adam_epsilon"], own["weight_decay"])
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas, *rest)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert type(model).__name__.startswith("FSDP"), type(model)
    losses, count = list[float](), own["gradient_accumulation_steps"]
    for x in microbatches(own["per_device_train_batch_size"], count):
        with accelerator.accumulate(model):
            loss = model(x)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), own["max_grad_norm"])
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return _average(losses, count)


def _average(losses: list[float], count: int) -> list[float]:
    """Return the mean over microbatches and ranks, for each step."""
    total = torch.tensor(losses).view(STEPS, count).mean(1)
    torch.distributed.all_reduce(total)
    return [one / torch.distributed.get_world_size() for one in total.tolist()]


if __name__ == "__main__":
    name, *files = sys.argv[1:]
    found = {"deepspeed": run_deepspeed, "accelerate": run_accelerate}[name](*map(Path, files))
    if os.environ["RANK"] == "0":
        print(json.dumps(found))
    # Threads of gloo that are left could abort the process when the interpreter ends.
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
