"""Trace: what happens inside a run, layer by layer, and whether ranks that should agree do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bridge.plan import Debug

if TYPE_CHECKING:
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
    source: Source,
    debug: Debug,
    run: str | Path = "trace",
    *,
    filter: Filter | None = None,
    full: bool = False,
    policy: Policy | None = None,
    strict: bool = False,
) -> Tracer:
    """Log what `debug` asks for of `source` into the folder `run`, and check that ranks agree if it asks for that.

    `filter` narrows the logs, `full` keeps whole tensors instead of samples, `policy` says how often ranks are compared and
    what a mismatch leads to. Nothing is installed where `debug` asks for nothing.
    """
    from bridge.trace.desync import Desync, DesyncCheck, Policy
    from bridge.trace.layer_log import Filter, LayerLog
    from bridge.trace.log import Log
    from bridge.trace.tracer import Tracer

    observers: list[Observer] = []
    if any(getattr(debug, name) for name in LOGS):
        about = {**source.about(), "ranks": source.comm.mesh.world, "layers": list(source.layers)}
        observers.append(LayerLog(source, debug, Log(Path(run), source.comm.rank, about, full, strict), filter or Filter()))
    if debug.tensor_parallel:
        observers.append(DesyncCheck(source, Desync(source.comm, policy or Policy())))
    return Tracer(source, observers).install()
