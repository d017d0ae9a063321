"""Injection: traces a training whose script was not edited. It attaches to the first model that
runs forward and whose parameters an optimizer holds.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

SETTINGS = "STAGEBRIDGE_TRACE"
"""Name of the environment variable that turns the injection on. Its value is a JSON object
with `run`, `debug` and further arguments of `attach`.
"""


def install_watch() -> None:
    """Have `watch_script` called as soon as the script imports torch, if the variable `SETTINGS` is set.
    Nothing else is imported before.
    """
    if SETTINGS not in os.environ:
        return
    if "torch" in sys.modules:
        watch_script(json.loads(os.environ[SETTINGS]))
    else:
        call_after_import("torch.optim", lambda: watch_script(json.loads(os.environ[SETTINGS])))


def call_after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` when the module `name` has been imported; at once if it is imported already."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Awaited(name, then))


class _Awaited(MetaPathFinder):
    """Import hook that finds a module as usual, and calls `then` after the module is loaded."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        # Else the search below would come here again.
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self.then)
        return spec


class _Then(Loader):
    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self.loader, self.then = loader, then

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self.loader.exec_module(module)
        self.then()


class _Watch:
    """The optimizers and modules that a process has used so far, until its training is attached."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.inside = False
        self.hooks: list[Any] = []
        self.first: weakref.ref[Any] | None = None
        """The first module that trained although no known optimizer holds its parameters; None if
        there is none.
        """

    def forward(self, module: Any, arguments: Any) -> None:
        """Attach a module that begins to run, if it is in training mode and an optimizer holds its
        parameters. Called for every module, the outermost first, until one is attached.
        """
        import torch

        # In a graph, a hook of a module inside of the one that `compile_module` lets in.
        if torch.compiler.is_compiling():
            return
        if self.inside or not (module.training and torch.is_grad_enabled()):
            return
        holding = self._holding([module])
        trains = any(weight.requires_grad for weight in module.parameters())
        if holding or (hasattr(module, "optimizer") and trains):
            self._attach(module, module, holding, arguments)
        elif trains and self.first is None:
            self.first = weakref.ref(module)

    def stepping(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """When an optimizer steps, attach `first`, the module that trained although no known
        optimizer holds its parameters. This optimizer probably holds the parameters of a copy of
        the module.
        """
        module = self.first() if self.first is not None else None
        if (
            self.inside
            or module is None
            or not any(weight.grad is not None for weight in module.parameters())
        ):
            return
        self._attach(module, module, [optimizer], None)

    def _holding(self, modules: Iterable[Any]) -> list[Any]:
        """Return the optimizers that hold a trained parameter of one of these modules."""
        own = {
            id(weight)
            for module in modules
            for weight in module.parameters()
            if weight.requires_grad
        }
        return [
            one
            for one in self.optimizers
            if any(id(weight) in own for group in one.param_groups for weight in group["params"])
        ]

    def _attach(self, target: Any, module: Any, optimizers: list[Any], arguments: Any) -> None:
        from bridge.trace.script_attachment import attach_training

        self.inside = True
        # The first model that trains is watched; modules that run later are not looked at.
        for hook in self.hooks:
            hook.remove()
        attach_training(self.settings, target, module, optimizers, arguments)

    def schedule(self, schedule: Any) -> None:
        """Attach a schedule of torch's pipelining that begins a step. This has to happen before the
        ranks wait for each other's messages.
        """
        import torch

        from bridge.trace.pipelining import stages_of

        modules = [stage.submod for stage in stages_of(schedule) or ()]
        training = any(module.training for module in modules) and torch.is_grad_enabled()
        holding = self._holding(modules) if training and not self.inside else []
        if holding:
            self._attach(schedule, modules[0], holding, None)


def watch_script(settings: dict[str, Any]) -> None:
    """Look for a training to attach in this process: record every optimizer that is made, and look
    at every module that begins to run and every optimizer that steps.
    """
    from torch.nn import Module
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim import Optimizer
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    watch = _Watch(settings)
    plain = Optimizer.__init__

    def record_optimizer(optimizer: Any, *arguments: Any, **keywords: Any) -> None:
        plain(optimizer, *arguments, **keywords)
        watch.optimizers.add(optimizer)

    compile = Module.compile

    def compile_module(module: Any, *arguments: Any, **keywords: Any) -> None:
        compile(module, *arguments, **keywords)
        compiled_call = module._compiled_call_impl

        def call(*inputs: Any, **named: Any) -> Any:
            # Here, because a hook would become a part of the graph.
            watch.forward(module, inputs)
            return compiled_call(*inputs, **named)

        module._compiled_call_impl = call

    Module.compile = compile_module  # type: ignore[method-assign, assignment]
    Optimizer.__init__ = record_optimizer  # type: ignore[method-assign, assignment]
    watch.hooks.append(register_module_forward_pre_hook(watch.forward))
    watch.hooks.append(register_optimizer_step_pre_hook(watch.stepping))
    call_after_import(PIPELINING, lambda: _wrap_schedules(watch))


PIPELINING = "torch.distributed.pipelining.schedules"


def _wrap_schedules(watch: _Watch) -> None:
    """Wrap the step method of torch's pipeline schedules, so that `watch` learns of each step."""
    for kind in vars(sys.modules[PIPELINING]).values():
        if isinstance(kind, type) and "step" in vars(kind) and kind.__module__ == PIPELINING:
            _wrap_step(kind, watch)


def _wrap_step(kind: Any, watch: _Watch) -> None:
    plain = kind.step

    @functools.wraps(plain)
    def step(schedule: Any, *arguments: Any, **keywords: Any) -> Any:
        watch.schedule(schedule)
        return plain(schedule, *arguments, **keywords)

    kind.step = step
