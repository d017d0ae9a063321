"""Scripts of transformers' Trainer, accelerate, peft and trl as people write them, on DeepSpeed itself and on the drop-in:
nothing but what `import deepspeed` finds differs.

`python -m tests.engine.trainer_scripts [--ranks N] [NAME ...]` runs each at ZeRO 0 to 3 on both, and prints a table: the
largest difference of numbers and of final weights, or what was refused.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bridge.errors import BridgeError
from bridge.stack.rules import Effect

THEIRS, OURS = "deepspeed", "drop-in"
LEVELS = (0, 1, 2, 3)
PATIENCE = 600
"""Seconds that a script may take."""
WEIGHTY = f"({Effect.NUMBERS.value})"
"""How a warning ends that names a difference of numbers."""
RANKED = ("equal", "refused", "named", "DeepSpeed stops", "both stop", "differs", "traceback")
"""What can come of a script, the best first."""
IMPORTS = (
    "accelerate",
    "transformers.trainer",
    "transformers.trainer_seq2seq",
    "transformers.integrations.deepspeed",
    "transformers.models.llama.modeling_llama",
    "transformers.models.bert.modeling_bert",
    "transformers.generation.utils",
    "peft",
    "datasets",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
)
BEHIND = {
    THEIRS: ("torch._inductor.compile_fx", "deepspeed.module_inject"),
    OURS: ("compat.deepspeed.runtime.engine", "bridge.engine.beginning"),
}
"""What an engine imports once it begins."""
TOLERANCE = 2e-5
"""Largest difference of what a script sees, relative to the largest value of each list."""
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2**-7}
"""Largest difference of a final weight, relative to the largest of its tensor: rounding that went through Adam, whose step has
the same size for a gradient of any size; and two units of bf16.
"""
SCRIPTS: dict[str, Callable[[Run], None]] = {}
NEEDS: dict[str, tuple[str, ...]] = {}
"""Packages that a script needs beside transformers and accelerate."""


@dataclass
class Run:
    """What a script is told, and what it hands back: numbers by name, and final weights."""

    folder: Path
    level: int
    numbers: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def config(self, **more: Any) -> dict[str, Any]:
        """A config in which everything that can be is left to the arguments."""
        section = {"stage": self.level, "stage3_gather_16bit_weights_on_model_save": True}
        return {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": section,
            "zero_allow_untested_optimizer": True,
            **more,
        }

    def arguments(self, kind: Any = None, **more: Any) -> Any:
        """Arguments of a short run, which is how transformers learns of ZeRO 3."""
        from transformers import TrainingArguments

        usual = {
            "output_dir": str(self.folder / "out"),
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": 4,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "linear",
            "warmup_steps": 2,
            "max_grad_norm": 0.5,
            "weight_decay": 0.1,
            "adam_epsilon": 1e-5,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "deepspeed": self.config(),
        }
        return (kind or TrainingArguments)(**{**usual, **more})

    def pretrained(self, name: str = "llama", kind: Any = None) -> Any:
        """A small model of a folder."""
        from transformers import AutoModelForCausalLM

        return (kind or AutoModelForCausalLM).from_pretrained(str(self.folder.parent / name))

    def log(self, trainer: Any, name: str = "log") -> None:
        """Keep what a trainer logged: losses, norms, rates, results of evaluations."""
        timed = ("runtime", "per_second", "flos", "train_loss", "grad_norm")
        self.numbers[name] = [
            {key: value for key, value in line.items() if not key.endswith(timed)}
            for line in trainer.state.log_history
        ]
        norms = [line["grad_norm"] for line in trainer.state.log_history if line.get("grad_norm")]
        if self.level:  # DeepSpeed has none at ZeRO 0 in fp32
            self.numbers[f"{name}.norms"] = norms

    def keep(self, model: nn.Module) -> None:
        """Keep the whole weights."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            self.weights.update(
                (name, weight.detach().clone()) for name, weight in model.named_parameters()
            )

    def train(self, model: Any, arguments: Any = None, kind: Any = None, **more: Any) -> Any:
        """Train, and keep what came of it."""
        from transformers import Trainer

        given = {"train_dataset": Rows(), **more}
        trainer = (kind or Trainer)(model=model, args=arguments or self.arguments(), **given)
        trainer.train()
        self.log(trainer)
        self.keep(trainer.model)
        return trainer


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of words, each with its labels."""

    def __init__(
        self, number: int = 24, length: int = 10, first: int = 0, short: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(first + 1)
        self.rows = torch.randint(3, 64, (number, length), generator=generator)
        self.short = short

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        row = row[: len(row) - index % 4] if self.short else row
        return {"input_ids": row, "labels": row}


class Classes(Rows):
    """Rows of words, each with its class."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 3}


def write_models(folder: Path) -> None:
    """Write the models that scripts begin with."""
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    bert = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    gpt2 = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    models = {
        "llama": lambda: LlamaForCausalLM(llama()),
        "bert": lambda: BertForMaskedLM(BertConfig(**bert)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, **gpt2)
        ),
        "t5": lambda: T5ForConditionalGeneration(
            T5Config(
                vocab_size=64,
                d_model=32,
                d_kv=8,
                d_ff=48,
                num_layers=2,
                num_heads=4,
                dropout_rate=0.0,
                decoder_start_token_id=0,
            )
        ),
    }
    for name, make in models.items():
        torch.manual_seed(0)
        make().save_pretrained(str(folder / name))


def llama() -> Any:
    """The config of a small Llama."""
    from transformers import LlamaConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaConfig(**sizes, **heads, use_cache=False)


def script(*needs: str) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """List a script, with the packages that it needs."""

    def enter(function: Callable[[Run], None]) -> Callable[[Run], None]:
        SCRIPTS[function.__name__] = function
        NEEDS[function.__name__] = needs
        return function

    return enter


# The Trainer


@script()
def from_pretrained(run: Run) -> None:
    arguments = run.arguments()
    run.train(run.pretrained(), arguments)


@script()
def from_config(run: Run) -> None:
    from transformers import AutoModelForCausalLM, set_seed

    arguments = run.arguments()
    set_seed(5)
    run.train(AutoModelForCausalLM.from_config(llama()), arguments)


@script()
def model_by_its_class(run: Run) -> None:
    from transformers import LlamaForCausalLM, set_seed

    set_seed(5)
    model = LlamaForCausalLM(llama())
    run.train(model, run.arguments())


@script()
def model_init(run: Run) -> None:
    from transformers import Trainer

    arguments = run.arguments()
    trainer = Trainer(model_init=lambda: run.pretrained(), args=arguments, train_dataset=Rows())
    trainer.train()
    run.log(trainer)
    run.keep(trainer.model)


@script()
def gpt2_tied(run: Run) -> None:
    arguments = run.arguments()
    run.train(run.pretrained("gpt2"), arguments)


@script()
def masked_words(run: Run) -> None:
    from transformers import AutoModelForMaskedLM

    class Masked(Rows):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            row = self.rows[index]
            hidden = torch.arange(len(row)) % 5 == index % 5
            return {
                "input_ids": row.masked_fill(hidden, 2),
                "labels": row.masked_fill(~hidden, -100),
            }

    arguments = run.arguments()
    run.train(run.pretrained("bert", AutoModelForMaskedLM), arguments, train_dataset=Masked())


@script()
def classification(run: Run) -> None:
    from transformers import AutoModelForSequenceClassification, set_seed

    arguments = run.arguments(eval_strategy="steps", eval_steps=2)
    set_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(
        str(run.folder.parent / "bert"), num_labels=3
    )

    def right(found: Any) -> dict[str, float]:
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    more = {"train_dataset": Classes(), "eval_dataset": Classes(6, first=9)}
    run.train(model, arguments, compute_metrics=right, **more)


@script()
def evaluation_each_epoch(run: Run) -> None:
    arguments = run.arguments(max_steps=-1, num_train_epochs=2, eval_strategy="epoch")
    run.train(run.pretrained(), arguments, eval_dataset=Rows(6, first=9), train_dataset=Rows(10))


@script()
def best_model(run: Run) -> None:
    arguments = run.arguments(
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        save_total_limit=1,
        learning_rate=0.1,
    )
    run.train(run.pretrained(), arguments, eval_dataset=Rows(6, first=9))


@script()
def save_and_resume(run: Run) -> None:
    arguments = run.arguments(save_strategy="steps", save_steps=2, save_total_limit=2)
    run.train(run.pretrained(), arguments)
    from transformers import Trainer

    other = Trainer(model=run.pretrained(), args=run.arguments(), train_dataset=Rows())
    other.train(resume_from_checkpoint=str(run.folder / "out" / "checkpoint-2"))
    run.log(other, "resumed")
    run.weights = {}
    run.keep(other.model)


@script()
def resume_in_an_epoch(run: Run) -> None:
    from transformers import Trainer

    more = {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3}
    run.train(run.pretrained(), run.arguments(**more), train_dataset=Rows(18))
    arguments = run.arguments(**more)
    other = Trainer(model=run.pretrained(), args=arguments, train_dataset=Rows(18))
    other.train(resume_from_checkpoint=True)
    run.log(other, "resumed")


@script()
def save_model(run: Run) -> None:
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    arguments = run.arguments()
    trainer = run.train(run.pretrained(), arguments)
    trainer.save_model(str(run.folder / "saved"))
    dist.barrier()
    unset()
    saved = AutoModelForCausalLM.from_pretrained(str(run.folder / "saved"))
    run.numbers["saved"] = {
        name: weight.double().sum() for name, weight in saved.state_dict().items()
    }


@script()
def generation(run: Run) -> None:
    trainer = run.train(run.pretrained(), run.arguments())
    ids = Rows(first=4).rows[:2, :4]
    more = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    with torch.no_grad():
        run.numbers["generated"] = trainer.model.generate(
            ids, synced_gpus=run.level == 3, **more
        ).tolist()


@script()
def predict_with_generate(run: Run) -> None:
    from transformers import AutoModelForSeq2SeqLM, Seq2SeqTrainer, Seq2SeqTrainingArguments

    arguments = run.arguments(
        Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=6
    )

    class Pairs(Rows):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            row = self.rows[index]
            return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.flip(0)}

    model = run.pretrained("t5", AutoModelForSeq2SeqLM)
    trainer = run.train(model, arguments, Seq2SeqTrainer, train_dataset=Pairs())
    found = trainer.predict(Pairs(4, first=9))
    run.numbers["predicted"] = found.predictions.tolist()
    run.numbers["predicted loss"] = found.metrics["test_loss"]


@script()
def prediction(run: Run) -> None:
    trainer = run.train(run.pretrained(), run.arguments())
    run.numbers["logits"] = torch.tensor(trainer.predict(Rows(6, first=9)).predictions)


@script()
def compute_loss(run: Run) -> None:
    from transformers import Trainer

    class Own(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            flat = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            loss = nn.functional.cross_entropy(*flat) + 1e-3 * outputs.logits.square().mean()
            return (loss, outputs) if return_outputs else loss

    run.train(run.pretrained(), run.arguments(), Own)


@script()
def compute_loss_func(run: Run) -> None:
    def own(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        flat = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total = nn.functional.cross_entropy(*flat, reduction="sum")
        return total / (num_items_in_batch or labels.numel())

    run.train(run.pretrained(), run.arguments(), compute_loss_func=own)


@script()
def label_smoothing(run: Run) -> None:
    run.train(run.pretrained(), run.arguments(label_smoothing_factor=0.1))


@script()
def training_step(run: Run) -> None:
    from transformers import Trainer

    class Own(Trainer):
        def training_step(self, model: Any, inputs: Any, *more: Any) -> Tensor:
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs)) * 0.5
            self.accelerator.backward(loss)
            return loss.detach() / self.args.gradient_accumulation_steps

    run.train(run.pretrained(), run.arguments(), Own)


@script()
def callbacks(run: Run) -> None:
    from transformers import TrainerCallback

    seen: list[Any] = []

    class Watch(TrainerCallback):
        def on_step_end(
            self, args: Any, state: Any, control: Any, model: Any = None, **more: Any
        ) -> Any:
            import deepspeed

            weight = model.get_output_embeddings().weight
            with deepspeed.zero.GatheredParameters([weight]):
                seen.append(float(weight.detach().norm()))
            control.should_training_stop = state.global_step == 3
            control.should_evaluate = state.global_step == 2
            return control

        def on_optimizer_step(
            self, args: Any, state: Any, control: Any, optimizer: Any = None, **more: Any
        ) -> None:
            seen.append([group["lr"] for group in optimizer.param_groups])

    model, arguments = run.pretrained(), run.arguments()
    run.train(model, arguments, callbacks=[Watch()], eval_dataset=Rows(4, first=9))
    run.numbers["seen"] = seen


@script()
def early_stopping(run: Run) -> None:
    from transformers import EarlyStoppingCallback

    arguments = run.arguments(
        max_steps=8,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        learning_rate=0.3,
    )
    more = {"callbacks": [EarlyStoppingCallback(2)], "eval_dataset": Rows(4, first=9)}
    run.train(run.pretrained(), arguments, **more)


@script()
def iterable_data(run: Run) -> None:
    class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            yield from map(Rows().__getitem__, range(24))

    run.train(run.pretrained(), run.arguments(), train_dataset=Stream())


@script()
def padded_rows(run: Run) -> None:
    def pad(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        sequences = [row["input_ids"] for row in rows]
        padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        kept = nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in sequences], True)
        labels = padded.masked_fill(kept == 0, -100)
        return {"input_ids": padded, "attention_mask": kept, "labels": labels}

    more = {"train_dataset": Rows(short=True), "data_collator": pad}
    run.train(run.pretrained(), run.arguments(), **more)


@script()
def own_optimizer_and_schedule(run: Run) -> None:
    arguments, model = run.arguments(), run.pretrained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
    run.train(model, arguments, optimizers=(optimizer, schedule))


@script()
def optimizer_class(run: Run) -> None:
    more = {"optimizer_cls_and_kwargs": (torch.optim.Adam, {"lr": 3e-3, "eps": 1e-5})}
    run.train(run.pretrained(), run.arguments(), **more)


@script()
def sgd_by_name(run: Run) -> None:
    run.train(run.pretrained(), run.arguments(optim="sgd", learning_rate=0.1))


@script()
def adafactor(run: Run) -> None:
    run.train(run.pretrained(), run.arguments(optim="adafactor"))


@script()
def rates_by_layer(run: Run) -> None:
    from transformers import Trainer

    class Own(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            groups: dict[bool, list[Any]] = {True: [], False: []}
            for name, weight in self.model.named_parameters():
                groups["embed" in name].append(weight)
            found = [
                {"params": groups[True], "lr": 1e-3, "weight_decay": 0.0},
                {"params": groups[False], "lr": 1e-2, "weight_decay": 0.2},
            ]
            self.optimizer = torch.optim.AdamW(found, eps=1e-5)
            return self.optimizer

    run.train(run.pretrained(), run.arguments(), Own)


@script()
def schedule_by_arguments(run: Run) -> None:
    more = {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}}
    run.train(run.pretrained(), run.arguments(max_steps=6, **more))


@script()
def schedule_of_defaults(run: Run) -> None:
    """A schedule that reads the optimizer's `defaults`, which DeepSpeed's own do not have under ZeRO."""
    more = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}}
    run.train(run.pretrained(), run.arguments(max_steps=6, **more))


@script()
def optimizer_of_the_file(run: Run) -> None:
    kinds = ("lr", "betas", "eps", "weight_decay")
    params = {**dict.fromkeys(kinds, "auto"), "torch_adam": True}
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    config = run.config(
        optimizer={"type": "AdamW", "params": params},
        scheduler={"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")},
    )
    run.train(run.pretrained(), run.arguments(deepspeed=config))


@script()
def buckets_auto(run: Run) -> None:
    section = {
        "stage": run.level,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
        "overlap_comm": False,
        "contiguous_gradients": True,
    }
    config = run.config(
        zero_optimization=section, train_batch_size="auto", bf16={"enabled": "auto"}
    )
    run.train(run.pretrained(), run.arguments(deepspeed=config))


@script()
def accumulation(run: Run) -> None:
    arguments = run.arguments(
        max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=4, max_grad_norm=0.0
    )
    run.train(run.pretrained(), arguments, train_dataset=Rows(22))


@script()
def clipping(run: Run) -> None:
    run.train(run.pretrained(), run.arguments(max_grad_norm=0.01, optim="sgd", learning_rate=1.0))


@script()
def gradient_checkpointing(run: Run) -> None:
    more = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    run.train(run.pretrained(), run.arguments(gradient_checkpointing=True, **more))


@script()
def dropout(run: Run) -> None:
    """Random numbers of dropout, and after them those of the next epoch's order."""
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    arguments = run.arguments(max_steps=-1, num_train_epochs=2)
    set_seed(4)
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    run.train(GPT2LMHeadModel(GPT2Config(**sizes)), arguments, train_dataset=Rows(10))


@script()
def reentrant_checkpointing(run: Run) -> None:
    more = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    arguments = run.arguments(gradient_checkpointing=True, **more)
    run.train(run.pretrained(), arguments)


@script()
def bf16(run: Run) -> None:
    config = run.config(bf16={"enabled": "auto"})
    run.train(run.pretrained(), run.arguments(bf16=True, deepspeed=config))


@script()
def frozen_parts(run: Run) -> None:
    arguments, model = run.arguments(), run.pretrained()
    model.get_input_embeddings().weight.requires_grad_(False)
    for weight in model.model.layers[0].parameters():
        weight.requires_grad_(False)
    run.train(model, arguments)


@script()
def more_words(run: Run) -> None:
    from transformers import set_seed

    arguments, model = run.arguments(), run.pretrained()
    set_seed(5)
    model.resize_token_embeddings(70, mean_resizing=False)
    run.train(model, arguments)


@script()
def teacher(run: Run) -> None:
    from transformers import Trainer

    unset()
    wise = run.pretrained().eval()

    class Own(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any
        ) -> Any:
            outputs = model(**inputs)
            with torch.no_grad():
                aim = wise(input_ids=inputs["input_ids"]).logits.softmax(-1)
            loss = outputs.loss - (aim * outputs.logits.log_softmax(-1)).sum(-1).mean()
            return (loss, outputs) if return_outputs else loss

    run.train(run.pretrained("llama"), run.arguments(), Own)


@script()
def two_trainers(run: Run) -> None:
    first = run.train(run.pretrained(), run.arguments())
    run.numbers["first"] = run.numbers.pop("log")
    run.train(first.model, run.arguments(max_steps=2, seed=3))


@script()
def dropped_last_batch(run: Run) -> None:
    arguments = run.arguments(max_steps=-1, num_train_epochs=2, dataloader_drop_last=True)
    run.train(run.pretrained(), arguments, train_dataset=Rows(13))


@script()
def grouped_by_length(run: Run) -> None:
    more = {"train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 1}
    run.train(run.pretrained(), run.arguments(**more), train_dataset=Rows(short=True))


@script()
def average_of_weights(run: Run) -> None:
    """An average of the weights that a callback keeps, by DeepSpeed's own way to whole weights."""
    from transformers import TrainerCallback

    mean: dict[str, Tensor] = {}

    class Average(TrainerCallback):
        def on_step_end(
            self, args: Any, state: Any, control: Any, model: Any = None, **more: Any
        ) -> None:
            from deepspeed.utils import safe_get_full_fp32_param

            for name, weight in model.named_parameters():
                whole = safe_get_full_fp32_param(weight)
                whole = weight if whole is None else whole
                kept = mean.setdefault(name, whole.detach().clone())
                kept.lerp_(whole.detach(), 0.3)

    run.train(run.pretrained(), run.arguments(), callbacks=[Average()])
    run.weights.update((f"mean.{name}", weight) for name, weight in mean.items())


# peft and trl


def adapted(model: Any, **more: Any) -> Any:
    """A model with LoRA adapters that already do something."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(11)
    usual = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    return get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **usual, **more}))


@script("peft")
def lora(run: Run) -> None:
    arguments = run.arguments()
    run.train(adapted(run.pretrained()), arguments)


@script("peft")
def lora_saved_and_merged(run: Run) -> None:
    import torch.distributed as dist
    from peft import PeftModel

    arguments = run.arguments()
    model = adapted(run.pretrained(), modules_to_save=["lm_head"])
    trainer = run.train(model, arguments)
    trainer.save_model(str(run.folder / "saved"))
    dist.barrier()
    unset()
    merged = PeftModel.from_pretrained(
        run.pretrained(), str(run.folder / "saved")
    ).merge_and_unload()
    run.numbers["merged"] = {
        name: weight.double().sum() for name, weight in merged.state_dict().items()
    }


@script("peft")
def lora_resumed(run: Run) -> None:
    from transformers import Trainer

    more = {"save_strategy": "steps", "save_steps": 2}
    arguments = run.arguments(**more)
    run.train(adapted(run.pretrained()), arguments)
    other = Trainer(model=adapted(run.pretrained()), args=run.arguments(), train_dataset=Rows())
    other.train(resume_from_checkpoint=str(run.folder / "out" / "checkpoint-2"))
    run.log(other, "resumed")


@script("peft")
def lora_checkpointed(run: Run) -> None:
    arguments = run.arguments(gradient_checkpointing=True)
    run.train(adapted(run.pretrained(), target_modules="all-linear"), arguments)


@script("peft")
def prompt_tuning(run: Run) -> None:
    from peft import PromptTuningConfig, get_peft_model

    arguments, model = run.arguments(), run.pretrained()
    torch.manual_seed(11)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    run.train(get_peft_model(model, config), arguments)


def tokenizer() -> Any:
    """A tokenizer of sixty-four words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(64)}
    made = Tokenizer(models.WordLevel(words, unk_token="w1"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="w0", unk_token="w1", eos_token="w2"
    )


def texts(number: int = 24, first: int = 0) -> list[str]:
    """Rows as text."""
    return [" ".join(f"w{int(word)}" for word in row) for row in Rows(number, first=first).rows]


def tuned(run: Run, more: Mapping[str, Any], **given: Any) -> None:
    """Supervised fine-tuning by trl."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = run.arguments(SFTConfig, max_length=16, bf16=False, **more)
    data = Dataset.from_dict({"text": texts()})
    given = {"processing_class": tokenizer(), **given}
    run.train(run.pretrained(), arguments, SFTTrainer, train_dataset=data, **given)


@script("trl", "datasets")
def sft(run: Run) -> None:
    tuned(run, {})


@script("trl", "datasets")
def sft_packed(run: Run) -> None:
    tuned(run, {"packing": True, "packing_strategy": "wrapped"})


@script("trl", "datasets", "peft")
def sft_lora(run: Run) -> None:
    from peft import LoraConfig

    torch.manual_seed(11)
    tuned(run, {}, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def preferred(run: Run, more: Mapping[str, Any], **given: Any) -> None:
    """Direct preference optimization by trl."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    arguments = run.arguments(DPOConfig, max_length=24, bf16=False, **more)
    rows = {"prompt": texts(), "chosen": texts(first=1), "rejected": texts(first=2)}
    given = {"processing_class": tokenizer(), **given}
    data = Dataset.from_dict(rows)
    run.train(run.pretrained(), arguments, DPOTrainer, train_dataset=data, **given)


@script("trl", "datasets")
def dpo(run: Run) -> None:
    preferred(run, {})


@script("trl", "datasets", "peft")
def dpo_lora(run: Run) -> None:
    from peft import LoraConfig

    torch.manual_seed(11)
    preferred(run, {}, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


@script("trl", "datasets")
def rewards(run: Run) -> None:
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, set_seed
    from trl import RewardConfig, RewardTrainer

    arguments = run.arguments(RewardConfig, max_length=16, bf16=False)
    set_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(
        str(run.folder.parent / "llama"), num_labels=1
    )
    model.config.pad_token_id = 0
    data = Dataset.from_dict({"chosen": texts(first=1), "rejected": texts(first=2)})
    run.train(model, arguments, RewardTrainer, train_dataset=data, processing_class=tokenizer())


# accelerate


class Perceptron(nn.Module):
    """A model of one's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 64)

    def forward(self, words: Tensor) -> Tensor:
        """Logits of the next words, (batch, sequence, 64)."""
        found = self.embed(words)
        for block in self.blocks:
            found = found + block(found).tanh()
        return self.head(found)


def accelerator(
    run: Run, accumulation: int = 1, clip: float | None = 0.5, micro: Any = "auto", **more: Any
) -> Any:
    """An accelerator with DeepSpeed's plugin."""
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    plugin = DeepSpeedPlugin(
        zero_stage=run.level,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=clip,
        zero3_init_flag=False,
        zero3_save_16bit_model=True,
    )
    plugin.deepspeed_config["zero_allow_untested_optimizer"] = True
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = micro
    # Without a device accelerate counts one process, unless it is told of a backend.
    backend = InitProcessGroupKwargs(backend="gloo")
    given = {"deepspeed_plugin": plugin, "kwargs_handlers": [backend], **more}
    return Accelerator(gradient_accumulation_steps=accumulation, **given)


def loader(number: int = 24, first: int = 0, shuffle: bool = False) -> Any:
    """Batches of two rows."""
    generator = torch.Generator().manual_seed(2)
    data = Rows(number, first=first)
    return torch.utils.data.DataLoader(data, 2, shuffle=shuffle, generator=generator)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """The optimizer of a loop."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.1)


def loop(run: Run, mine: Any, prepared: Sequence[Any], name: str = "losses") -> None:
    """The loop of every tutorial."""
    model, optimizer, data, *schedule = prepared
    losses = run.numbers.setdefault(name, [])
    model.train()
    for batch in data:
        with mine.accumulate(model):
            loss = model(**batch).loss
            mine.backward(loss)
            optimizer.step()
            for one in schedule:
                one.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))


@script()
def prepared_loop(run: Run) -> None:
    plain_loop(run, run.pretrained().train())


@script()
def in_eval_mode(run: Run) -> None:
    """The loop of a script that forgets `model.train()`, which a model of a folder needs."""
    plain_loop(run, run.pretrained())


def plain_loop(run: Run, model: Any) -> None:
    """A loop without accumulation."""
    mine = accelerator(run)
    model, optimizer, data = mine.prepare(model, adamw(model), loader())
    for batch in data:
        loss = model(**batch).loss
        mine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.numbers.setdefault("losses", []).append(float(loss.detach()))
    run.keep(mine.unwrap_model(model))


@script()
def accumulate(run: Run) -> None:
    mine, model = accelerator(run, 4), run.pretrained()
    prepared = mine.prepare(model, adamw(model), loader(20))
    loop(run, mine, prepared)
    loop(run, mine, prepared, "second epoch")
    run.keep(mine.unwrap_model(prepared[0]))


@script()
def accelerated_schedule(run: Run) -> None:
    from transformers import get_linear_schedule_with_warmup

    mine, model = accelerator(run, 2), run.pretrained()
    optimizer = adamw(model)
    schedule = get_linear_schedule_with_warmup(optimizer, 4, 24)
    prepared = mine.prepare(model, optimizer, loader(shuffle=True), schedule)
    loop(run, mine, prepared)
    run.numbers["rates"] = prepared[3].get_last_lr()
    run.keep(mine.unwrap_model(prepared[0]))


@script()
def clip_grad_norm(run: Run) -> None:
    mine, model = accelerator(run, 2, None), run.pretrained().train()
    model, optimizer, data = mine.prepare(model, adamw(model), loader())
    for batch in data:
        with mine.accumulate(model):
            loss = model(**batch).loss
            mine.backward(loss)
            if mine.sync_gradients:
                mine.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        run.numbers.setdefault("losses", []).append(float(loss.detach()))
    run.keep(mine.unwrap_model(model))


@script()
def no_clipping(run: Run) -> None:
    mine, model = accelerator(run, 1, None), run.pretrained()
    prepared = mine.prepare(model, adamw(model), loader())
    loop(run, mine, prepared)
    run.keep(mine.unwrap_model(prepared[0]))


@script()
def save_state_and_load_state(run: Run) -> None:
    from transformers import get_linear_schedule_with_warmup

    def begin() -> tuple[Any, Any]:
        mine, model = accelerator(run), run.pretrained()
        optimizer = adamw(model)
        schedule = get_linear_schedule_with_warmup(optimizer, 2, 24)
        return mine, mine.prepare(model, optimizer, loader(8), schedule)

    mine, prepared = begin()
    counter = torch.nn.Linear(1, 1)
    mine.register_for_checkpointing(counter)
    loop(run, mine, prepared)
    mine.save_state(str(run.folder / "state"))
    loop(run, mine, prepared, "later")
    mine.load_state(str(run.folder / "state"))
    loop(run, mine, prepared, "again")
    run.keep(mine.unwrap_model(prepared[0]))


@script()
def get_state_dict(run: Run) -> None:
    mine, model = accelerator(run), run.pretrained()
    prepared = mine.prepare(model, adamw(model), loader(8))
    loop(run, mine, prepared)
    state = mine.get_state_dict(prepared[0])
    if mine.is_main_process:
        run.weights.update((name, value.clone()) for name, value in state.items())
    mine.unwrap_model(prepared[0]).save_pretrained(
        str(run.folder / "saved"),
        is_main_process=mine.is_main_process,
        save_function=mine.save,
        state_dict=state,
    )
    mine.wait_for_everyone()
    from transformers import AutoModelForCausalLM

    unset()
    saved = AutoModelForCausalLM.from_pretrained(str(run.folder / "saved"))
    run.numbers["saved"] = {
        name: weight.double().sum() for name, weight in saved.state_dict().items()
    }


@script()
def gather_for_metrics(run: Run) -> None:
    mine, model = accelerator(run), run.pretrained()
    *prepared, held = mine.prepare(model, adamw(model), loader(8), loader(7, 9))
    loop(run, mine, prepared)
    prepared[0].eval()
    found = []
    for batch in held:
        with torch.no_grad():
            logits = prepared[0](**batch).logits
        found.append(mine.gather_for_metrics(logits.argmax(-1)))
    run.numbers["words"] = torch.cat(found).tolist()
    run.numbers["mean"] = mine.reduce(torch.tensor(run.numbers["losses"][-1:]), "mean")


@script()
def own_module(run: Run) -> None:
    mine, model = accelerator(run, 2), Perceptron()
    model, optimizer, data = mine.prepare(model, adamw(model), loader())
    for batch in data:
        with mine.accumulate(model):
            words = batch["input_ids"]
            logits = model(words[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            mine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        run.numbers.setdefault("losses", []).append(float(loss.detach()))
    run.keep(mine.unwrap_model(model))


@script()
def dummies_of_a_file(run: Run) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
    from accelerate.utils import DummyOptim, DummyScheduler

    params = {**dict.fromkeys(("lr", "weight_decay"), "auto"), "eps": 1e-5, "torch_adam": True}
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    config = run.config(
        optimizer={"type": "AdamW", "params": params},
        scheduler={"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")},
        gradient_clipping=0.5,
    )
    path = run.folder / f"ds_config{os.environ['RANK']}.json"
    path.write_text(json.dumps(config))
    plugin = DeepSpeedPlugin(hf_ds_config=str(path), gradient_accumulation_steps=2)
    backend = InitProcessGroupKwargs(backend="gloo")
    given = {"gradient_accumulation_steps": 2, "kwargs_handlers": [backend]}
    mine = Accelerator(deepspeed_plugin=plugin, **given)
    model = run.pretrained()
    optimizer = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = DummyScheduler(optimizer, total_num_steps=12, warmup_num_steps=2)
    prepared = mine.prepare(model, optimizer, loader(), schedule)
    loop(run, mine, prepared)
    run.keep(mine.unwrap_model(prepared[0]))


@script()
def skipped_batches(run: Run) -> None:
    mine, model = accelerator(run), run.pretrained()
    prepared = mine.prepare(model, adamw(model), loader(shuffle=True))
    rest = mine.skip_first_batches(prepared[2], 3)
    loop(run, mine, [prepared[0], prepared[1], rest])
    run.keep(mine.unwrap_model(prepared[0]))


@script()
def generated_between(run: Run) -> None:
    mine, model = accelerator(run), run.pretrained()
    prepared = mine.prepare(model, adamw(model), loader(8))
    ids = Rows(first=4).rows[:2, :4]
    for name in ("losses", "later"):
        loop(run, mine, prepared, name)
        prepared[0].eval()
        with torch.no_grad():
            words = mine.unwrap_model(prepared[0]).generate(
                ids,
                max_new_tokens=3,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
                synced_gpus=run.level == 3,
            )
        run.numbers[f"{name} words"] = words.tolist()
    run.keep(mine.unwrap_model(prepared[0]))


@script()
def two_models(run: Run) -> None:
    mine, model = accelerator(run), run.pretrained()
    judge = Perceptron()
    prepared = mine.prepare(model, adamw(model), loader(8))
    other = mine.prepare(judge, adamw(judge))
    loop(run, mine, prepared)
    del other


@script()
def zero_init(run: Run) -> None:
    """The plugin makes models in DeepSpeed's zero.Init, as accelerate's config does it."""
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    plugin = DeepSpeedPlugin(zero_stage=run.level, gradient_clipping=0.5, zero3_init_flag=True)
    plugin.deepspeed_config["zero_allow_untested_optimizer"] = True
    backend = InitProcessGroupKwargs(backend="gloo")
    mine = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[backend])
    model = run.pretrained()
    prepared = mine.prepare(model, adamw(model), loader())
    loop(run, mine, prepared)
    run.keep(mine.unwrap_model(prepared[0]))


@script()
def bf16_loop(run: Run) -> None:
    mine, model = accelerator(run, mixed_precision="bf16"), run.pretrained()
    prepared = mine.prepare(model, adamw(model), loader(12))
    loop(run, mine, prepared)
    run.keep(mine.unwrap_model(prepared[0]))


@script()
def data_of_ranks(run: Run) -> None:
    """Data that the script divides itself, with the micro batch size in the config."""
    mine, model = accelerator(run, micro=2), run.pretrained().train()
    model, optimizer = mine.prepare(model, adamw(model))
    for start in range(0, 12, 2):
        rows = Rows(first=mine.process_index).rows[start : start + 2]
        loss = model(input_ids=rows, labels=rows).loss
        mine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.numbers.setdefault("losses", []).append(float(loss.detach()))
    run.keep(mine.unwrap_model(model))


# Running them


def unset() -> None:
    """Forget the config of ZeRO 3, so that models are made whole."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def begin(whose: str) -> None:
    """Have `import deepspeed` find DeepSpeed itself, without its compiled collectives, or the drop-in; and import once what
    each script would import.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if whose == OURS:
        import compat.deepspeed

        compat.deepspeed.install()
    import deepspeed.ops

    if whose == THEIRS:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for name in (*IMPORTS, *BEHIND[whose]):
        if find_spec(name.partition(".")[0]):
            import_module(name)
    # accelerate collects garbage often, each time through all that was imported.
    gc.freeze()


def outcome(run: Run, name: str) -> dict[str, Any]:
    """What a script gives: its numbers and weights, `refused` with what to do, or `traceback`."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    run.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            SCRIPTS[name](run)
            # accelerate goes on without DeepSpeed where it is told of a CPU.
            assert AcceleratorState().distributed_type is DistributedType.DEEPSPEED
        except BridgeError as error:
            return {"refused": str(error)}
        except Exception as error:
            lines = traceback.format_exc().splitlines()
            return {"traceback": f"{type(error).__name__}: {error}"[:400], "lines": lines[-40:]}
    named = [str(one.message) for one in caught if WEIGHTY in str(one.message)]
    return {"numbers": run.numbers, "weights": run.weights, "named": named}


def rank_of(whose: str, level: int, folder: Path, name: str, shared: Mapping[str, str]) -> None:
    """One rank of a script, in a process of its own: write what it gives."""
    os.environ.update(shared)
    run = Run(folder / f"{whose}{level}{name}", level)
    with (folder / f"{whose}{level}{name}.{shared['RANK']}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        torch.save(outcome(run, name), folder / f"{whose}{level}{name}.{shared['RANK']}.pt")
    os._exit(0)


def run_all(whose: str, ranks: int, folder: Path, cases: Sequence[str]) -> None:
    """Run scripts (`LEVEL:NAME`) one after the other, each in processes that begin after the imports."""
    from tests.engine.pool import free_port

    begin(whose)
    spawn = multiprocessing.get_context("fork")
    for case in cases:
        level, _, name = case.partition(":")
        port = str(free_port())
        processes = []
        for rank in map(str, range(ranks)):
            shared = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port, **places(ranks)}
            given = (whose, int(level), folder, name, shared)
            processes.append(spawn.Process(target=rank_of, args=given))
        for process in processes:
            process.start()
        for process in processes:
            process.join(PATIENCE)
            if process.is_alive():
                process.kill()


def places(ranks: int) -> dict[str, str]:
    """What a launcher says to each rank."""
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(ranks))
    return {"MASTER_ADDR": "127.0.0.1", **sizes}


def available(names: Sequence[str] = ()) -> list[str]:
    """The scripts whose packages are installed."""
    chosen = names or list(SCRIPTS)
    return [name for name in chosen if all(map(find_spec, NEEDS[name]))]


def compared(
    cases: Sequence[tuple[int, str]], folder: Path, ranks: int = 1
) -> Iterator[tuple[int, str, str, float, str]]:
    """Run scripts at levels of ZeRO on both. Yield level, name, verdict, the largest difference, and what was said."""
    write_models(folder)
    words = [f"{level}:{name}" for level, name in cases]
    shared = {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
    }
    command = [sys.executable, "-m", "tests.engine.trainer_scripts", "run"]
    both = [
        subprocess.Popen(
            [*command, whose, str(ranks), str(folder), *words], env={**os.environ, **shared}
        )
        for whose in (THEIRS, OURS)
    ]
    assert [process.wait() for process in both] == [0, 0]
    for level, name in cases:
        found = [
            [read(whose, level, folder, name, rank) for whose in (THEIRS, OURS)]
            for rank in range(ranks)
        ]
        named = [warning for _, ours in found for warning in ours.get("named", ())]
        for _, ours in found:
            ours["named"] = named  # the first rank warns for all
        verdicts = [verdict(*pair) for pair in found]
        worst = max(
            range(ranks), key=lambda rank: (RANKED.index(verdicts[rank][0]), verdicts[rank][1])
        )
        theirs, ours = found[worst]
        said = ours.get("refused") or ours.get("traceback") or theirs.get("traceback")
        said = said or "; ".join(ours.get("named", ()))
        yield level, name, *verdicts[worst], said


def read(whose: str, level: int, folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    """What a run gave."""
    path = folder / f"{whose}{level}{name}.{rank}.pt"
    if not path.exists():
        return {"traceback": "the process ended", "lines": []}
    found: dict[str, Any] = torch.load(path, weights_only=False)
    return found


def distance(left: Any, right: Any) -> float:
    """The largest difference of two results, relative to the largest value of each tensor; infinite where they are of
    different kinds.
    """
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        if left.keys() != right.keys():
            return float("inf")
        return max((distance(value, right[name]) for name, value in left.items()), default=0.0)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            return float("inf")
        return max(map(distance, left, right), default=0.0)
    if isinstance(left, str | None | bool):
        return 0.0 if left == right else float("inf")
    one, other = torch.as_tensor(left).double(), torch.as_tensor(right).double()
    if one.shape != other.shape:
        return float("inf")
    size = max(float(one.abs().max()) if one.numel() else 0.0, 1e-2)
    found = float((one - other).abs().max()) / size if one.numel() else 0.0
    return found if found == found else float("inf")


def verdict(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[str, float]:
    """How the drop-in's run stands to DeepSpeed's: `equal`, `differs`, `named` (a warning says that numbers differ),
    `refused` or `traceback`, or `both stop`; and the largest difference.
    """
    if "refused" in ours:
        return "refused", 0.0
    if "traceback" in ours:
        return ("both stop" if "traceback" in theirs else "traceback"), 0.0
    if "traceback" in theirs:
        return "DeepSpeed stops", 0.0
    apart = distance(theirs["numbers"], ours["numbers"])
    weights = [theirs["weights"], ours["weights"]]
    good = apart <= TOLERANCE and weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items() if good else ():
        further = distance(weight, weights[1][name])
        good, apart = good and further <= ROUNDING[weight.dtype], max(apart, further)
    return ("equal" if good else "named" if ours.get("named") else "differs"), apart


def main(words: Sequence[str]) -> None:
    """Run scripts on both, and print a table and its counts."""
    ranks = int(words[1]) if words[:1] == ["--ranks"] else 1
    names = available(words[2:] if words[:1] == ["--ranks"] else words)
    counts: Counter[tuple[int, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(os.environ.get("TRAINER_SCRIPTS") or folder)
        cases = [(level, name) for name in names for level in LEVELS]
        for level, name, kind, apart, said in compared(cases, place, ranks):
            counts[level, kind] += 1
            print(f"{level} {name:32} {kind:16} {apart:8.1e} {said}", flush=True)
    for (level, kind), number in sorted(counts.items()):
        print(f"ZeRO {level}: {number} {kind}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run_all(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
    else:
        main(sys.argv[1:])
