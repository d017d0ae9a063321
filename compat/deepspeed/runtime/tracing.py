"""Traces a real DeepSpeed engine at any ZeRO level, without changes to DeepSpeed's code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from bridge.trace import naming
from bridge.trace.module import SHORT, ModuleSource
from bridge.trace.record import Unit
from bridge.trace.source import Held, Kind


def takes(target: Any) -> bool:
    """Return whether `target` is an engine that `deepspeed.initialize` returned."""
    return hasattr(target, "is_gradient_accumulation_boundary")


def source_of(engine: Any, optimizer: Any, accumulation: int | None) -> DeepSpeedSource:
    """Return the source of traces for an engine. `optimizer` and `accumulation` are ignored,
    because the engine itself knows both.
    """
    return DeepSpeedSource(engine)


class DeepSpeedSource(ModuleSource):
    """A source of traces from a `deepspeed.DeepSpeedEngine`. Traced weights are the fp32 weights
    that the optimizer updates. Under ZeRO, DeepSpeed's own `deepspeed.utils.safe_get_full_*` joins
    weights, moments and gradients from all ranks, so all ranks must take part.
    """

    strict = True

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._norm: float | None = None
        super().__init__(engine, engine.optimizer, engine.gradient_accumulation_steps())

    @property
    @override
    def plain(self) -> bool:
        """Return False, because DeepSpeed moves gradients into its own buffers."""
        return False

    @property
    @override
    def at_hand(self) -> bool:
        """Return whether this rank has whole tensors without communication. Under ZeRO this is
        false, because DeepSpeed joins tensors from the parts of all ranks.
        """
        return not self.engine.zero_optimization()

    def watch(self) -> None:
        """Wrap `engine.step`, so that gradients are traced at its beginning, the only time at which
        they are whole under ZeRO.
        """
        step, backward = self.engine.step, self.engine.backward

        def note_scale(*arguments: Any, **keywords: Any) -> Any:
            self.divides = keywords.get("scale_wrt_gas", True)
            return backward(*arguments, **keywords)

        def step_and_report(*arguments: Any, **keywords: Any) -> Any:
            boundary = self.engine.is_gradient_accumulation_boundary()
            if boundary:
                self._norm = self._own_norm()
                self.before()
            result = step(*arguments, **keywords)
            if boundary:
                self.after()
            return result

        self.engine.step, self.engine.backward = step_and_report, note_scale

    @override
    def factors(self) -> Mapping[Unit, float]:
        """Return the factors that make traced numbers comparable with other stacks.

        DeepSpeed divides the loss by the number of microbatches, multiplies it by the loss scale,
        and clips gradients within the step.
        """
        scale = getattr(self.engine.optimizer, "loss_scale", 1.0) or 1.0
        factors = {unit: factor / float(scale) for unit, factor in super().factors().items()}
        factors["parameter"] *= self.clip or 1.0
        return factors

    @property
    def loss_share(self) -> float:
        """What the loss has more than gradients of weights: clipping does not multiply it."""
        return 1.0 / (self.clip or 1.0)

    @property
    def clip(self) -> float | None:
        """The factor by which DeepSpeed's clipping multiplied all gradients of the step that ends;
        None if DeepSpeed does not tell the norm.
        """
        clip = float(self.engine.gradient_clipping() or 0.0)
        if not clip:
            return 1.0
        norm = self._norm or self.engine.get_global_grad_norm()
        return None if norm is None else min(1.0, clip / (float(norm) + 1e-6))

    def _own_norm(self) -> float | None:
        """Return the gradient norm by which DeepSpeed will clip. Without ZeRO, DeepSpeed reports
        this norm too late, so the norm is computed here from the whole gradients. Return None under
        ZeRO or without clipping.
        """
        if self.engine.zero_optimization() or not self.engine.gradient_clipping():
            return None
        norms = [
            weight.grad.float().norm()
            for weight in self.model.parameters()
            if weight.grad is not None
        ]
        return float(torch.stack(norms).norm()) if norms else None

    @override
    def tensors(self, kind: Kind) -> Iterator[Held]:
        if kind == "replica":
            if self.engine.zero_optimization_stage() in (1, 2):
                yield from (
                    self.local_tensor(name, kind, "", value.detach())
                    for name, value in self.model.named_parameters()
                )
        else:
            yield from super().tensors(kind)

    def local_tensor(self, name: str, kind: str, part: str, tensor: Tensor) -> Held:
        """Return a tensor with its placement, for the trace. Under ZeRO a tensor that DeepSpeed
        just joined from all ranks has no replicas.
        """
        entry = super().local_tensor(name, kind, part, tensor)
        apart = self.engine.zero_optimization() and kind not in ("replica", "buffer")
        return replace(entry, placement=replace(entry.placement, replicas=())) if apart else entry

    @override
    def of(self, kind: Kind, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        from deepspeed.utils import (
            safe_get_full_fp32_param,
            safe_get_full_grad,
            safe_get_full_optimizer_state,
        )

        if not self.engine.zero_optimization():
            return super().of(kind, parameter)
        self._link(parameter)
        if kind == "moment":
            tensors = {
                name: safe_get_full_optimizer_state(parameter, name) for name in self._moments()
            }
        else:
            tensors = {
                "": {"weight": safe_get_full_fp32_param, "gradient": safe_get_full_grad}[kind](
                    parameter
                )
            }
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @override
    def casts(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Return the parts of 16-bit weights whose fp32 masters this rank owns, each with them.
        Masters that are swapped to a disk are left out.
        """
        optimizer, found = self.engine.optimizer, {}
        swaps = getattr(optimizer, "swap_optimizer", False)
        for name, weight in naming.parameters_by_name(self.module).items():
            mapping = getattr(weight, "_hp_mapping", None)
            pair = None
            if mapping is not None:
                pair = mapping.lp_fragment, mapping.hp_fragment
            elif hasattr(weight, "ds_tensor") and weight.requires_grad and not swaps:
                pair = weight.ds_tensor, optimizer.get_local_fp32_param(weight)
            if pair and pair[0].dtype in SHORT and pair[0].numel() == pair[1].numel():
                found[name] = pair
        return found

    def _link(self, parameter: nn.Parameter) -> None:
        """Link the optimizer's state to `parameter`. DeepSpeed itself links the state only after
        the step of the first group, when other groups have no state yet.
        """
        mapping = getattr(parameter, "_hp_mapping", None)
        partitions = getattr(self.engine.optimizer, "single_partition_of_fp32_groups", None)
        if mapping is not None and partitions is not None and mapping.optim_fragment == {}:
            flat = partitions[mapping.param_group_index]
            mapping.set_optim_state_fragment(flat, self.engine.optimizer.optimizer.state[flat])

    @override
    def settings(self) -> Mapping[str, object]:
        return {
            **super().settings(),
            "zero_optimization.stage": self.engine.zero_optimization_stage(),
        }

    def _moments(self) -> tuple[str, ...]:
        states = self.engine.optimizer.optimizer.state.values()
        names = {
            name
            for state in states
            for name, value in state.items()
            if isinstance(value, Tensor) and value.dim()
        }
        return tuple(sorted(names))
