"""The optimizer: torch's fused kernels, run on the slices of weights that this rank owns, and
clipping by one norm over all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from bridge.engine.learning_rate import learning_rate
from bridge.errors import ConfigError
from bridge.layout.shard import FlatPiece
from bridge.plan.plan import Optimizer as Settings, Plan

DEFAULTS: Mapping[str, Any] = {
    "name": "adamw",
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "clip": 0.0,
}
"""Default values of the plan's optimizer fields."""
HALF = (torch.float16, torch.bfloat16)
"""Number formats whose elements are converted to fp32 before they are squared and summed. In the
format itself, the norm could overflow or lose digits.
"""
HYPER = ("lr", "betas", "eps", "momentum", "weight_decay")
"""Hyperparameters that a group of parameters may set to values of its own."""


def setting(settings: Settings, name: str) -> Any:
    """Return the value of the plan's optimizer field `name`, or the engine's default if the plan
    leaves it open.
    """
    value = getattr(settings, name)
    return DEFAULTS[name] if value is None else value


def rate_of_update(plan: Plan, steps: int) -> float:
    """Return the learning rate of the update after `steps` updates. Raises `ConfigError` if the
    schedule needs a number of steps that the plan does not set.
    """
    step = max(0, steps + (plan.habits.first_lr_step or 0))
    return learning_rate(setting(plan.optimizer, "lr"), plan.optimizer.schedule, step)


@dataclass(frozen=True)
class ParameterGroupSettings:
    """A group of parameters, by global name, with hyperparameters that override the plan's.

    `settings` is read at every step, so that a scheduler may change it. If the group sets no
    learning rate, the group's rate is the plan's rate times `rate`.
    """

    names: frozenset[str]
    settings: Mapping[str, Any]
    rate: float = 1.0


def groups_without_decay(
    module: nn.Module, settings: Settings
) -> tuple[ParameterGroupSettings, ...]:
    """If the plan restricts weight decay to matrices, return all other parameters (biases and
    norms) as a group without weight decay. With the scope `not_layernorm`, the group leaves out the
    weights of RMSNorm.
    """
    decays = settings.weight_decay or settings.decay_ramp.shape
    if settings.decay_scope not in ("matrices", "not_layernorm") or not decays:
        return ()
    names = {name for name, parameter in module.named_parameters() if parameter.ndim <= 1}
    if settings.decay_scope == "not_layernorm":
        for name, part in module.named_modules():
            # `rms` is the attribute of the engine's own norms, which are of either kind.
            if getattr(part, "rms", isinstance(part, nn.RMSNorm)):
                names.discard(f"{name}.weight")
    return (ParameterGroupSettings(frozenset(names), {"weight_decay": 0.0}),) if names else ()


def groups_of_file(
    rows: Sequence[Mapping[str, Any]], settings: Settings
) -> tuple[ParameterGroupSettings, ...]:
    """Return the parameter groups that a file describes (`bridge.checkpoint.groups`). A group's learning
    rate becomes a factor of the plan's rate, so that it follows the plan's schedule.
    """
    usual = setting(settings, "lr")
    return tuple(
        ParameterGroupSettings(
            frozenset(row["params"]),
            {
                name: tuple(row[name]) if name == "betas" else row[name]
                for name in HYPER
                if name in row and name != "lr"
            },
            row.get("lr", usual) / usual if usual else 1.0,
        )
        for row in rows
    )


def trainable_names(module: nn.Module) -> Iterator[str]:
    """Return the names of the parameters that are not frozen."""
    return (name for name, weight in module.named_parameters() if weight.requires_grad)


@dataclass(frozen=True, slots=True)
class SliceRun:
    """A range of elements in one slice that have the same hyperparameters: those of group number
    `group`, or the plan's if `group` is None.
    """

    slice: int
    group: int | None
    start: int
    stop: int
    name: str = ""
    """The parameter's name if the range is a single parameter."""


class ShardOptimizer:
    """Updates slices of master weights in place. The optimizer's state exists from the start, so
    that bytes and checkpoints are the same before and after the first step.

    `pieces` are the parts of parameters in each slice, and `groups` the groups of some of these
    parameters. If `make` is a `Whole`, slices have whole parameters, and the optimizer that it makes
    keeps its state.
    """

    def __init__(
        self,
        settings: Settings,
        masters: Sequence[Tensor],
        pieces: Sequence[Iterable[FlatPiece]],
        groups: Sequence[ParameterGroupSettings] = (),
        make: Make | None = None,
    ) -> None:
        name = setting(settings, "name")
        if make is None and name not in _RULES:
            raise ConfigError(
                f"optimizer.name: the engine does not support {name}; use one of {', '.join(_RULES)}"
            )
        self.groups = groups
        self._own = make is not None
        self._make: Make = make or partial(_own_rule, name, settings)
        self.whole = isinstance(make, Whole)
        initial = dict.fromkeys(_RULES[name][2], 0.0) if make is None else {}
        if make and not self.whole:
            initial = _first_state(make)[0]
        if make is None and name == "sgd" and not settings.momentum:
            initial = {}
        self.state_names = tuple(initial)
        # Torch updates a parameter as a whole, with one set of hyperparameters. A slice is
        # therefore divided into runs, each of which is a parameter of torch and a view of the
        # slice; so are the views of its moments.
        self._state = [
            {name: torch.full_like(master, value) for name, value in initial.items()}
            for master in masters
        ]
        self._masters = masters
        self._pieces = [tuple(parts) for parts in pieces]
        self._single = self.whole
        self.ahead = 0
        """Updates of the run that the moments have not seen, as its weights were loaded without them."""
        self.missed = Counter[str]()
        """Updates that left out a parameter, by its name, so that its moments have not seen them."""
        self._build()

    def lr(self, rate: float) -> float:
        """Return the learning rate to report for the next step: the rate of the first group, or
        `rate` if this group sets none.
        """
        return (
            float(self.groups[0].settings.get("lr", rate * self.groups[0].rate))
            if self.groups
            else rate
        )

    @torch.no_grad()
    def step(
        self,
        gradients: Sequence[Tensor],
        lr: float,
        decay: float | None = None,
        skip: AbstractSet[str] = frozenset(),
    ) -> None:
        """Update the weights once. `gradients` has a tensor for each slice. The learning rate `lr`
        and the weight decay `decay` hold for parameters whose group does not set them; if `decay`
        is None, the plan's value holds. Parameters with a name in `skip` stay as they are, as
        parameters without a gradient do in torch: neither decay nor momentum moves them.
        """
        if self.torch is None:
            return
        if skip and not self._single:
            self._divide()
        self.missed.update(skip)
        for group in self.torch.param_groups:
            number = group["number"]
            rate = lr if number is None else lr * self.groups[number].rate
            values = {"lr": rate} if decay is None else {"lr": rate, "weight_decay": decay}
            # The group's own settings come last, as they take precedence. Those that this optimizer
            # does not have are left out.
            settings = {} if number is None else self.groups[number].settings
            own = {name: settings[name] for name in HYPER if name in settings and name in group}
            if self._own:
                own = self._changes(number, settings)
                values = {name: value for name, value in values.items() if name not in settings}
            group.update({**values, **own})
        for run, parameter in zip(self.runs, self.parameters, strict=True):
            if run.name not in skip:
                gradient = gradients[run.slice][run.start : run.stop].to(parameter.dtype)
                parameter.grad = gradient.view(parameter.shape)
        self.torch.step()
        # They may be copies in the master format, which would otherwise stay in memory until the
        # next step.
        for parameter in self.parameters:
            parameter.grad = None

    def _changes(self, number: int | None, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a group that changed since the last update. The optimizer itself may
        change the others, as those do that find their own rate.
        """
        before = self._last.get(number, {})
        self._last[number] = {name: settings[name] for name in settings.keys() - {"params"}}
        return {
            name: value
            for name, value in self._last[number].items()
            if name not in before or (value is not before[name] and value != before[name])
        }

    def state(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of the optimizer's state for slice `index`, by name."""
        return self._state[index]

    def set_steps(self, steps: int, missed: Mapping[str, int] = MappingProxyType({})) -> None:
        """Set the number of updates that have been made, and how many of them left out a parameter. The
        bias correction of Adam's moments depends on those that a parameter has seen.
        """
        self.missed = Counter(missed)
        if missed and not self._single:
            self._single = True
            self._build()
        counts: dict[int, Mapping[str, float]] = {}
        for run, parameter in zip(self.runs, self.parameters, strict=True):
            seen = steps - self.missed[run.name]
            if seen not in counts and not self.whole:
                own = _first_state(self._make, seen)[1] if self._own else {"step": float(seen)}
                counts[seen] = own
            for name, value in counts.get(seen, {}).items():
                if self.torch is not None and name in self.torch.state[parameter]:
                    self.torch.state[parameter][name].fill_(value)

    def tensors(self) -> Iterable[Tensor]:
        """Return all tensors of the optimizer's state that are as large as their slices."""
        return (tensor for state in self._state for tensor in state.values())

    def _build(self) -> None:
        """Make the ranges and torch's optimizer, which begins with no updates made."""
        numbers = {name: number for number, group in enumerate(self.groups) for name in group.names}
        self.runs = [
            run
            for index, parts in enumerate(self._pieces)
            for run in _runs(index, parts, numbers, self._single)
        ]
        shapes = {
            one.parameter.name: one.parameter.shape for parts in self._pieces for one in parts
        }
        self.parameters = [
            nn.Parameter(
                self._masters[run.slice][run.start : run.stop].view(
                    shapes[run.name] if self.whole else -1
                )
            )
            for run in self.runs
        ]
        self.torch = self._make(self._torch_groups()) if self.runs else None
        self._last: dict[int | None, dict[str, Any]] = {}
        if self.whole:
            return
        counts = _first_state(self._make, 0)[1] if self._own else {"step": 0.0}
        for run, parameter in zip(self.runs, self.parameters, strict=True):
            self._prepare(run, parameter, counts)

    def _divide(self) -> None:
        """Make each parameter a range of its own, so that it can be left out of an update."""
        states = () if self.torch is None else self.torch.state.values()
        steps = max((int(state["step"]) for state in states if "step" in state), default=0)
        self._single = True
        self._build()
        self.set_steps(steps)

    def _torch_groups(self) -> list[dict[str, Any]]:
        """Return parameter groups for torch's optimizer. What torch's optimizer takes as a
        parameter is here a range of a slice. `number` is the index of the engine's own group, or
        None for ranges without a group.
        """
        groups: dict[int | None, list[nn.Parameter]] = {}
        for run, parameter in zip(self.runs, self.parameters, strict=True):
            groups.setdefault(run.group, []).append(parameter)
        return [{"params": parameters, "number": number} for number, parameters in groups.items()]

    def _prepare(self, run: SliceRun, parameter: nn.Parameter, counts: Mapping[str, float]) -> None:
        assert self.torch is not None
        state = self.torch.state[parameter]
        if self._own or "exp_avg" in self.state_names:
            for name, value in counts.items():
                state[name] = torch.full((), value, dtype=torch.float32, device=parameter.device)
        for name, whole in self._state[run.slice].items():
            state[name] = whole[run.start : run.stop]


def _runs(
    index: int, pieces: Iterable[FlatPiece], numbers: Mapping[str, int], single: bool
) -> Iterator[SliceRun]:
    """Yield the longest ranges of slice `index` in which all parameters belong to the same group, or
    each parameter by itself if `single`. `numbers` has the group of each parameter.
    """

    def key(piece: FlatPiece) -> tuple[int | None, str]:
        return numbers.get(piece.parameter.name), piece.parameter.name if single else ""

    for (number, name), members in groupby(pieces, key):
        parts = list(members)
        first, last = parts[0], parts[-1]
        yield SliceRun(index, number, first.offset, last.offset + last.stop - last.start, name)


def sum_of_squares(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements in `parts`, a scalar in fp64 on the same
    device. If an element is infinite or NaN, so is the result.
    """
    by_format: dict[torch.dtype | None, list[Tensor]] = {}
    for part in parts:
        by_format.setdefault(torch.float32 if part.dtype in HALF else None, []).append(part)
    # One kernel for all parts of a format. Norms of parts are squared in fp64, so that only their
    # own sums round.
    norms = [
        torch.stack(torch._foreach_norm(alike, 2, dtype=dtype)).double()
        for dtype, alike in by_format.items()
    ]
    return torch.cat(norms).square().sum()


def clip_factor(norm: float, clip: float) -> float:
    """Return the factor by which gradients with the global norm `norm` are multiplied, so that
    their norm does not exceed `clip` (0: no limit).
    """
    # The same 1e-6 as in torch (_clip_grads_with_norm_), Megatron (clip_grad_by_total_norm_fp32)
    # and DeepSpeed.
    return min(1.0, clip / (norm + 1e-6)) if clip else 1.0


Groups = list[dict[str, Any]]
Make = Callable[[Groups], torch.optim.Optimizer]


@dataclass(frozen=True)
class Whole:
    """Makes an optimizer that updates whole parameters, in their own shapes, and keeps its own state."""

    make: Make

    def __call__(self, groups: Groups) -> torch.optim.Optimizer:
        """Return the optimizer of these groups."""
        return self.make(groups)


COUNTS: Mapping[str, float] = {"step": 0.0, "mu_product": 1.0}
"""State of a whole parameter, which follows from the number of updates, with its first value."""


def _first_state(make: Make, steps: int = 1) -> tuple[dict[str, float], dict[str, float]]:
    """Return the state that an optimizer keeps for each element, with its first values, and the
    counts of a parameter after `steps` updates. Raises `ConfigError` for any other state.
    """
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer, weight.grad = make([{"params": [weight]}]), torch.zeros_like(weight)
    # A weight and gradients of 0 leave all that is kept for an element as it begins.
    for _ in range(max(steps, 1)):
        optimizer.step()
    state = {name: value for name, value in optimizer.state[weight].items() if value is not None}
    counts = {
        name: float(state.pop(name)) if steps else first
        for name, first in COUNTS.items()
        if name in state
    }
    state = {name: value for name, value in state.items() if name not in COUNTS}
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.shape != weight.shape:
            raise ConfigError(f"its state {name!r} is not one number for each element")
    return {name: float(value) for name, value in state.items()}, counts


class Lion(torch.optim.Optimizer):
    """Lion: a weight moves by the sign of a mix of momentum and gradient, and stays if the mix is
    zero.

    DeepSpeed's kernels differ only for a mix of zero: on GPUs it counts as negative
    (multi_tensor_lion.cu), and on a CPU its sign bit decides.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights of every group once."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            first, second = group["betas"]
            if not weights:
                continue
            gradients, moments = (
                [weight.grad for weight in weights],
                [self.state[weight]["exp_avg"] for weight in weights],
            )
            # The sign is of (1 - first) * gradient + first * moment, before the moment takes the
            # gradient in by `second`.
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            signs = torch._foreach_sign(torch._foreach_lerp(moments, gradients, 1 - first))
            torch._foreach_add_(weights, signs, alpha=-group["lr"])
            torch._foreach_lerp_(moments, gradients, 1 - second)


_ADAM = ("lr", "betas", "eps", "weight_decay"), ("exp_avg", "exp_avg_sq")
_RULES: Mapping[
    str, tuple[Callable[..., torch.optim.Optimizer], tuple[str, ...], tuple[str, ...]]
] = {
    "adamw": (partial(torch.optim.AdamW, fused=True), *_ADAM),
    "adam": (partial(torch.optim.Adam, fused=True), *_ADAM),
    "sgd": (
        partial(torch.optim.SGD, fused=True),
        ("lr", "momentum", "weight_decay"),
        ("momentum_buffer",),
    ),
    "lion": (
        lambda groups, **options: Lion(groups, options),
        ("lr", "betas", "weight_decay"),
        ("exp_avg",),
    ),
}
"""The engine's own rules: how each is made, its settings, and what it keeps for each element."""


def _own_rule(name: str, settings: Settings, groups: Groups) -> torch.optim.Optimizer:
    make, options, _ = _RULES[name]
    return make(groups, **{option: setting(settings, option) for option in options})
