"""The optimizer: torch's fused kernels on the slices that this rank owns, one global norm, and clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from bridge.errors import ConfigError
from bridge.layout.shard import Piece
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
HALF = (torch.float16, torch.bfloat16)
"""Formats in which a norm would overflow, or lose digits, where its elements do not."""
HYPER = ("lr", "betas", "eps", "momentum", "weight_decay")
"""What groups of parameters may have of their own."""


def setting(settings: Settings, name: str) -> Any:
    """The value of an optimizer field, or the engine's default."""
    value = getattr(settings, name)
    return DEFAULTS[name] if value is None else value


@dataclass(frozen=True)
class Group:
    """Parameters, by global name, with hyperparameters that win over the plan's; `settings` is read anew at every step."""

    names: frozenset[str]
    settings: Mapping[str, Any]


def spared(module: nn.Module, settings: Settings) -> tuple[Group, ...]:
    """Biases and norms as a group without weight decay, if the plan's decay is not for all; of norms, maybe LayerNorm alone."""
    decays = settings.weight_decay or settings.decay_ramp.shape
    if settings.decay_scope not in ("matrices", "not_layernorm") or not decays:
        return ()
    decayed = _rms(module) if settings.decay_scope == "not_layernorm" else frozenset()
    names = frozenset(name for name, parameter in module.named_parameters() if parameter.ndim <= 1) - decayed
    return (Group(names, {"weight_decay": 0.0}),) if names else ()


def _rms(module: nn.Module) -> frozenset[str]:
    """Weights of norms that are no LayerNorm."""
    found = ((name, getattr(part, "rms", isinstance(part, nn.RMSNorm))) for name, part in module.named_modules())
    return frozenset(f"{name}.weight" for name, rms in found if rms)


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of one slice that are updated alike: with the plan's settings (`group` None) or those of a group."""

    slice: int
    group: int | None
    start: int
    stop: int


class ShardOptimizer:
    """Updates master slices in place; its state exists from the start, so that bytes and checkpoints do not
    depend on time.

    `pieces` are the parameters in each slice, which `groups` name.
    """

    def __init__(
        self, settings: Settings, masters: Sequence[Tensor], pieces: Sequence[Iterable[Piece]], groups: Sequence[Group] = ()
    ) -> None:
        name = setting(settings, "name")
        if name not in _MAKE:
            raise ConfigError(f"optimizer.name: the engine has no {name}; use one of {', '.join(_MAKE)}")
        self.groups = groups
        self.state_names = _STATE[name] if name != "sgd" or settings.momentum else ()
        self._state = [{name: torch.zeros_like(master) for name in self.state_names} for master in masters]
        numbers = {name: number for number, group in enumerate(groups) for name in group.names}
        self.runs = [run for index, parts in enumerate(pieces) for run in _runs(index, parts, numbers)]
        self.parameters = [nn.Parameter(masters[run.slice][run.start : run.stop]) for run in self.runs]
        self.torch = _MAKE[name](self._torch_groups(), settings) if self.runs else None
        for run, parameter in zip(self.runs, self.parameters, strict=True):
            self._prepare(run, parameter)

    def lr(self, planned: float) -> float:
        """The learning rate of the next step: that of the first group, where there are any, else as planned."""
        return float(self.groups[0].settings.get("lr", planned)) if self.groups else planned

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: float, decay: float | None = None) -> None:
        """One update with `gradients`, slice by slice, at learning rate `lr` where no group has its own; the same for a weight
        decay that changes.
        """
        if self.torch is None:
            return
        for group in self.torch.param_groups:
            group.update({"lr": lr, **({} if decay is None else {"weight_decay": decay}), **self._own(group)})
        for run, parameter in zip(self.runs, self.parameters, strict=True):
            parameter.grad = gradients[run.slice][run.start : run.stop].to(parameter.dtype)
        self.torch.step()
        for parameter in self.parameters:
            parameter.grad = None

    def state(self, index: int) -> dict[str, Tensor]:
        """The tensors of optimizer state of slice `index`, by name."""
        return self._state[index]

    def set_steps(self, steps: int) -> None:
        """Set how many updates the state stands for."""
        for parameter in self.parameters:
            if self.torch is not None and "step" in self.torch.state[parameter]:
                self.torch.state[parameter]["step"].fill_(steps)

    def tensors(self) -> Iterable[Tensor]:
        """Every tensor of optimizer state as large as its slice."""
        return (tensor for state in self._state for tensor in state.values())

    def _torch_groups(self) -> list[dict[str, Any]]:
        """Runs as torch wants them; `number` is that of their group."""
        found: dict[int | None, list[nn.Parameter]] = {}
        for run, parameter in zip(self.runs, self.parameters, strict=True):
            found.setdefault(run.group, []).append(parameter)
        return [{"params": parameters, "number": number} for number, parameters in found.items()]

    def _own(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """What a group says of the hyperparameters that this optimizer has."""
        settings = {} if group["number"] is None else self.groups[group["number"]].settings
        return {name: settings[name] for name in HYPER if name in settings and name in group}

    def _prepare(self, run: Run, parameter: nn.Parameter) -> None:
        assert self.torch is not None
        state = self.torch.state[parameter]
        if "exp_avg" in self.state_names:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name, whole in self._state[run.slice].items():
            state[name] = whole[run.start : run.stop]


def _runs(index: int, pieces: Iterable[Piece], numbers: Mapping[str, int]) -> Iterator[Run]:
    """The longest runs of neighbours in slice `index` that belong to one group."""
    for number, members in groupby(pieces, lambda piece: numbers.get(piece.parameter.name)):
        parts = list(members)
        first, last = parts[0], parts[-1]
        yield Run(index, number, first.offset, last.offset + last.stop - last.start)


def squared_norm(parts: Iterable[Tensor]) -> Tensor:
    """Sum of the squares of all elements, in fp64 on the parts' device; not finite if any element is not."""
    found: dict[torch.dtype | None, list[Tensor]] = {}
    for part in parts:
        found.setdefault(torch.float32 if part.dtype in HALF else None, []).append(part)
    norms = [torch.stack(torch._foreach_norm(alike, 2, dtype=dtype)).double() for dtype, alike in found.items()]
    return torch.cat(norms).square().sum()


def clip_factor(norm: float, clip: float) -> float:
    """What gradients of global `norm` are multiplied with so that it does not exceed `clip` (0: no bound)."""
    return min(1.0, clip / (norm + 1e-6)) if clip else 1.0


Groups = list[dict[str, Any]]


def _adamw(parameters: Groups, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True, **_adam_settings(settings))


def _adam(parameters: Groups, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, fused=True, **_adam_settings(settings))


def _adam_settings(settings: Settings) -> dict[str, Any]:
    return {name: setting(settings, name) for name in ("lr", "betas", "eps", "weight_decay")}


def _sgd(parameters: Groups, settings: Settings) -> torch.optim.Optimizer:
    found = {name: setting(settings, name) for name in ("lr", "momentum", "weight_decay")}
    return torch.optim.SGD(parameters, fused=True, **found)


class Lion(torch.optim.Optimizer):
    """Weights move by the sign of their momentum and gradient together, and stay where that is zero. DeepSpeed's kernels compute
    the same but there: they take a zero for negative on GPUs (multi_tensor_lion.cu), for what its sign bit says on CPU.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every group."""
        for group in self.param_groups:
            weights, (first, second) = group["params"], group["betas"]
            gradients, moments = [weight.grad for weight in weights], [self.state[weight]["exp_avg"] for weight in weights]
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            signs = torch._foreach_sign(torch._foreach_lerp(moments, gradients, 1 - first))
            torch._foreach_add_(weights, signs, alpha=-group["lr"])
            torch._foreach_lerp_(moments, gradients, 1 - second)


def _lion(parameters: Groups, settings: Settings) -> torch.optim.Optimizer:
    return Lion(parameters, {name: setting(settings, name) for name in ("lr", "betas", "weight_decay")})


_MAKE: Mapping[str, Callable[[Groups, Settings], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adam": _adam,
    "sgd": _sgd,
    "lion": _lion,
}
_STATE: Mapping[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lion": ("exp_avg",),
}
