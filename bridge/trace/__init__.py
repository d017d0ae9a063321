"""Trace: what happens inside a run, layer by layer, and whether ranks that should agree do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bridge.plan import Debug

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from bridge.trace.desync import Policy
    from bridge.trace.layer_log import Filter
    from bridge.trace.source import Source
    from bridge.trace.tracer import Observer, Tracer

LOGS = (
    *("layer_outputs", "layer_gradients", "param_init", "param_gradients", "all_param_gradients", "param_update"),
    "activation_memory",
)
"""Fields of `Debug` that ask for logs."""


def attach(
    target: Source | nn.Module,
    debug: Debug,
    run: str | Path = "trace",
    *,
    optimizer: Optimizer | None = None,
    accumulation: int = 1,
    filter: Filter | None = None,
    full: bool = False,
    policy: Policy | None = None,
    strict: bool = False,
) -> Tracer:
    """Log what `debug` asks for of `target` into the folder `run`, and check that ranks agree if it asks for that.

    `target` is a `Source` (`bridge.engine.tracing.EngineSource`, and `tracing` of a stack in `compat`), or a module, also in
    DistributedDataParallel, that is trained by `optimizer` with `accumulation` backward passes in a step.

    `filter` narrows the logs, `full` keeps whole tensors instead of samples, `policy` says how often ranks are compared and
    what a mismatch leads to. Nothing is installed where `debug` asks for nothing.
    """
    from bridge.trace.desync import Desync, DesyncCheck, Policy
    from bridge.trace.layer_log import Filter, LayerLog
    from bridge.trace.log import Log
    from bridge.trace.tracer import Tracer

    source = _source(target, optimizer, accumulation)
    observers: list[Observer] = []
    if any(getattr(debug, name) for name in LOGS):
        about = {**source.about(), "ranks": source.comm.mesh.world, "layers": list(source.layers)}
        observers.append(LayerLog(source, debug, Log(Path(run), source.comm.rank, about, full, strict), filter or Filter()))
    if debug.tensor_parallel:
        observers.append(DesyncCheck(source, Desync(source.comm, policy or Policy(), source.holders)))
    return Tracer(source, observers).install()


def _source(target: Source | nn.Module, optimizer: Optimizer | None, accumulation: int) -> Source:
    from torch import nn

    from bridge.errors import BridgeError
    from bridge.trace.module import ModuleSource

    if not isinstance(target, nn.Module):
        return target
    if optimizer is None:
        raise BridgeError("attach: a module needs its optimizer, whose step ends a step; pass it, or the engine's own Source")
    return ModuleSource(target, optimizer, accumulation)
