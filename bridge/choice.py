"""Choosing an engine for a plan, and saying why: which field each of the others cannot run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod

from bridge.backend import Backend
from bridge.engine.backend import BACKEND as NATIVE
from bridge.errors import BridgeError
from bridge.plan import Plan


@dataclass(frozen=True)
class Choice:
    """The engine that was picked, and by name why each of the others cannot run the plan (nothing: it could as well)."""

    backend: Backend
    refusals: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        return "\n".join((f"{self.backend.name}: runs every field of this plan", *self._others()))

    def _others(self) -> list[str]:
        found = self.refusals.items()
        return [f"{name}: {problem}" for name, problems in found for problem in problems or ("could run it as well",)]


def choose(plan: Plan, backends: Mapping[str, Backend], world: int | None = None, wanted: str | None = None) -> Choice:
    """The engine that runs `plan` on `world` ranks (default: as many as its sizes need): the native one where it can, else the
    first of `backends` (`compat.backends()`) that can. `wanted` names one, which then has to.

    Raises `BridgeError` with every reason if none can, or the one that is wanted cannot.
    """
    world = world or prod(getattr(plan.parallel, axis) or 1 for axis in ("data", "tensor", "pipeline", "context"))
    engines = {NATIVE.name: NATIVE, **backends}
    if wanted is not None and wanted not in engines:
        raise BridgeError(f"engine: found {wanted}, expected {' or '.join(engines)}")
    refusals = {name: _refusals(engine, plan, world) for name, engine in engines.items()}
    able = [name for name in ([wanted] if wanted else engines) if not refusals[name]]
    if not able:
        names = [wanted] if wanted else list(engines)
        raise BridgeError(*(f"{name}: {problem}" for name in names for problem in refusals[name]))
    return Choice(engines[able[0]], {name: problems for name, problems in refusals.items() if name != able[0]})


def _refusals(engine: Backend, plan: Plan, world: int) -> tuple[str, ...]:
    if engine.release is None:
        return (f"not installed; pip install 'stagebridge[{engine.name}]'",)
    if find_spec("torch") is None:
        return ("torch is not installed; pip install 'stagebridge[engine]'",)
    return engine.refusals(plan, world)
