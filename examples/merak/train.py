"""A script in Merak's words: a small Llama over two pipeline stages, in under a minute on a CPU.

    torchrun --nproc-per-node 2 examples/merak/train.py --output_dir out --max_steps 10 \\
        --gradient_accumulation_steps 4 --learning_rate 0.01 --use_cpu True

Only the imports differ from a script for Merak itself: `import compat.merak as Merak` instead of `import Merak`.
"""

from __future__ import annotations

import os

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, set_seed

import compat.merak as Merak
from compat.merak import MerakArguments, MerakTrainer


class Counting(torch.utils.data.Dataset):
    """Rows of numbers that count up; the labels are the next ones."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(33) * (index % 7 + 1) + index) % 64
        return {"input_ids": row[:-1], "labels": row[1:]}


def main() -> None:
    """Train on as many pipeline stages as ranks were started."""
    Merak.init(pp=int(os.environ.get("WORLD_SIZE", "1")), tp=1, dp=1)
    (arguments,) = HfArgumentParser(MerakArguments).parse_args_into_dataclasses()
    arguments.num_train_epochs, arguments.logging_steps = 1, 1
    set_seed(arguments.seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    MerakTrainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Counting()).train()


if __name__ == "__main__":
    main()
