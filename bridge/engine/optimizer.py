"""The optimizer: torch's fused kernels on the slices that this rank owns, one global norm, and clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bridge.errors import ConfigError
from bridge.plan import Optimizer as Settings

DEFAULTS: Mapping[str, Any] = {
    "name": "adamw",
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "clip": 0.0,
}
"""What an unset field of the optimizer means to the engine."""


def setting(settings: Settings, name: str) -> Any:
    """The value of an optimizer field, or the engine's default."""
    value = getattr(settings, name)
    return DEFAULTS[name] if value is None else value


class ShardOptimizer:
    """Updates master slices in place; its state exists from the start, so that bytes and checkpoints do not
    depend on time.
    """

    def __init__(self, settings: Settings, masters: Sequence[Tensor]) -> None:
        self.parameters = [nn.Parameter(master) for master in masters]
        name = setting(settings, "name")
        if name not in _MAKE:
            raise ConfigError(f"optimizer.name: the engine has no {name}; use one of {', '.join(_MAKE)}")
        self.torch = _MAKE[name](self.parameters, settings) if masters else None
        self.state_names = _STATE[name] if name != "sgd" or settings.momentum else ()
        for parameter in self.parameters:
            self._prepare(parameter)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        """One update with `gradients`, slice by slice, at learning rate `lr`."""
        if self.torch is None:
            return
        for group in self.torch.param_groups:
            group["lr"] = lr
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        self.torch.step()
        for parameter in self.parameters:
            parameter.grad = None

    def state(self, index: int) -> dict[str, Tensor]:
        """The tensors of optimizer state of slice `index`, by name."""
        if self.torch is None:
            return {}
        state = self.torch.state[self.parameters[index]]
        return {name: state[name] for name in self.state_names}

    def set_steps(self, steps: int) -> None:
        """Set how many updates the state stands for."""
        for parameter in self.parameters:
            if self.torch is not None and "step" in self.torch.state[parameter]:
                self.torch.state[parameter]["step"].fill_(steps)

    def tensors(self) -> Iterable[Tensor]:
        """Every tensor of optimizer state as large as its slice."""
        return (tensor for index in range(len(self.parameters)) for tensor in self.state(index).values())

    def _prepare(self, parameter: nn.Parameter) -> None:
        assert self.torch is not None
        state = self.torch.state[parameter]
        if "exp_avg" in self.state_names:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in self.state_names:
            state[name] = torch.zeros_like(parameter, requires_grad=False)


def squared_norm(parts: Iterable[Tensor]) -> Tensor:
    """Sum of the squares of all elements, in fp64 on the parts' device; not finite if any element is not."""
    norms = torch._foreach_norm(list(parts))
    return torch.stack(norms).double().square().sum()


def clip_factor(norm: float, clip: float) -> float:
    """What gradients of global `norm` are multiplied with so that it does not exceed `clip` (0: no bound)."""
    return min(1.0, clip / (norm + 1e-6)) if clip else 1.0


def _adamw(parameters: list[nn.Parameter], settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True, **_adam_settings(settings))


def _adam(parameters: list[nn.Parameter], settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, fused=True, **_adam_settings(settings))


def _adam_settings(settings: Settings) -> dict[str, Any]:
    return {name: setting(settings, name) for name in ("lr", "betas", "eps", "weight_decay")}


def _sgd(parameters: list[nn.Parameter], settings: Settings) -> torch.optim.Optimizer:
    found = {name: setting(settings, name) for name in ("lr", "momentum", "weight_decay")}
    return torch.optim.SGD(parameters, fused=True, **found)


_MAKE: Mapping[str, Callable[[list[nn.Parameter], Settings], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adam": _adam,
    "sgd": _sgd,
}
_STATE: Mapping[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
}
