"""Injection: attaching to a training that nobody edited, as soon as its model runs forward with an optimizer that holds it."""

from __future__ import annotations

import json
import logging
import os
import sys
import weakref
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

SETTINGS = "STAGEBRIDGE_TRACE"
"""The variable that asks for it: a JSON object with `run`, `debug` and what else `attach` takes."""

ATTACHED = "attached.json"
"""What lies in the folder of a run once something is watched."""

logger = logging.getLogger("bridge.trace")


def install() -> None:
    """Have `watch` called once torch is imported, in a process that `SETTINGS` asks for it; before torch, nothing is loaded."""
    if SETTINGS not in os.environ:
        return
    if "torch" in sys.modules:
        watch(json.loads(os.environ[SETTINGS]))
    else:
        sys.meta_path.insert(0, _Awaited())


class _Awaited(MetaPathFinder):
    """Finds `torch.optim` as ever, and calls `watch` once it is there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch.optim":
            return None
        # Else the search below would come here again.
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


class _Then(Loader):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self.loader.exec_module(module)
        watch(json.loads(os.environ[SETTINGS]))


class _Watch:
    """What is known of a process until its training is attached."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.inside = False
        self.hooks: list[Any] = []

    def forward(self, module: Any, given: Any) -> None:
        """A module runs: if it is called from outside, trains, and an optimizer holds its parameters, it is attached."""
        import torch

        if self.inside or not (module.training and torch.is_grad_enabled()):
            return
        own = {id(weight) for weight in module.parameters() if weight.requires_grad}
        holding = [
            one
            for one in self.optimizers
            if any(id(weight) in own for group in one.param_groups for weight in group["params"])
        ]
        if own and (holding or hasattr(module, "optimizer")):
            self.inside = True
            # The first model that trains is watched; modules that run later are not looked at.
            for hook in self.hooks:
                hook.remove()
            self._attach(module, holding, given)

    def _attach(self, module: Any, optimizers: list[Any], given: Any) -> None:
        from bridge.errors import BridgeError
        from bridge.plan import Debug
        from bridge.trace import THOROUGH, attach
        from bridge.trace.desync import Policy
        from bridge.trace.keeping import Keep

        settings = dict(self.settings)
        keep = settings.pop("keep", {})
        settings["keep"] = Keep(**{**keep, "ranks": tuple(keep.get("ranks", ()))})
        debug = (
            Debug(**settings.pop("debug")) if settings.get("debug") else settings.pop("debug", None)
        )
        # A training that nobody edited must not stop.
        policy = Policy(action="log", thorough=THOROUGH)
        # Of an optimizer and its wrapper, the wrapper: `attach` finds what it wraps, and both
        # would make two steps of one.
        inner = [
            one
            for one in optimizers
            if not any(getattr(other, "optimizer", None) is one for other in optimizers)
        ]
        try:
            tracer = attach(
                module,
                debug,
                settings.pop("run"),
                optimizer=inner or None,
                policy=policy,
                **settings,
            )
        except BridgeError as error:
            logger.error("%s; nothing of this training is watched", error)
            return
        if tracer.source.comm.rank == 0:
            place = Path(self.settings["run"])
            place.mkdir(parents=True, exist_ok=True)
            (place / ATTACHED).write_text(
                json.dumps({"engine": type(module).__name__, "layers": list(tracer.source.layers)})
            )
        begin = getattr(tracer.source, "begin", None)
        if begin is not None:
            begin(given, {})  # hooks that are put in now run from the next pass on


def watch(settings: dict[str, Any]) -> None:
    """Note optimizers as they are made, and modules as they are called from outside of any other."""
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim import Optimizer

    found = _Watch(settings)
    plain = Optimizer.__init__

    def made(optimizer: Any, *given: Any, **named: Any) -> None:
        plain(optimizer, *given, **named)
        found.optimizers.add(optimizer)

    Optimizer.__init__ = made  # type: ignore[method-assign, assignment]
    found.hooks.append(register_module_forward_pre_hook(found.forward))
