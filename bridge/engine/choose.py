"""The choice of an engine for a plan, with the reason: the fields that each other engine cannot
run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from bridge.engine.interface import Backend
from bridge.engine.native import BACKEND as NATIVE
from bridge.errors import BridgeError
from bridge.plan.plan import Plan
from bridge.stack.extras import engine_lacks, install_command


@dataclass(frozen=True)
class Choice:
    """The engine that was chosen, and for every other engine the reasons why it cannot run the
    plan. An empty tuple of reasons means that this engine could run the plan too.
    """

    backend: Backend
    refusals: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        lines = [f"{self.backend.name}: runs every field of this plan"]
        for name, problems in self.refusals.items():
            lines += [
                f"{name}: {problem}"
                for problem in problems or ("this engine could run the plan too",)
            ]
        return "\n".join(lines)


def choose(
    plan: Plan, backends: Mapping[str, Backend], world: int | None = None, wanted: str | None = None
) -> Choice:
    """Return the engine that runs `plan` on `world` ranks (default: as many as the plan's sizes
    need).

    This is the native engine if it can run the plan, else the first of `backends` that can.
    (`bridge.engine.backends` returns such engines.) `wanted` names the only engine that is tried.
    Raises `BridgeError` with every reason if none can run it.
    """
    world = world or prod(
        getattr(plan.parallel, axis) or 1 for axis in ("data", "tensor", "pipeline", "context")
    )
    engines = {NATIVE.name: NATIVE, **backends}
    if wanted is not None and wanted not in engines:
        raise BridgeError(f"engine: found {wanted}, expected {' or '.join(engines)}")
    refusals = {name: _refusals(engine, plan, world) for name, engine in engines.items()}
    names = [wanted] if wanted else list(engines)
    able = [name for name in names if not refusals[name]]
    if not able:
        raise BridgeError(*(f"{name}: {problem}" for name in names for problem in refusals[name]))
    return Choice(
        engines[able[0]], {name: problems for name, problems in refusals.items() if name != able[0]}
    )


def _refusals(engine: Backend, plan: Plan, world: int) -> tuple[str, ...]:
    if engine.release is None:
        return (f"the stack is not installed; {install_command(engine.name)}",)
    if lacks := engine_lacks():
        return (lacks,)
    return engine.refusals(plan, world)
