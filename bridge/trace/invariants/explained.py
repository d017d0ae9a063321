"""Invariant of torch's own optimizers: an update is the one that the optimizer's rule gives for
the gradient, state and settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bridge.trace import naming
from bridge.trace.findings import TraceFinding
from bridge.trace.invariants.check import NOTHING, Check, few_names, is_thorough
from bridge.trace.invariants.sketch import sample_tensor
from bridge.trace.module import ModuleSource
from bridge.trace.sharding import local_gradient, local_part

TOLERANCE = 1e-3
"""Largest difference between an update and the computed update, divided by the computed update."""
FORMATS = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Before:
    """Sampled elements of a parameter, of its gradient and of its first moment, all before the
    update, and the parameter's step count.
    """

    weight: Tensor
    gradient: Tensor
    first: Tensor | None
    """Adam's first moment."""
    step: float


class Explained(Check):
    """Each update of `Adam`, `AdamW` or `SGD` is the one that the optimizer's rule gives. This is
    checked with sampled elements of the weights from before and after the step.

    Subclasses of these optimizers are left out, because they may have other rules.
    """

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        self.before: dict[str, Before] = {}
        self.odd: dict[str, str] = {}

    def row(self, step: int) -> Tensor:
        self.before, self.odd = {}, {}
        if not self.source.plain or self.source.late or not is_thorough(step):
            return NOTHING
        owners = self._owners(range(len(self.source.optimizers)))
        for name, weight in naming.parameters_by_name(self.source.module).items():
            gradient = local_gradient(weight)
            if (
                id(weight) in owners
                and gradient is not None
                and weight.dtype in FORMATS
                and local_part(weight).numel()
            ):
                state = owners[id(weight)][0].state.get(weight, {})
                first = state.get("exp_avg")
                self.before[name] = Before(
                    sample_tensor(local_part(weight)),
                    sample_tensor(gradient),
                    None if first is None else sample_tensor(local_part(first)),
                    float(state.get("step", 0)),
                )
        return NOTHING

    def _owners(self, numbers: Iterable[int]) -> dict[int, tuple[Any, Mapping[str, Any]]]:
        """Return the optimizer and the parameter group that update each parameter, by the
        parameter's id. `numbers` are the indices of the optimizers to look at. An optimizer counts
        only if it updates by a rule in `RULES`.
        """
        return {
            id(weight): (optimizer, group)
            for optimizer in map(self.source.optimizers.__getitem__, numbers)
            # With `grad_scale` set by a GradScaler, a fused step divides the gradients itself.
            if type(optimizer) in RULES and getattr(optimizer, "grad_scale", None) is None
            for group in optimizer.param_groups
            for weight in group["params"]
        }

    def later(self, step: int) -> Tensor:
        if self.before:
            parameters, owners = (
                naming.parameters_by_name(self.source.module),
                self._owners(self.source.moving),
            )
            for name, before in self.before.items():
                weight = parameters.get(name)
                if weight is not None and id(weight) in owners:
                    self._compare_change(name, weight, before, *owners[id(weight)])
        return NOTHING

    def _compare_change(
        self,
        name: str,
        weight: nn.Parameter,
        before: Before,
        optimizer: Any,
        group: Mapping[str, Any],
    ) -> None:
        state = optimizer.state.get(weight, {})
        now = sample_tensor(local_part(weight))
        after = local_gradient(weight)
        gradients = [before.gradient] + ([] if after is None else [sample_tensor(after)])
        if now.shape != before.weight.shape or not bool(torch.isfinite(before.gradient).all()):
            return
        # A step too many, or none, is found by others; one that is left out leaves no state.
        if (
            RULES[type(optimizer)] is _adam_change
            and float(state.get("step", 0)) != before.step + 1
        ):
            return
        answers = [RULES[type(optimizer)](group, state, before, gradient) for gradient in gradients]
        change = now - before.weight
        # How far rounding of the weight itself may be off: it may be more than the update.
        size = torch.finfo(now.dtype).eps * float(before.weight.abs().max())
        # A hook that runs after ours may still change the gradient: one of both has to explain it.
        bounds = [TOLERANCE * answer.abs().max() + 16 * size for answer in answers]
        pairs = zip(answers, bounds, strict=True)
        if all(bool(((change - answer).abs() > bound).any()) for answer, bound in pairs):
            worst = max(float((change - answer).abs().max()) for answer in answers)
            largest = float(change.abs().max())
            self.odd[name] = (
                f"{name} changes by {largest:.2g}, up to {worst:.2g} away from the computed change"
            )

    def local(self, step: int) -> Iterator[TraceFinding]:
        if self.odd:
            names = list(self.odd)
            count = f"{len(names)} of {len(self.before)} updates are not as computed: {few_names(names)}"
            evidence = f"{count}; {self.odd[names[0]]}"
            yield TraceFinding("update-unexplained", step, names[0], evidence)


def _adam_change(
    group: Mapping[str, Any], state: Mapping[str, Any], before: Before, gradient: Tensor
) -> Tensor:
    """Return the change that Adam makes to a weight. `state` is the state after the step, which
    gives the second moment. The first moment is computed from `before` and the gradient.
    """
    rate, decay, step = float(group["lr"]), float(group["weight_decay"]), float(state["step"])
    beta, other = map(float, group["betas"])
    # torch's AdamW is Adam with this setting: decay goes beside the gradient, not into it.
    apart = bool(group.get("decoupled_weight_decay"))
    direction = -gradient if group.get("maximize") else gradient
    direction = direction if apart else direction + decay * before.weight
    old = torch.zeros_like(direction) if before.first is None else before.first
    # From before, not read after the step: so a moment that came out wrong is found too.
    first = beta * old + (1 - beta) * direction
    second = sample_tensor(
        local_part(state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"])
    )
    size = second.sqrt() / (1 - other**step) ** 0.5 + float(group["eps"])
    answer: Tensor = first / (1 - beta**step) / size
    return -rate * (answer + decay * before.weight if apart else answer)


def _sgd_change(
    group: Mapping[str, Any], state: Mapping[str, Any], before: Before, gradient: Tensor
) -> Tensor:
    """Return the change that SGD makes to a weight."""
    direction = (-gradient if group.get("maximize") else gradient) + float(
        group["weight_decay"]
    ) * before.weight
    buffer = state.get("momentum_buffer")
    if buffer is None or not group["momentum"]:
        return -float(group["lr"]) * direction
    moment = sample_tensor(local_part(buffer))
    return -float(group["lr"]) * (
        direction + float(group["momentum"]) * moment if group.get("nesterov") else moment
    )


RULES: Mapping[Any, Any] = {
    torch.optim.Adam: _adam_change,
    torch.optim.AdamW: _adam_change,
    torch.optim.SGD: _sgd_change,
}
"""The optimizers whose updates are checked, each with the function that computes the change of a
weight's sampled elements.
"""
