"""DeepSpeed's own learning-rate schedulers, with exactly DeepSpeed's rate in every step. The first
two updates use the rate at which warmup begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch

from bridge.errors import ConfigError

Rate = Callable[[int, float], float]
"""Function that returns the learning rate of a group. The arguments are the number of the last step
(-1 before the first step) and the group's initial rate.
"""


class Scheduler:
    """Sets the learning rate of every group of `optimizer`. Counts steps as DeepSpeed does: -1 at
    the start, 0 after the first step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rate: Rate) -> None:
        self.optimizer, self.rate = optimizer, rate
        self.bases = [float(group["lr"]) for group in optimizer.param_groups]
        self.last_batch_iteration = -1
        self._set()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one step, or to the given step."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._set()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        return [self.rate(self.last_batch_iteration, base) for base in self.bases]

    get_last_lr = get_lr

    def state_dict(self) -> dict[str, int]:
        """Return the state for a checkpoint."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from the state of a saved scheduler."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _set(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = lr


def scheduler(kind: str, params: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    """Return the scheduler that the config names, one of DeepSpeed's or of torch's. Source:
    DeepSpeed 0.19.8, runtime/engine.py (`_scheduler_from_config`) and runtime/lr_schedules.py.
    """
    torchs: Callable[..., Any] | None = getattr(torch.optim.lr_scheduler, kind, None)
    if kind not in RATES and torchs is None:
        raise ConfigError(
            f"scheduler.type: the engine has no scheduler {kind}; use one of {', '.join(RATES)},"
            " with params of its own, or pass lr_scheduler"
        )
    known: Any = RATES.get(kind, torchs)
    ConfigError.raise_if(
        f"scheduler.params.{name}: the engine's {kind} does not take this; leave it out"
        for name in params
        if name not in signature(known).parameters
    )
    try:
        return (
            Scheduler(optimizer, RATES[kind](**params))
            if torchs is None
            else torchs(optimizer, **params)
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler.params: {error}; correct the parameters of {kind}") from None


def _warmup(steps: int, kind: str) -> Callable[[int], float]:
    """Return a function that maps a step to the completed share of warmup, from 0 to 1. Warmup has
    at least two steps, because a logarithmic warmup of one step would divide by zero.
    """
    steps = max(2, steps)

    def share(step: int) -> float:
        if step >= steps:
            return 1.0
        # DeepSpeed's usual warmup is logarithmic: log(step + 1) / log(steps).
        return step / steps if kind == "linear" else math.log(step + 1) / math.log(steps)

    return share


def warmup_lr(
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Rate:
    """Return the rate function of WarmupLR: the rate rises from a low rate to a high rate (by
    default each group's own rate), and then stays constant.
    """
    share = _warmup(warmup_num_steps, warmup_type)

    def rate(step: int, base: float) -> float:
        top = base if warmup_max_lr is None else warmup_max_lr
        return warmup_min_lr + (top - warmup_min_lr) * share(step) if step >= 0 else warmup_min_lr

    return rate


def warmup_decay_lr(
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Rate:
    """Return the rate function of WarmupDecayLR: the rate rises to a high rate as in WarmupLR, and
    then falls linearly to the low rate.
    """
    warmup = max(2, warmup_num_steps)
    share = _warmup(warmup, warmup_type)

    def rate(step: int, base: float) -> float:
        decay = max(0.0, (total_num_steps - step) / max(1.0, total_num_steps - warmup))
        gamma = share(step) if 0 <= step < warmup else decay
        return (
            warmup_min_lr + (warmup_max_lr - warmup_min_lr) * gamma if step >= 0 else warmup_min_lr
        )

    return rate


def warmup_cosine_lr(
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> Rate:
    """Return the rate function of WarmupCosineLR: the rate rises from a low share of each group's
    rate to the full rate, and then falls along a cosine. The first update has rate 0.
    """
    warmup = max(2, warmup_num_steps)
    share = _warmup(warmup, warmup_type)

    def ratio(step: int) -> float:
        if step < warmup:
            return warmup_min_ratio + (1 - warmup_min_ratio) * share(step)
        # The cosine goes from 1 to `cos_min_ratio` over the steps behind warmup.
        over = min(1.0, (step - warmup + 1) / max(1, total_num_steps - warmup))
        return max(0.0, cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * over)) / 2)

    return lambda step, base: base * ratio(step) if step >= 0 else 0.0


def lr_range_test(
    lr_range_test_min_lr: float = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> Rate:
    """Return the rate function of LRRangeTest: the rate rises from a low rate without end,
    continuously or in steps.
    """

    def rate(step: int, base: float) -> float:
        # Each `step_size` steps add `step_rate` times the low rate; stairs add it at once.
        over = (step + 1) / lr_range_test_step_size
        return lr_range_test_min_lr * (
            1 + lr_range_test_step_rate * (math.floor(over) if lr_range_test_staircase else over)
        )

    return rate


RATES: Mapping[str, Callable[..., Rate]] = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
    "LRRangeTest": lr_range_test,
}
"""DeepSpeed's schedulers that set only the learning rate, by name."""
