"""Train on Megatron-Core itself what a file of its flags says, on GPUs or on CPU; flags behind the file win over those in it.

    torchrun --nproc-per-node 2 examples/megatron/train.py examples/megatron/tiny.args
    torchrun --nproc-per-node 4 examples/megatron/train.py examples/megatron/tiny.args --pipeline-model-parallel-size 2

Prints one line of JSON for each step. The weights and the text are those that `stagebridge train` starts from.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from bridge.engine.data import Text
from bridge.engine.interface import Trainer
from compat.megatron.dialect import DIALECT
from compat.megatron.runtime.backend import BACKEND, workload


def main(file: str, *more: str) -> None:
    """Train `train_iters` steps."""
    words = [*shlex.split(Path(file).read_text(encoding="utf-8"), comments=True), *more]
    config = DIALECT.read(words, BACKEND.release, int(os.environ.get("WORLD_SIZE", "1")))
    trained = workload(config)
    trainer, text = BACKEND.open(config, trained), Text.of(None, trained.architecture.sequence)
    for number in range(config.effective["train_iters"]):
        step = trainer.train_batch(microbatches(text, trainer, number))
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps({"step": number + 1, **asdict(step)}), flush=True)
    trainer.close()


def microbatches(text: Text, trainer: Trainer, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets of this data rank's microbatches."""
    (rank, ranks), rows = trainer.data, trainer.micro
    for index in range(step * trainer.accumulation, (step + 1) * trainer.accumulation):
        first = (index * ranks + rank) * rows
        tokens = torch.stack([text.sample(first + row) for row in range(rows)])
        yield tokens[:, :-1], tokens[:, 1:]


if __name__ == "__main__":
    main(*sys.argv[1:])
