"""Training scripts as DeepSpeed's users write them, run with DeepSpeed itself and with the drop-in: only the import differs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from oracles import SMALL, Task, batch_of, real_deepspeed
from torch import Tensor, nn

from bridge.engine.models.gpt import GPT

TASK = Task()


def module(name: str) -> Any:
    """What the script imports as `deepspeed`."""
    if name == "deepspeed":
        return real_deepspeed()
    import compat.deepspeed

    return compat.deepspeed


class Model(nn.Module):
    """A model as Hugging Face has them: named inputs, and outputs with the loss among them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = GPT(SMALL)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Tokens (batch, sequence) to logits, and the mean loss with `labels`."""
        logits = self.body(input_ids)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), "logits": logits}


def config_of(level: int, **more: Any) -> dict[str, Any]:
    """A config of one microbatch a step with torch's AdamW."""
    params = {"lr": TASK.lr, "betas": list(TASK.betas), "eps": TASK.eps, "weight_decay": TASK.weight_decay, "torch_adam": True}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": level},
        "gradient_clipping": TASK.clip,
        **more,
    }


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only, as everyone does it."""
    kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for weight in model.parameters():
        kinds[weight.dim() > 1].append(weight)
    return [{"params": kinds[True], "weight_decay": 0.2}, {"params": kinds[False], "weight_decay": 0.0, "lr": 3e-3}]


def _halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def _arguments(deepspeed: Any, config: Mapping[str, Any], folder: Path) -> argparse.Namespace:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    found: argparse.Namespace = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    return found


def given(way: str, deepspeed: Any, model: nn.Module, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Arguments of `initialize`, in one of the ways that scripts give them."""
    groups = _groups(model)
    ways: dict[str, Any] = {
        "config": lambda: {"model_parameters": model.parameters(), "config": dict(config)},
        "arguments": lambda: {"args": _arguments(deepspeed, config, folder), "model_parameters": model.parameters()},
        "old name": lambda: {"model_parameters": model.parameters(), "config_params": dict(config)},
        "groups": lambda: {"model_parameters": groups, "config": dict(config)},
        "optimizer": lambda: {"optimizer": torch.optim.AdamW(groups, lr=TASK.lr), "config": dict(config)},
        "functions": lambda: {
            "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=TASK.lr),
            "model_parameters": groups,
            "lr_scheduler": _halving,
            "config": dict(config),
        },
    }
    found: dict[str, Any] = ways[way]()
    return found


def script(rank: int, world: int, name: str, config: Mapping[str, Any], way: str, folder: Path, steps: int = 10) -> Any:
    """The script: losses of each microbatch, learning rates and gradient norms of each step, and what else it asked."""
    deepspeed, model = module(name), Model()
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, **given(way, deepspeed, model, config, folder))
    losses, lrs, norms, boundaries, applied = [], [], [], [], []
    micro, number = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    for step in range(steps):
        tokens, targets = batch_of(TASK, step, rank, world)
        for rows in torch.arange(len(tokens)).split(micro)[:number]:
            loss = engine(tokens[rows], labels=targets[rows])["loss"]
            returned = engine.backward(loss)
            assert float(returned) * number == float(loss) or abs(float(returned) * number - float(loss)) < 1e-5
            boundaries.append(engine.is_gradient_accumulation_boundary())
            engine.step()
            losses.append(loss.item())
            applied.append(engine.was_step_applied())
        lrs.append(engine.get_lr())
        norms.append(engine.get_global_grad_norm())
    counts = (engine.global_steps, engine.skipped_steps, engine.micro_steps, engine.global_samples, engine.train_batch_size())
    flags = (engine.zero_optimization_stage(), engine.gradient_clipping(), engine.fp16_enabled(), engine.bfloat16_enabled())
    engine.eval()
    with torch.no_grad():
        evaluated = engine(*batch_of(TASK, 0, rank, world))["loss"].item()
    assert optimizer is engine.optimizer and (scheduler is None) == (engine.lr_scheduler is None)
    return losses, lrs, norms, (boundaries, applied, counts, flags), evaluated
