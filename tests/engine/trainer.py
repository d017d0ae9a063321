"""A script of transformers' Trainer: `python trainer.py FOLDER LEVEL` trains the small Llama of FOLDER/first at that
level of ZeRO, saves into FOLDER, and goes on from there; it prints losses, gradient norms and learning rates of
each step as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

SAMPLES, TOKENS = 20, 12


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of tokens, each with its labels."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(3, 64, (SAMPLES, TOKENS), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def config_of(level: int) -> dict[str, Any]:
    """A config in which everything that can be is left to the arguments."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": level, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
    }


def write_first(folder: Path) -> None:
    """Write the model that training begins with."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))
    model.save_pretrained(str(folder / "first"))


def generated(model: Any) -> list[list[int]]:
    """The tokens that a model goes on with."""
    ids = Rows().rows[:2, :4]
    found: list[list[int]] = model.generate(ids, max_new_tokens=4, do_sample=False).tolist()
    return found


def trainer(folder: Path, level: int | None, world: int) -> Trainer:
    """The trainer; without a level it is plain transformers in one process, with the batches of all ranks. The model is
    made after the arguments, which is how transformers knows that it is for ZeRO 3.
    """
    arguments = TrainingArguments(
        output_dir=str(folder / ("alone" if level is None else "out")),
        per_device_train_batch_size=2 * (1 if level is not None else world),
        gradient_accumulation_steps=2,
        max_steps=6,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        warmup_steps=2,
        max_grad_norm=0.5,
        weight_decay=0.1,
        logging_steps=1,
        save_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        deepspeed=None if level is None else config_of(level),
    )
    model = AutoModelForCausalLM.from_pretrained(str(folder / "first"))
    return Trainer(model=model, args=arguments, train_dataset=Rows())


def logged(run: Trainer) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and learning rate of each step."""
    return [
        (line["loss"], line["grad_norm"], line["learning_rate"])
        for line in run.state.log_history
        if "loss" in line
    ]


def main(folder: Path, level: int) -> None:
    """Train, generate, save, and resume; the first rank prints."""
    run = trainer(folder, level, 2)
    run.train()
    found = {"steps": logged(run), "evaluated": run.evaluate(Rows())["eval_loss"]}
    found["generated"] = generated(run.model)
    run.save_model(str(folder / "saved"))
    other = trainer(folder, level, 2)
    other.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-4"))
    found["resumed"] = logged(other)
    if run.is_world_process_zero():
        print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
