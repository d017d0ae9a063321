"""Scripts in Merak's words over real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from blocks import VOCAB, small
from torch import Tensor, nn

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


def trained(rank: int, world: int, name: str, shape: tuple[int, int, int], folder: Path, **more: Any) -> dict[str, Any]:
    """A script: its losses, norms and rates, its evaluation, and the same steps again from a checkpoint."""
    import compat.merak as Merak
    from compat.merak.core.tensor_parallel.mp_attrs import set_tp_layer_lists

    Merak.init(*shape)
    if shape[1] > 1:
        columns, rows = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], ["o_proj", "down_proj"]
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
    return {"log": trainer.log_history, "evaluated": evaluated, "resumed": second.log_history, "findings": found}


def limited(rank: int, world: int, folder: Path) -> None:
    """Two data ranks that keep one checkpoint."""
    import compat.merak as Merak

    Merak.init(1, 1, world)
    args = arguments(folder, save=True, save_steps=2, save_total_limit=1, gradient_accumulation_steps=1)
    Merak.MerakTrainer(model=small("gpt2").float(), args=args, train_dataset=Rows()).train()


def plain(name: str) -> tuple[list[dict[str, float]], float]:
    """The same training in one process with nothing but torch and transformers: two microbatches a step of one data rank."""
    from transformers import get_linear_schedule_with_warmup

    model, data, log = small(name).float().train(), Rows(), []
    spared = ("bias",)
    groups = [
        {"params": [w for n, w in model.named_parameters() if not any(s in n for s in spared)], "weight_decay": 0.1},
        {"params": [w for n, w in model.named_parameters() if any(s in n for s in spared)], "weight_decay": 0.0},
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
        log.append({"step": step + 1, "loss": total, "grad_norm": norm, "learning_rate": optimizer.param_groups[0]["lr"]})
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        held = Rows(4)
        logits = model(input_ids=held.tokens).logits
        return log, float(criterion(logits.flatten(0, 1), held.labels.flatten()))
