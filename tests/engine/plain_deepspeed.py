"""What scripts for DeepSpeed ask of it, with plain torch in one process: the reference for `scripts.py`. Nothing of the engine is
in here.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

KINDS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
RANKS = 2
"""Data ranks that the one process stands for: losses are divided by the microbatches of one, and gradients are their mean."""


def initialize(
    model: nn.Module,
    config: dict[str, Any],
    optimizer: Any = None,
    model_parameters: Any = None,
    lr_scheduler: Any = None,
    training_data: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer and scheduler in one loop."""
    taken = list(
        model_parameters or [weight for weight in model.parameters() if weight.requires_grad]
    )
    if optimizer is None:
        given = dict(config["optimizer"]["params"])
        given.pop("torch_adam", None)
        optimizer = KINDS[config["optimizer"]["type"].lower()](taken, **given)
    elif not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(taken)
    if lr_scheduler is not None and not hasattr(lr_scheduler, "step"):
        lr_scheduler = lr_scheduler(optimizer)
    micro = config["train_micro_batch_size_per_gpu"]
    data = None if training_data is None else torch.utils.data.DataLoader(training_data, micro)
    engine = Engine(model, optimizer, lr_scheduler, config, data)
    return engine, optimizer, data, lr_scheduler


class Engine(nn.Module):
    """The loop of plain torch: gradients add up over microbatches, are clipped, and the optimizer takes a step."""

    def __init__(
        self, model: nn.Module, optimizer: Any, scheduler: Any, config: dict[str, Any], data: Any
    ) -> None:
        super().__init__()
        self.module, self.optimizer, self.lr_scheduler, self.training_dataloader = (
            model,
            optimizer,
            scheduler,
            data,
        )
        self.clip = config.get("gradient_clipping") or torch.inf
        self.number = config["train_batch_size"] // config["train_micro_batch_size_per_gpu"]
        self.micro = self.global_steps = 0
        self.last, self.norm, self.iterator = False, None, None
        self.states = [
            torch.get_rng_state()
        ] * RANKS  # of generators that all ranks have seeded alike
        self.device = torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def forward(self, *given: Any, **named: Any) -> Any:
        """The model's output."""
        if not self.module.training:
            return self.module(*given, **named)
        with torch.random.fork_rng([]):
            torch.set_rng_state(self.states[self.micro % RANKS])
            found = self.module(*given, **named)
            self.states[self.micro % RANKS] = torch.get_rng_state()
        return found

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Gradients of a microbatch."""
        (loss / (self.number / RANKS)).backward()
        self.micro += 1
        if self.is_gradient_accumulation_boundary():
            for weight in self.module.parameters():
                if weight.grad is not None:
                    weight.grad.div_(RANKS)
        return loss / self.number

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this microbatch is the last of its step."""
        return self.last or self.micro >= self.number

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """End the step with this microbatch."""
        self.last = is_boundary

    def step(self) -> None:
        """One update after the last microbatch."""
        if not self.is_gradient_accumulation_boundary():
            return
        self.norm = float(nn.utils.clip_grad_norm_(self.module.parameters(), self.clip))
        self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.optimizer.zero_grad()
        self.micro, self.last, self.global_steps = 0, False, self.global_steps + 1

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """One step over the next batches."""
        self.train()
        if data_iter is None:
            self.iterator = self.iterator or iter(self.training_dataloader)
            data_iter = self.iterator
        total = 0.0
        for _ in range(self.number):
            inputs, targets = next(data_iter)
            loss = self.module.loss_fn(self(inputs), targets)
            self.backward(loss)
            self.step()
            total += float(loss.detach()) / self.number
        return torch.tensor(total)

    def get_global_grad_norm(self) -> float | None:
        """The norm before clipping."""
        return self.norm

    def get_lr(self) -> list[float]:
        """Learning rates by group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set them all."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def gradient_accumulation_steps(self) -> int:
        """Microbatches of a step."""
        return self.number

    def no_sync(self) -> Any:
        """Nothing: there is one process."""
        return nullcontext()

    def save_checkpoint(
        self, folder: Path, tag: str | None = None, client_state: Any = None
    ) -> None:
        """What a resume needs, as torch saves it."""
        parts = (self.module, self.optimizer, *([self.lr_scheduler] if self.lr_scheduler else []))
        torch.save(
            [[part.state_dict() for part in parts], self.global_steps, client_state],
            Path(folder) / "plain.pt",
        )

    def load_checkpoint(self, folder: Path, tag: str | None = None) -> tuple[Path, Any]:
        """Continue from there."""
        parts = (self.module, self.optimizer, *([self.lr_scheduler] if self.lr_scheduler else []))
        states, self.global_steps, client = torch.load(Path(folder) / "plain.pt", weights_only=True)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        return Path(folder), client


def _gathered(*_: Any, **__: Any) -> Any:
    return nullcontext()


def _set_grad(weight: nn.Parameter, value: torch.Tensor) -> None:
    assert weight.grad is not None
    weight.grad.copy_(value)


zero = SimpleNamespace(GatheredParameters=_gathered, Init=_gathered)
utils = SimpleNamespace(safe_get_full_grad=lambda weight: weight.grad, safe_set_full_grad=_set_grad)
checkpointing = SimpleNamespace(
    checkpoint=lambda run, *given: checkpoint(run, *given, use_reentrant=True),
    configure=lambda *_, **__: None,
)
comm = SimpleNamespace(
    all_reduce=lambda tensor, **_: None,
    get_rank=lambda: 0,
    get_world_size=lambda: 1,
    barrier=lambda: None,
)


def init_distributed(*_: Any, **__: Any) -> None:
    """Nothing: there is one process."""
