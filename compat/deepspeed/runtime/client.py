"""Checks the parameters, the optimizer and the scheduler that a script passes to `initialize`, and
converts them for the native engine.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from bridge.engine.optimizer import HYPER, Make, ParameterGroupSettings, Whole
from bridge.engine.own_rules import rule_of_instance
from bridge.errors import BridgeError, ConfigError
from bridge.plan.plan import Optimizer as Settings, Plan
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from compat.deepspeed.runtime.names.optimizers import FusedAdam

Optimizer = torch.optim.Optimizer

CLASSES: Mapping[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
"""The torch optimizer class for each update rule that the engine has."""
OFF = ("amsgrad", "maximize", "nesterov", "dampening", "differentiable")
"""Switches of the classes in `CLASSES` with which the class itself runs, and not the engine's kernel."""
DECOUPLED = "decoupled_weight_decay"
"""Switch of torch's Adam by which weight decay is not added to the gradients."""


def make_optimizer(settings: Settings, parameters: Iterable[Any]) -> Optimizer:
    """Return a torch optimizer with these `settings` over `parameters` (tensors or groups). The
    script gets this optimizer, but the engine computes the updates.
    """
    cls = CLASSES[settings.name or "adamw"]
    hyper = {name: getattr(settings, name) for name in HYPER if getattr(settings, name) is not None}
    defaults = cls([nn.Parameter(torch.zeros(()))]).param_groups[0]
    return cls(
        list(parameters), **{name: value for name, value in hyper.items() if name in defaults}
    )


def optimizer_of_script(optimizer: Any, parameters: Iterable[Any]) -> Optimizer:
    """Return the script's optimizer. `optimizer` is an instance, or a function that makes an
    optimizer from the parameters. Raises `ConfigError` if it is none, or has made updates.
    """
    made = (
        optimizer(list(parameters))
        if callable(optimizer) and not isinstance(optimizer, Optimizer)
        else optimizer
    )
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"optimizer: found {type(made).__name__}, expected a torch.optim.Optimizer"
        )
    # Adagrad makes its state before the first step, with a count of 0.
    if any(float(state.get("step", 1)) for state in made.state.values()):
        raise ConfigError(
            "optimizer: found state of earlier steps, but the engine starts with none; pass an"
            " optimizer that has made no step, and restore a run by engine.load_checkpoint(folder)"
        )
    return made


def name_of(optimizer: Optimizer) -> str | None:
    """Return the name of the engine's update rule that is an optimizer's; None if it is none of them."""
    groups = optimizer.param_groups
    if any(group.get(name) for group in groups for name in OFF):
        return None
    if isinstance(optimizer, FusedAdam) or type(optimizer) in (torch.optim.AdamW, torch.optim.Adam):
        modes = {bool(group.get(DECOUPLED)) for group in groups}
        names = {True: "adamw", False: "adam"}
        return names[modes.pop()] if len(modes) == 1 else None
    return next((name for name, cls in CLASSES.items() if type(optimizer) is cls), None)


def rule_of(optimizer: Optimizer, plan: Plan) -> tuple[Make | None, dict[str, Any], list[Finding]]:
    """Return how the engine makes the optimizer of a script, None for one of the engine's own rules;
    plan values that change with it; and findings. A rule that needs whole parameters runs at ZeRO 0,
    which stage 1 becomes. Raises `ConfigError` if the plan divides parameters, or the engine cannot
    run the optimizer.
    """
    if name_of(optimizer) is not None:
        return None, {}, []
    make = rule_of_instance(optimizer)
    stage, parallel = plan.zero.effective_stage or 0, plan.parallel
    if not isinstance(make, Whole):
        return make, {}, []
    group, name = optimizer.param_groups[0], type(optimizer).__name__
    on = [switch for switch in OFF if group.get(switch) and type(optimizer) in CLASSES.values()]
    name += "".join(f" with {switch}={group[switch]}" for switch in on)
    other = f"leave {' and '.join(on)} out" if on else "use torch.optim.AdamW, Adam or SGD"
    if stage > 1 or (parallel.tensor or 1) * (parallel.pipeline or 1) > 1:
        raise ConfigError(
            f"optimizer: found {name}, whose rule needs whole parameters, but ZeRO {stage} or the"
            " parallel ranks divide them; set zero_optimization.stage to 0 or 1 and use data ranks"
            f" alone, or {other}"
        )
    # runtime/zero/stage_1_and_2.py: its optimizer gets one flat tensor of each group.
    message = (
        f"{name} needs whole parameters: the engine updates them as torch does, at ZeRO 0; DeepSpeed"
        " applies the rule to a flat vector of all of them, with other numbers. Both agree at stage 0"
    )
    cost = [Finding("zero_optimization.stage", message, Effect.NUMBERS, True, before=stage)]
    return make, {"zero.stage": 0}, cost if stage else []


def settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's update rule and the settings of its first group, as plan values by
    path. Of a rule that is none of the engine's, the rate alone: the optimizer has its settings.
    """
    name = name_of(optimizer)
    group = optimizer.param_groups[0]
    if name is None:
        return {"optimizer.lr": float(group["lr"])} if "lr" in group else {}
    momentum = (
        {"momentum": max(group["momentum"] for group in optimizer.param_groups)}
        if name == "sgd"
        else {}
    )
    hyper = {name: group[name] for name in HYPER if name in group} | momentum
    return {
        "optimizer.name": name,
        **{
            f"optimizer.{key}": (
                tuple(map(float, value)) if isinstance(value, list | tuple) else float(value)
            )
            for key, value in hyper.items()
        },
    }


def groups_of(optimizer: Optimizer, model: nn.Module) -> tuple[ParameterGroupSettings, ...]:
    """Return the optimizer's groups with the names that their parameters have in the model. Each
    group shares the optimizer's own dictionary of settings, so that later changes to the settings
    take effect. Raises `ConfigError` for tensors that do not belong to the model.
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
            f"model_parameters: found {len(strays)} tensors that are not in the model, the first"
            f" of shape {tuple(strays[0].shape)}; register them in the model"
        )
    return tuple(
        ParameterGroupSettings(frozenset(names[id(weight)] for weight in group["params"]), group)
        for group in optimizer.param_groups
    )


def freeze_others(model: nn.Module, groups: Iterable[ParameterGroupSettings]) -> Iterator[Finding]:
    """Freeze the parameters that are in no group. If there are any, yield a finding with their
    number.
    """
    names = frozenset[str]().union(*(group.names for group in groups))
    others = [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and name not in names
    ]
    for name in others:
        model.get_parameter(name).requires_grad_(False)
    if others:
        more = f" and {len(others) - 1} more parameters" if others[1:] else ""
        message = (
            f"the engine freezes {others[0]}{more} of the model, because model_parameters does not"
            " contain them"
        )
        yield Finding("model_parameters", message, Effect.NONE, given=True)


def scheduler_of_script(scheduler: Any, optimizer: Optimizer) -> Any:
    """Return the script's scheduler. `scheduler` is an object with `step`, or a function that makes
    such an object from the optimizer.
    """
    instance = (
        scheduler
        if hasattr(scheduler, "step")
        else scheduler(optimizer)
        if callable(scheduler)
        else None
    )
    if instance is None or not hasattr(instance, "step"):
        raise ConfigError(
            f"lr_scheduler: found {type(scheduler).__name__}, expected an object with step(), or"
            " a function that makes such an object from the optimizer"
        )
    own = getattr(instance, "optimizer", optimizer)
    if own is not optimizer:
        raise ConfigError(
            "lr_scheduler: the scheduler belongs to another optimizer; pass that optimizer"
            " to initialize too, or pass a function: lr_scheduler=lambda optimizer: ..."
        )
    return instance


def _refusing(line: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise BridgeError(line)

    return refuse


SLICES = "the optimizer's state is sharded over all ranks"
_NO_STATE = (
    f"{SLICES}; read it by deepspeed.utils.safe_get_full_optimizer_state(parameter, 'exp_avg'), write it by"
    " safe_set_full_optimizer_state, and save and restore it with the engine's checkpoints"
)


class AbsentState(defaultdict[Any, Any]):
    """Stands for the `state` of an optimizer whose state the engine has: to read or write it is an error."""

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __len__ = __iter__ = _refusing(
        f"optimizer.state: {_NO_STATE}"
    )
    keys = values = items = get = clear = pop = setdefault = update = __getitem__


REFUSED = {
    "add_param_group": (
        "the layout of the engine's buffers is fixed; pass all groups to initialize, or save a"
        " checkpoint and restart with all groups"
    ),
    "state_dict": (
        f"{SLICES}; save the state with engine.save_checkpoint(folder), and restore the state"
        " with engine.load_checkpoint(folder)"
    ),
    "load_state_dict": (
        f"{SLICES}; restore the state with engine.load_checkpoint(folder) from a checkpoint that"
        " engine.save_checkpoint wrote"
    ),
}
"""Methods of an optimizer that must not be called, because they would have no effect or return
wrong state. Each has advice for the user, which the error shows.
"""


def guard(optimizer: Optimizer, stepping: Callable[[], bool]) -> Callable[[str], None]:
    """Make the optimizer's methods in `REFUSED` and reading its state raise `BridgeError`. Make `step` raise
    `BridgeError` too, except while `stepping()` is true, which means that the engine itself calls
    `step`. Return a function that takes all of this away, when the engine ends.
    """
    for name, advice in REFUSED.items():
        setattr(optimizer, name, _refusing(f"optimizer.{name}: {advice}"))

    def refuse_step(*_: Any) -> None:
        if not stepping():
            raise BridgeError(
                "optimizer.step: the engine updates the weights; call engine.step() instead of"
                " optimizer.step()"
            )

    hook, before = optimizer.register_step_pre_hook(refuse_step), optimizer.state
    optimizer.state = AbsentState()

    def free(_: str) -> None:
        hook.remove()
        optimizer.state = before
        for name in REFUSED:
            vars(optimizer).pop(name, None)

    return free


def prepare_step(optimizer: Optimizer) -> None:
    """Run the hooks ahead of an optimizer's `step`, which may change gradients, before the engine's update."""
    if not isinstance(optimizer.state, AbsentState):
        raise BridgeError(f"optimizer.state: found another one, but {_NO_STATE}")
    for hook in [*optimizer._optimizer_step_pre_hooks.values()]:
        hook(optimizer, (), {})


def announce_step(optimizer: Optimizer) -> None:
    """Run the hooks behind an optimizer's `step` after the engine's update. For one of the engine's rules,
    `step` itself runs them: it changes no weights, which have no gradients now. Others may.
    """
    if name_of(optimizer) is not None:
        ahead, optimizer._optimizer_step_pre_hooks = (
            optimizer._optimizer_step_pre_hooks,
            OrderedDict(),
        )
        try:
            optimizer.step()
        finally:
            optimizer._optimizer_step_pre_hooks = ahead
        return
    optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it
    for hook in [*optimizer._optimizer_step_post_hooks.values()]:
        hook(optimizer, (), {})
