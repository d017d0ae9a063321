"""The tracer: hooks on a source's layers and steps that feed its log and its checks. Level 0 installs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bridge.plan import Debug
from bridge.trace.log import Log
from bridge.trace.placement import Placement
from bridge.trace.record import Name
from bridge.trace.source import Kind, Now, Source


@dataclass(frozen=True)
class Filter:
    """What is logged: layers whose name contains one of `layers`, kinds, and steps of a window; empty means all."""

    layers: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    steps: range | None = None

    def takes(self, name: Name) -> bool:
        """Whether `name` passes."""
        return (
            (not self.layers or any(part in name.layer for part in self.layers))
            and (not self.kinds or name.kind in self.kinds)
            and (self.steps is None or name.step in self.steps)
        )


@dataclass
class Tracer:
    """Feeds `log` from the hooks that `debug` asks for; `remove` takes them out again."""

    source: Source
    debug: Debug
    log: Log
    filter: Filter = field(default_factory=Filter)
    _handles: list[Any] = field(default_factory=list)

    def install(self) -> Tracer:
        """Put the hooks in."""
        for layer, module in self.source.layers.items():
            self._watch(layer, module)
        if self.debug.param_gradients or self.debug.all_param_gradients:
            self.source.on("reduced", self._gradients)
        if self.debug.param_update:
            self.source.on("updated", self._weights)
        if self.debug.param_init:
            before = self.source.now().step - 1
            self._held(before, "init", "weight", self.debug.param_init, gradient=False)
            self.log.write(before)
        self.source.on("ended", self._ended)
        return self

    def remove(self) -> None:
        """Take the hooks on modules out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch(self, layer: str, module: nn.Module) -> None:
        if self.debug.layer_outputs:
            self._handles.append(module.register_forward_hook(self._output_hook(layer)))
        if self.debug.layer_gradients:
            self._handles.append(module.register_forward_pre_hook(self._input_hook(layer)))

    def _output_hook(self, layer: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if module.training and not recomputing():
                for index, tensor in enumerate(_tensors(output)):
                    self._activation(layer, "forward", "output", tensor, index, self.source.now(), True)

        return hook

    def _input_hook(self, layer: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            if module.training and torch.is_grad_enabled() and not recomputing():
                for index, tensor in enumerate(_tensors(inputs)):
                    if tensor.requires_grad:
                        tensor.register_hook(self._gradient_hook(layer, index, self.source.now()))  # type: ignore[no-untyped-call]

        return hook

    def _gradient_hook(self, layer: str, index: int, now: Now) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self._activation(layer, "backward", "input gradient", gradient, index, now, False)

        return hook

    def _activation(self, layer: str, phase: str, kind: str, tensor: Tensor, index: int, now: Now, output: bool) -> None:
        name = Name(now.step, phase, layer, None if now.microbatches else now.microbatch, kind, str(index) if index else "")
        if self.filter.takes(name):
            placement = _among(self.source.activation(layer, tensor, output), now)
            level = self.debug.layer_outputs if output else self.debug.layer_gradients
            self.log.add(name, tensor, placement, level or 0, now.microbatch, gradient=not output)

    def _gradients(self) -> None:
        step, level = self.source.now().step, max(self.debug.param_gradients or 0, self.debug.all_param_gradients or 0)
        self._held(step, "reduce", "gradient", level, gradient=True)

    def _weights(self) -> None:
        self._held(self.source.now().step, "update", "weight", self.debug.param_update or 0, gradient=False)

    def _held(self, step: int, phase: str, kind: Kind, level: int, gradient: bool) -> None:
        for held in self.source.tensors(kind):
            name = Name(step, phase, held.layer, None, held.kind, held.tensor)
            if self.filter.takes(name):
                self.log.add(name, held.local, held.placement, level, gradient=gradient)

    def _ended(self) -> None:
        self.log.write(self.source.now().step, self.source.factor())


def recomputing() -> bool:
    """Whether a forward runs inside a backward, to compute again what was not kept."""
    return torch._C._current_graph_task_id() != -1


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _among(placement: Placement, now: Now) -> Placement:
    """As a part of the whole step's tensor, whose microbatches lie one after the other."""
    if not now.microbatches or not placement.sizes:
        return placement
    return placement.split(0, now.microbatch, now.microbatches)
