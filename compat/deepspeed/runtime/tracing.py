"""A real DeepSpeed engine as a source of traces, whatever its ZeRO level; the engine stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from bridge.trace.module import ModuleSource
from bridge.trace.record import Unit
from bridge.trace.source import Held, Kind


def takes(target: Any) -> bool:
    """Whether `target` is what `deepspeed.initialize` returns."""
    return hasattr(target, "is_gradient_accumulation_boundary")


def source_of(engine: Any, optimizer: Any, accumulation: int | None) -> DeepSpeedSource:
    """What `bridge.trace.attach` is told of an engine. The engine knows its optimizer and how many microbatches a step has."""
    return DeepSpeedSource(engine)


class DeepSpeedSource(ModuleSource):
    """Tells traces of a `deepspeed.DeepSpeedEngine`.

    Weights are the fp32 ones that the optimizer updates. Under ZeRO, parts are put together by DeepSpeed's own
    `deepspeed.utils.safe_get_full_*`, in which all ranks take part.
    """

    strict = True

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._norm: float | None = None
        super().__init__(engine, engine.optimizer, engine.gradient_accumulation_steps())

    @property
    @override
    def plain(self) -> bool:
        """DeepSpeed moves gradients into buffers of its own."""
        return False

    @property
    @override
    def at_hand(self) -> bool:
        """Under ZeRO, DeepSpeed puts parts together between ranks."""
        return not self.engine.zero_optimization()

    def watch(self) -> None:
        """Under ZeRO, gradients are whole where `engine.step` begins, and nowhere else."""
        step = self.engine.step

        def watched(*arguments: Any, **named: Any) -> Any:
            boundary = self.engine.is_gradient_accumulation_boundary()
            if boundary:
                self._norm = self._own_norm()
                self.before()
            result = step(*arguments, **named)
            if boundary:
                self.after()
            return result

        self.engine.step = watched

    @override
    def factors(self) -> Mapping[Unit, float]:
        """DeepSpeed divides the loss by the number of microbatches, and multiplies it with its loss scale.
        Gradients are those after clipping, which it does within its step.
        """
        scale = getattr(self.engine.optimizer, "loss_scale", 1.0) or 1.0
        found = {unit: factor / float(scale) for unit, factor in super().factors().items()}
        norm, clip = (
            self._norm or self.engine.get_global_grad_norm(),
            float(self.engine.gradient_clipping() or 0.0),
        )
        if clip and norm is not None:
            found["parameter"] *= min(1.0, clip / (float(norm) + 1e-6))
        return found

    def _own_norm(self) -> float | None:
        """The norm by which DeepSpeed will clip where it tells none: without ZeRO, where gradients are whole by now."""
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
                    self.held(name, kind, "", value.detach())
                    for name, value in self.model.named_parameters()
                )
        else:
            yield from super().tensors(kind)

    def held(self, name: str, kind: str, part: str, tensor: Tensor) -> Held:
        """What was just put together of parts is no replica that could differ."""
        found = super().held(name, kind, part, tensor)
        apart = self.engine.zero_optimization() and kind not in ("replica", "buffer")
        return replace(found, placement=replace(found.placement, replicas=())) if apart else found

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
            found = {
                name: safe_get_full_optimizer_state(parameter, name) for name in self._moments()
            }
        else:
            found = {
                "": {"weight": safe_get_full_fp32_param, "gradient": safe_get_full_grad}[kind](
                    parameter
                )
            }
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _link(self, parameter: nn.Parameter) -> None:
        """DeepSpeed ties its states to parameters after the step of the first group, where others have none yet: do so here."""
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
        found = {
            name
            for state in states
            for name, value in state.items()
            if isinstance(value, Tensor) and value.dim()
        }
        return tuple(sorted(found))
