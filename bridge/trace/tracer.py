"""The tracer: hooks on the layers and steps of a source that inform observers. Without observers,
no hook is installed.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bridge.errors import BridgeError
from bridge.trace.findings import Findings
from bridge.trace.hook import Hook
from bridge.trace.naming import freeze_names
from bridge.trace.placement import Placement
from bridge.trace.record import Name
from bridge.trace.source import Moment, Now, TraceSource

logger = logging.getLogger("bridge.trace")


@dataclass(frozen=True, slots=True)
class Sight:
    """An activation or a gradient of one, as a hook receives it. `placement` says which part of
    the tensor `name` this rank has. `again` is true if the forward pass is a recomputation.
    """

    name: Name
    tensor: Tensor
    placement: Placement
    microbatch: int
    again: bool = False


class Observer(Protocol):
    """The interface of an observer: an object that a tracer informs of tensors and of points of a
    step.
    """

    def wants(self, kind: str) -> bool:
        """Return whether the observer wants to see tensors of a kind: input, output, input
        gradient.
        """
        ...

    def saw(self, sight: Sight) -> None:
        """Look at the present values of a tensor. The method must not call collectives, because
        other ranks may not be at the same point.
        """
        ...

    def reach_moment(self, moment: Moment | None) -> None:
        """Called at a point of a step that all ranks reach, or with None before the first step."""
        ...


INPUT, OUTPUT, GRADIENT = "input", "output", "input gradient"


@dataclass
class Tracer:
    """Hooks on the layers and steps of `source`, which inform `observers` until `remove` is
    called.
    """

    source: TraceSource
    observers: Sequence[Observer]
    findings: Findings = field(default_factory=Findings)
    ended: Callable[[], None] | None = None
    """Function that `remove` calls at the end; None if there is none."""
    _handles: list[Any] = field(default_factory=list)
    _last: list[tuple[nn.Module, int]] = field(default_factory=list)
    """The layers, each with the key of its hook on outputs."""
    _counts: dict[tuple[str, str, bool], tuple[tuple[int, int], int]] = field(default_factory=dict)
    _over: bool = False
    _without: dict[str, list[Now]] = field(default_factory=dict)
    """For each layer, the steps and microbatches in which it ran without a graph. Backward will
    run it again, with a graph.
    """

    def install(self) -> Tracer:
        """Install the hooks for the kinds of tensors that some observer wants, and return the
        tracer.
        """
        hidden: Collection[str] = getattr(self.source, "hidden", ())
        layers = {name: module for name, module in self.source.layers.items() if name not in hidden}
        if layers and self._is_kind_observed(INPUT):
            self._handles.append(
                layers[self.source.entrance].register_forward_pre_hook(Hook(self._batch_hook))
            )
        for layer, module in layers.items():
            if self._is_kind_observed(OUTPUT):
                handle = module.register_forward_hook(Hook(self._output_hook(layer)))
                self._handles.append(handle)
                # A source has no hook where another rank has the layer.
                if (key := getattr(handle, "id", None)) is not None:
                    self._last.append((module, key))
            if self._is_kind_observed(GRADIENT):
                self._handles.append(
                    module.register_forward_pre_hook(Hook(self._input_hook(layer)))
                )
        getattr(self.source, "passing", []).append(self._stay_last)
        self._reach_moment_of_all(None)
        moments: tuple[Moment, ...] = ("reduced", "updated", "ended")
        for moment in moments if self.observers else ():
            self.source.on(moment, lambda moment=moment: self._reach_moment_of_all(moment))  # type: ignore[misc]
        return self

    def remove(self) -> None:
        """Remove all hooks. Later steps are not observed."""
        self._over = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for observer in self.observers:
            getattr(observer, "close", lambda: None)()
        if self.ended is not None:
            self.ended()

    def _stay_last(self, *_: Any) -> None:
        """Have the hooks on outputs called behind all that were registered since, so that they see
        what the next layer gets.
        """
        for module, key in self._last:
            if key in module._forward_hooks and next(reversed(module._forward_hooks)) != key:
                module._forward_hooks[key] = module._forward_hooks.pop(key)

    @property
    def _quiet(self) -> bool:
        return bool(getattr(self.source, "quiet", False))

    def _is_kind_observed(self, kind: str) -> bool:
        return any(observer.wants(kind) for observer in self.observers)

    def _reach_moment_of_all(self, moment: Moment | None) -> None:
        if moment == "ended":
            self._without.clear()  # what backward did not need, it has not run again
        together = getattr(self.source, "together", True)
        with freeze_names():
            for observer in () if self._over else self.observers:
                # Ranks that do not step together would wait for each other in collectives.
                if together or getattr(observer, "alone", False):
                    self._call_observer(observer, observer.reach_moment, moment)

    def _call_observer(
        self, observer: Observer, call: Callable[[Any], None], argument: Any
    ) -> None:
        """Call a method of an observer. If it raises anything but a `BridgeError`, the observer is
        removed with a warning.
        """
        try:
            call(argument)
        except BridgeError:
            raise
        except Exception as error:
            self.observers = [other for other in self.observers if other is not observer]
            at = traceback.extract_tb(error.__traceback__)[-1]
            logger.warning(
                "trace: the observer %s failed in step %s and is not called any more; the training "
                "goes on: %s: %s (%s, line %s)",
                type(observer).__name__,
                self.source.now().step,
                type(error).__name__,
                str(error).partition("\n")[0],
                Path(at.filename).name,
                at.lineno,
            )

    def _batch_hook(self, module: nn.Module, inputs: Any) -> None:
        now = self.source.now()
        outside = getattr(self.source, "outside", False)
        if module.training and not (now.again or outside or is_recomputing()):
            for part in self.source.batch():
                self._saw(
                    now, "forward", part.layer, part.kind, part.tensor, part.local, part.placement
                )

    def _output_hook(self, layer: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if module.training and not self._quiet:
                now = self.source.now()
                again = now.again or is_recomputing()
                call = self._call(now, layer, OUTPUT, again)
                for index, tensor in _tensors_by_number(output):
                    placement = self.source.activation(layer, tensor, True)
                    self._saw(
                        now,
                        "forward",
                        layer,
                        OUTPUT,
                        (call + index).strip(),
                        _local_part(tensor),
                        placement,
                        again,
                    )

        return hook

    def _input_hook(self, layer: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            if not module.training or self._quiet:
                return
            # A reentrant checkpoint runs layers without a graph first; where the run is now is not
            # known any more when they run again.
            if not torch.is_grad_enabled():
                self._without.setdefault(layer, []).append(self.source.now())
            elif not is_recomputing():
                self._without.pop(layer, None)
                self._await(inputs, layer, self.source.now())
            elif self._without.get(layer):
                self._await(inputs, layer, self._without[layer].pop())

        return hook

    def _call(self, now: Now, layer: str, kind: str, again: bool = False) -> str:
        """Return a prefix for the names of tensors, so that a layer's second and later calls in a
        microbatch are told apart; empty for the first call.
        """
        key, at = (layer, kind, again), (now.step, now.microbatch)
        last, count = self._counts.get(key, (at, -1))
        count = count + 1 if last == at else 0
        self._counts[key] = at, count
        return f"call {count + 1} " if count else ""

    def _await(self, inputs: Any, layer: str, now: Now) -> None:
        """Observe the gradients of a layer's inputs, when backward has computed them. Each is
        observed once, even if a schedule splits backward in two.
        """
        tensors = [
            (index, tensor) for index, tensor in _tensors_by_number(inputs) if tensor.requires_grad
        ]
        call = self._call(now, layer, GRADIENT) if tensors else ""
        for index, tensor in tensors:
            self._await_one(tensor, layer, (call + index).strip(), now)

    def _await_one(self, tensor: Tensor, layer: str, index: str, now: Now) -> None:
        def hook(gradient: Tensor) -> None:
            handle.remove()
            placement = self.source.activation(layer, gradient, False)
            self._saw(now, "backward", layer, GRADIENT, index, _local_part(gradient), placement)

        handle = tensor.register_hook(Hook(hook))  # type: ignore[no-untyped-call]

    def _saw(
        self,
        now: Now,
        phase: str,
        layer: str,
        kind: str,
        tensor: str,
        local: Tensor,
        placement: Placement,
        again: bool = False,
    ) -> None:
        name = Name(
            now.step, phase, layer, None if now.microbatches else now.microbatch, kind, tensor
        )
        has_batch: Callable[[Tensor], bool] = getattr(
            self.source, "has_batch_dimension", lambda tensor: True
        )
        if not has_batch(local):
            if kind == GRADIENT:
                return  # of what all samples share: a part of a sum, on each rank
            # It is no part of the step's batch: every rank has all of it.
            now = replace(now, microbatches=None, part=None)
        # A part of the whole step's tensor, whose microbatches lie one after the other.
        if placement.sizes and (now.microbatches or now.part):
            part = now.part or (now.microbatch, now.microbatches or 1)
            placement = placement.split(0, *part)
        sight = Sight(name, local, placement, now.microbatch, again)
        for observer in self.observers:
            if observer.wants(kind):
                self._call_observer(observer, observer.saw, sight)


def is_recomputing() -> bool:
    """Return whether code runs inside a backward pass, so that a forward pass here is a
    recomputation.
    """
    # -1 outside of any backward; torch has no public name for it.
    return torch._C._current_graph_task_id() != -1


def _local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: all of it unless it is a DTensor."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, Tensor) else tensor


def _tensors_by_number(values: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested `values`, each with its number as text; the text is empty for
    the first tensor.
    """
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return ((str(index) if index else "", tensor) for index, tensor in enumerate(leaves))
