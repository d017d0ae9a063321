"""What a script hands to `initialize` beside its model: parameters, an optimizer and a scheduler, as the engine takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from bridge.engine.optimizer import HYPER, Group
from bridge.errors import BridgeError, ConfigError
from bridge.findings import Finding
from bridge.plan import Optimizer as Settings
from bridge.rules import Effect
from compat.deepspeed.runtime.names.optimizers import FusedAdam

Optimizer = torch.optim.Optimizer

CLASSES: Mapping[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
"""Torch's classes of the update rules that the engine runs."""
CHOICE = "torch.optim.AdamW, Adam or SGD"
OFF = ("amsgrad", "maximize", "nesterov", "dampening", "differentiable")
"""Settings of these classes that the engine has only switched off."""


def made(settings: Settings, parameters: Iterable[Any]) -> Optimizer:
    """A torch optimizer over `parameters`, tensors or groups of them, that stands for what the engine does with them."""
    known = CLASSES[settings.name or "adamw"]
    hyper = {name: getattr(settings, name) for name in HYPER if getattr(settings, name) is not None}
    taken = known([nn.Parameter(torch.zeros(()))]).param_groups[0]
    return known(
        list(parameters), **{name: value for name, value in hyper.items() if name in taken}
    )


def given(optimizer: Any, parameters: Iterable[Any]) -> Optimizer:
    """The optimizer that a script passes, an instance or a function of parameters. Raises `ConfigError` if the engine has no
    such update rule.
    """
    found = (
        optimizer(list(parameters))
        if callable(optimizer) and not isinstance(optimizer, Optimizer)
        else optimizer
    )
    ConfigError.raise_if(_unfit(found))
    return found  # type: ignore[no-any-return]


def name_of(optimizer: Any) -> str | None:
    """The update rule of torch's or DeepSpeed's optimizer; None for one that the engine does not have."""
    if isinstance(optimizer, FusedAdam):
        return "adamw" if optimizer.defaults["decoupled_weight_decay"] else "adam"
    return next((name for name, known in CLASSES.items() if type(optimizer) is known), None)


def _unfit(optimizer: Any) -> Iterator[str]:
    if name_of(optimizer) is None:
        found = type(optimizer).__name__
        yield f"optimizer: found {found}; the engine updates slices of all weights by its own kernels; use {CHOICE}"
        return
    for number, group in enumerate(optimizer.param_groups):
        for name in OFF:
            if group.get(name):
                yield f"optimizer: group {number} has {name}={group[name]}, which the engine does not run; leave it out"


def settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's rule and the settings of its first group, as plan values by path."""
    name = name_of(optimizer)
    group = optimizer.param_groups[0]
    momentum = (
        {"momentum": max(group["momentum"] for group in optimizer.param_groups)}
        if name == "sgd"
        else {}
    )
    hyper = {name: group[name] for name in HYPER if name in group} | momentum
    return {
        "optimizer.name": name,
        **{f"optimizer.{key}": _plain(value) for key, value in hyper.items()},
    }


def _plain(value: Any) -> Any:
    return tuple(map(float, value)) if isinstance(value, list | tuple) else float(value)


def groups_of(optimizer: Optimizer, model: nn.Module) -> tuple[Group, ...]:
    """The optimizer's groups by names of the model's parameters; their settings stay those of the optimizer, live.

    Raises `ConfigError` for tensors that are not the model's.
    """
    names = {id(weight): name for name, weight in model.named_parameters()}
    strays = [
        weight
        for group in optimizer.param_groups
        for weight in group["params"]
        if id(weight) not in names
    ]
    if strays:
        raise ConfigError(
            f"model_parameters: {len(strays)} of the tensors are no parameters of the model, the first of shape"
            f" {tuple(strays[0].shape)}; put them into the model"
        )
    return tuple(
        Group(frozenset(names[id(weight)] for weight in group["params"]), group)
        for group in optimizer.param_groups
    )


def freeze_others(model: nn.Module, groups: Iterable[Group]) -> Iterator[Finding]:
    """Freeze parameters that no group names; a finding says how many."""
    named = frozenset[str]().union(*(group.names for group in groups))
    others = [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and name not in named
    ]
    for name in others:
        model.get_parameter(name).requires_grad_(False)
    if others:
        message = f"{others[0]} is not among them, so it is frozen" + (
            f" (and {len(others) - 1} more)" if others[1:] else ""
        )
        yield Finding("model_parameters", message, Effect.NONE, given=True)


def scheduled(scheduler: Any, optimizer: Optimizer) -> Any:
    """The scheduler that a script passes: an instance with `step`, or a function of the optimizer."""
    found = (
        scheduler
        if hasattr(scheduler, "step")
        else scheduler(optimizer)
        if callable(scheduler)
        else None
    )
    if found is None or not hasattr(found, "step"):
        raise ConfigError(
            f"lr_scheduler: found {type(scheduler).__name__}, expected an object with step(), or a function that makes one of"
            " the optimizer"
        )
    own = getattr(found, "optimizer", optimizer)
    if own is not optimizer:
        raise ConfigError(
            "lr_scheduler: it was made for another optimizer than the engine's; pass that optimizer too, or a function:"
            " lr_scheduler=lambda optimizer: ..."
        )
    return found


SLICES = "the optimizer's state lies in slices on all ranks"
REFUSED = {
    "add_param_group": "the engine's buffers are laid out once; pass all groups to initialize, or save_checkpoint and start anew",
    "state_dict": f"{SLICES}; engine.save_checkpoint(folder) keeps it, and engine.load_checkpoint brings it back",
    "load_state_dict": f"{SLICES}; engine.load_checkpoint(folder) brings back what engine.save_checkpoint kept",
}
"""Calls of the optimizer that a script sees which would be without effect, or tell what is not so."""


def guard(optimizer: Optimizer, stepping: Callable[[], bool]) -> None:
    """Have calls of `optimizer` that the engine could not follow raise `BridgeError`, also its `step` unless `stepping`."""
    for name, advice in REFUSED.items():
        setattr(optimizer, name, _refusing(f"optimizer.{name}: {advice}"))

    def stepped(*_: Any) -> None:
        if not stepping():
            raise BridgeError(
                "optimizer.step: the engine updates the weights; call engine.step() instead"
            )

    optimizer.register_step_pre_hook(stepped)


def _refusing(line: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise BridgeError(line)

    return refuse
