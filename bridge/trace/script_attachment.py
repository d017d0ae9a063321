"""Attaches a trace to the training of a script that was not edited."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bridge.engine.comm import Comm
from bridge.errors import BridgeError
from bridge.layout.mesh import Mesh
from bridge.plan.plan import Debug
from bridge.trace.attachment import THOROUGH, attach
from bridge.trace.desync import Policy
from bridge.trace.module import ModuleSource
from bridge.trace.pipelining import stages_of
from bridge.trace.retention import Keep
from bridge.trace.run_liveness import APART, ATTACHED
from bridge.trace.step_meeting import join_meeting

logger = logging.getLogger("bridge.trace")


def attach_training(
    settings: dict[str, Any], target: Any, module: Any, optimizers: list[Any], arguments: Any
) -> None:
    """Attach the model that a script trains, with the `settings` of the variable by which the watch was put in.

    `target` is the `module`, or the schedule that runs it; `arguments` are those of the pass that has begun, or None.
    """

    settings = dict(settings)
    run = settings.pop("run")
    keep = settings.pop("keep", {})
    settings["keep"] = Keep(**{**keep, "ranks": tuple(keep.get("ranks", ()))})
    debug = Debug(**settings.pop("debug")) if settings.get("debug") else settings.pop("debug", None)
    # A training that nobody edited must not stop.
    policy = Policy(action="log", thorough=THOROUGH)
    # Of an optimizer and its wrapper, the wrapper, whatever it calls what it wraps: `attach`
    # finds that, and both would make two steps of one.
    inner = [
        one
        for one in optimizers
        if not any(value is one for other in optimizers for value in vars(other).values())
    ]
    if optimizers and not join_meeting():
        target, run = _trace_apart(target, inner, run)
    try:
        tracer = attach(target, debug, run, optimizer=inner or None, policy=policy, **settings)
    except BridgeError as error:
        logger.error("%s; this training is not traced", error)
        return
    if tracer.source.comm.rank == 0:
        place = Path(run)
        place.mkdir(parents=True, exist_ok=True)
        (place / ATTACHED).write_text(
            json.dumps({"engine": type(module).__name__, "layers": list(tracer.source.layers)})
        )
    begin = getattr(tracer.source, "begin", None)
    if begin is not None and arguments is not None:
        begin(arguments, {})  # hooks that are put in now run from the next pass on


def _trace_apart(module: Any, optimizers: Any, run: str) -> tuple[Any, str]:
    """Return the module as a source that compares nothing with other ranks, and the folder
    that this rank writes to.
    """

    stages = stages_of(module)
    module = stages[0].submod if stages else module
    rank = dist.get_rank()
    logger.warning(
        "trace run: ranks do not begin to train at the same time, as in a hand-written "
        "pipeline: rank %s is traced separately, and ranks are not compared",
        rank,
    )
    source = ModuleSource(module, optimizers, None, Comm(Mesh({"tensor": 1, "data": 1}), 0))
    return source, run if rank == 0 else str(Path(run) / f"{APART}{rank}")
