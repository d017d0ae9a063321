"""Training scripts as DeepSpeed's users write them, run with DeepSpeed itself and with the drop-in: only the import differs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bridge.engine.models.gpt import GPT
from tests.engine.oracles import SMALL, Task, batch_of, real_deepspeed
from tests.engine.runs import Shared

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
        return {
            "loss": nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()),
            "logits": logits,
        }


def config_of(level: int, **more: Any) -> dict[str, Any]:
    """A config of one microbatch a step with torch's AdamW."""
    params = {
        "lr": TASK.lr,
        "betas": list(TASK.betas),
        "eps": TASK.eps,
        "weight_decay": TASK.weight_decay,
        "torch_adam": True,
    }
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
    return [
        {"params": kinds[True], "weight_decay": 0.2},
        {"params": kinds[False], "weight_decay": 0.0, "lr": 3e-3},
    ]


def _halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def _arguments(deepspeed: Any, config: Mapping[str, Any], folder: Path) -> argparse.Namespace:
    path = folder / f"ds_config{torch.distributed.get_rank()}.json"
    path.write_text(json.dumps(config))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    found: argparse.Namespace = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    return found


def given(
    way: str, deepspeed: Any, model: nn.Module, config: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Arguments of `initialize`, in one of the ways that scripts give them."""
    groups = _groups(model)
    ways: dict[str, Any] = {
        "config": lambda: {"model_parameters": model.parameters(), "config": dict(config)},
        "arguments": lambda: {
            "args": _arguments(deepspeed, config, folder),
            "model_parameters": model.parameters(),
        },
        "old name": lambda: {"model_parameters": model.parameters(), "config_params": dict(config)},
        "groups": lambda: {"model_parameters": groups, "config": dict(config)},
        "optimizer": lambda: {
            "optimizer": torch.optim.AdamW(groups, lr=TASK.lr),
            "config": dict(config),
        },
        "functions": lambda: {
            "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=TASK.lr),
            "model_parameters": groups,
            "lr_scheduler": _halving,
            "config": dict(config),
        },
    }
    found: dict[str, Any] = ways[way]()
    return found


def script(
    rank: int,
    world: int,
    name: str,
    config: Mapping[str, Any],
    way: str,
    folder: Path,
    steps: int = 10,
) -> Any:
    """The script: losses of each microbatch, learning rates and gradient norms of each step, and what else it asked."""
    deepspeed, model = module(name), Model()
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, **given(way, deepspeed, model, config, folder)
    )
    losses, lrs, norms, boundaries, applied = [], [], [], [], []
    micro, number = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    for step in range(steps):
        tokens, targets = batch_of(TASK, step, rank, world)
        for rows in torch.arange(len(tokens)).split(micro)[:number]:
            loss = engine(tokens[rows], labels=targets[rows])["loss"]
            returned = engine.backward(loss)
            assert (
                float(returned) * number == float(loss)
                or abs(float(returned) * number - float(loss)) < 1e-5
            )
            boundaries.append(engine.is_gradient_accumulation_boundary())
            engine.step()
            losses.append(loss.item())
            applied.append(engine.was_step_applied())
        lrs.append(engine.get_lr())
        norms.append(engine.get_global_grad_norm())
    counts = (
        engine.global_steps,
        engine.skipped_steps,
        engine.micro_steps,
        engine.global_samples,
        engine.train_batch_size(),
    )
    flags = (
        engine.zero_optimization_stage(),
        engine.gradient_clipping(),
        engine.fp16_enabled(),
        engine.bfloat16_enabled(),
    )
    engine.eval()
    with torch.no_grad():
        evaluated = engine(*batch_of(TASK, 0, rank, world))["loss"].item()
    assert optimizer is engine.optimizer and (scheduler is None) == (engine.lr_scheduler is None)
    return losses, lrs, norms, (boundaries, applied, counts, flags), evaluated


class Numbers(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Nineteen samples, each of which is its number."""

    def __len__(self) -> int:
        return 19

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index)]), index


def _collated(samples: list[tuple[Tensor, int]]) -> list[int]:
    return [-number for _, number in samples]


def loaded(
    rank: int, world: int, name: str, collate: bool, **config: Any
) -> tuple[int, list[list[Any]]]:
    """Length of the training data loader, and its batches of two epochs."""
    deepspeed, model = module(name), nn.Linear(1, 1)
    given: dict[str, Any] = {"collate_fn": _collated} if collate else {}
    config = {**config_of(1, gradient_accumulation_steps=1), **config}
    _, _, loader, _ = deepspeed.initialize(
        model=model, config=config, training_data=Numbers(), **given
    )
    if name == "deepspeed":
        loader.num_local_io_workers = 0
    epochs = [
        [batch if collate else [part.tolist() for part in batch] for batch in loader]
        for _ in range(2)
    ]
    return len(loader), epochs


def resumed(rank: int, world: int, folder: Path) -> tuple[Any, ...]:
    """Steps with the drop-in, a checkpoint, more steps; then the same ones by another engine from the checkpoint."""
    import compat.deepspeed

    def started(level: int) -> Any:
        scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.01}}
        config = config_of(level, scheduler=scheduler, gradient_accumulation_steps=1)
        return compat.deepspeed.initialize(model=Model(), config=config)[0]

    def train(engine: Any, first: int, last: int) -> list[float]:
        found = []
        for step in range(first, last):
            loss = engine(*batch_of(TASK, step, rank, world))["loss"]
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        return found

    engine, other = started(2), started(3)
    nothing = engine.load_checkpoint(folder)
    train(engine, 0, 3)
    engine.save_checkpoint(folder, client_state={"epoch": 4})
    expected = train(engine, 3, 6)
    path, client = other.load_checkpoint(folder)
    rates = (other.get_lr(), other.global_steps, other.lr_scheduler.last_batch_iteration)
    found = train(other, 3, 6)
    weights_only = started(1)
    weights_only.load_checkpoint(folder, load_module_only=True)
    other.save_16bit_model(folder)
    return nothing, Path(path).name, client, rates, expected, found, weights_only.global_steps


def exported(rank: int, world: int, folder: Path, level: int) -> dict[str, Tensor] | None:
    """On the first rank, the buffers of a model whose whole state was exported."""
    import compat.deepspeed

    config = config_of(level, gradient_accumulation_steps=1)
    engine = compat.deepspeed.initialize(model=Shared().float(), config=config)[0]
    for step in range(2):
        engine.backward(
            engine(torch.ones(2, 4) * torch.arange(4) * (rank + step + 1)).square().mean()
        )
        engine.step()
    engine.save_16bit_model(folder)
    return (
        {name: value.clone() for name, value in engine.module.named_buffers() if name != "scratch"}
        if rank == 0
        else None
    )


class Classifier(nn.Sequential):
    """Layers with a loss function, as DeepSpeed's PipelineModule holds them."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    @staticmethod
    def loss_fn(output: Tensor, number: Tensor) -> Tensor:
        """Squared distance to a twentieth of the number."""
        return nn.functional.mse_loss(output[:, 0], number / 20)


def by_batches(rank: int, world: int, level: int) -> tuple[list[float], list[float], float, float]:
    """Losses of `train_batch`, of the same steps by hand, and of evaluation in both ways."""
    import compat.deepspeed

    def started() -> Any:
        config = config_of(level)
        return compat.deepspeed.initialize(
            model=Classifier(), config=config, training_data=Numbers()
        )[0]

    engine, other = started(), started()
    losses = [float(engine.train_batch()) for _ in range(3)]
    batches, by_hand = other._batches(), []
    for _ in range(3):
        total = torch.zeros(())
        for _ in range(2):
            inputs, number = next(batches)
            loss = other.module.loss_fn(other(inputs), number)
            other.backward(loss)
            other.step()
            total += loss.detach() / 2 / world
        torch.distributed.all_reduce(total)
        by_hand.append(float(total))
    held = [Numbers()[3], Numbers()[4]]
    batch = (
        torch.stack([inputs for inputs, _ in held]),
        torch.tensor([number for _, number in held]),
    )
    mean = float(engine.eval_batch(iter([batch]), num_micro_batches=1))
    other.eval()
    return losses, by_hand, mean, float(other.module.loss_fn(other(batch[0]), batch[1]))
