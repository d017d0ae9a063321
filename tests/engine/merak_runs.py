"""Scripts in Merak's words over real ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.blocks import VOCAB, small

ROWS, STEPS = 2, 4


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of tokens and the labels of each."""

    def __init__(self, number: int = 16) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(3, VOCAB, (number, 12), generator=generator)
        self.labels = torch.randint(3, VOCAB, (number, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.tokens[index],
            "attention_mask": torch.ones(12, dtype=torch.int64),
            "labels": self.labels[index],
        }


def arguments(folder: Path, **more: Any) -> Any:
    """Arguments of a short run."""
    import compat.merak as Merak

    given = {
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "num_train_epochs": 1,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "warmup_steps": 1,
        "logging_steps": 1,
        "use_cpu": True,
    }
    return Merak.MerakArguments(output_dir=str(folder), **{**given, **more})


def trained(
    rank: int, world: int, name: str, shape: tuple[int, int, int], folder: Path, **more: Any
) -> dict[str, Any]:
    """A script: its losses, norms and rates, its evaluation, and the same steps again from a checkpoint."""
    import compat.merak as Merak
    from compat.merak.core.tensor_parallel.mp_attrs import set_tp_layer_lists

    Merak.init(*shape)
    if shape[1] > 1:
        columns, rows = (
            ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
            ["o_proj", "down_proj"],
        )
        set_tp_layer_lists(col_para_list=columns, row_para_list=rows, tp_attr_list=["num_heads"])
    args = arguments(folder, save=True, save_steps=2, **more)
    with Merak.init_empty_weights():
        model = small(name).float()
    trainer = Merak.MerakTrainer(model=model, args=args, train_dataset=Rows(), eval_dataset=Rows(4))
    trainer.train()
    evaluated = trainer.evaluation()
    args.resume_from_checkpoint, args.save = str(folder / "iter_0000002"), False
    second = Merak.MerakTrainer(model=small(name, 7).float(), args=args, train_dataset=Rows())
    second.train()
    found = [finding.path for finding in trainer.findings]
    return {
        "log": trainer.log_history,
        "evaluated": evaluated,
        "resumed": second.log_history,
        "findings": found,
    }


def limited(rank: int, world: int, folder: Path) -> None:
    """Two data ranks that keep one checkpoint."""
    import compat.merak as Merak

    Merak.init(1, 1, world)
    args = arguments(
        folder, save=True, save_steps=2, save_total_limit=1, gradient_accumulation_steps=1
    )
    Merak.MerakTrainer(model=small("gpt2").float(), args=args, train_dataset=Rows()).train()


def plain(name: str) -> tuple[list[dict[str, float]], float]:
    """The same training in one process with nothing but torch and transformers: two microbatches a step of one data rank."""
    from transformers import get_linear_schedule_with_warmup

    model, data, log = small(name).float().train(), Rows(), []
    spared = ("bias",)
    groups = [
        {
            "params": [w for n, w in model.named_parameters() if not any(s in n for s in spared)],
            "weight_decay": 0.1,
        },
        {
            "params": [w for n, w in model.named_parameters() if any(s in n for s in spared)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, 1, STEPS)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0)).split(ROWS)
    criterion = nn.CrossEntropyLoss()
    for step in range(STEPS):
        total = 0.0
        for rows in order[2 * step : 2 * step + 2]:
            logits = model(input_ids=data.tokens[rows], use_cache=False).logits
            loss = criterion(logits.flatten(0, 1), data.labels[rows].flatten())
            (loss / 2).backward()
            total += float(loss.detach()) / 2
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        log.append(
            {
                "step": step + 1,
                "loss": total,
                "grad_norm": norm,
                "learning_rate": optimizer.param_groups[0]["lr"],
            }
        )
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        held = Rows(4)
        logits = model(input_ids=held.tokens).logits
        return log, float(criterion(logits.flatten(0, 1), held.labels.flatten()))


def other_kinds(
    rank: int, world: int, name: str, shape: tuple[int, int, int], folder: Path
) -> dict[str, Any]:
    """Four steps of a model that is more than a row of blocks over words, with the samples that Merak makes."""
    from compat.merak.utils.datasets import DynamicGenDataset

    import compat.merak as Merak
    from compat.merak.core.tensor_parallel.mp_attrs import set_tp_layer_lists
    from tests.engine.rows import small as kind

    Merak.init(*shape)
    if shape[1] > 1:
        columns, rows = ["query", "key", "value", "fc1"], ["output.dense", "fc2"]
        if name == "convnext":
            columns, rows = columns[:3], rows[:1]
        # Older releases of transformers have the width of all heads as an attribute of its own.
        attributes = ("num_attention_heads", "all_head_size")
        had = [
            each for each in attributes if any(hasattr(one, each) for one in kind(name).modules())
        ]
        heads = had if name == "dinov2" else None
        set_tp_layer_lists(col_para_list=columns, row_para_list=rows, tp_attr_list=heads)
    torch.manual_seed(3)
    model = kind(name).float()
    model.config.num_labels = 2
    mode = "condition" if name == "t5" else "vision_only"
    data = DynamicGenDataset(model.config, mode=mode, dataset_size=16, image_size=32, seq_length=9)
    data.words = lambda by, most=64, number=None, least=1: torch.randint(
        least, min(most, 64), (number or 9,), generator=by
    )
    trainer = Merak.MerakTrainer(model=model, args=arguments(folder), train_dataset=data)
    trainer.train()
    engine = trainer.engine
    split = [each for each in engine.parameters if each.split is not None]
    losses = [line["loss"] for line in trainer.log_history]
    return {
        "losses": losses,
        "split": len(split),
        "findings": [finding.path for finding in trainer.findings],
    }


def flagged(rank: int, world: int, folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """What is seen of a script over two stages with these words on its command line."""
    from transformers import HfArgumentParser

    import compat.merak as Merak
    from bridge.errors import BridgeError

    here, found = Path.cwd(), dict[str, Any]()
    os.chdir(folder)
    errors = StringIO()
    try:
        Merak.init(world, 1, 1)
        (args,) = HfArgumentParser(Merak.MerakArguments).parse_args_into_dataclasses(
            [*WORDS, *words]
        )
        torch.manual_seed(args.seed)
        # Dropout is what the seed decides.
        model = small("gpt2", resid_pdrop=0.1).float()
        trainer = Merak.MerakTrainer(
            model=model, args=args, train_dataset=Rows(64), eval_dataset=Rows(4)
        )
        with redirect_stderr(errors):
            trainer.train()
        found["timed"] = len(
            re.findall(r"^rank \d+: step \d+: [\d.]+ ms", errors.getvalue(), re.MULTILINE)
        )
        found["lines"] = trainer.log_history
        found["stages"] = [[*stage] for stage in trainer.engine.pipeline.layers]
        found["chunks"] = [stage.recomputes for stage in trainer.engine.executor.stages.values()]
        workers = getattr(trainer.train_dataloader, "num_workers", None)
        found["own"] = (workers, trainer.engine.accumulation, trainer.max_steps)
        found["plan"] = {name: str(value) for name, value in trainer.plan.values().items()}
        found["findings"] = sorted(finding.path for finding in trainer.findings)
    except SystemExit:
        found["refused"] = "the command line is not taken"
    except (BridgeError, ValueError) as error:
        found["refused"] = str(error)
    finally:
        os.chdir(here)
    found["files"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return found


WORDS = (
    *(
        "--output_dir",
        "out",
        "--use_cpu",
        "True",
        "--max_steps",
        str(STEPS),
        "--num_train_epochs",
        "1",
        "--logging_steps",
        "1",
    ),
    *(
        "--per_device_train_batch_size",
        "2",
        "--gradient_accumulation_steps",
        "2",
        "--learning_rate",
        "0.01",
    ),
)
"""The command line of a short run; a word that comes later takes the place of one before."""
