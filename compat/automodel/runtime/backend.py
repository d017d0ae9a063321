"""FSDP2, with which AutoModel trains, as a backend: torch's plain `fully_shard` over the native
model, configured by a recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from typing_extensions import override

from bridge.engine.interface import MICRO, Backend, Trainer, Workload, unkept
from bridge.engine.plain import torch_release
from bridge.errors import BridgeError
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config
from bridge.translation.lift import lower
from compat.automodel.dialect import DIALECT, AutoModelConfig

AXES = ("tp_size", "pp_size", "cp_size", "ep_size", "dp_replicate_size")
OPTIMIZERS = ("torch.optim.AdamW", "torch.optim.Adam", "torch.optim.SGD")
OPEN: Mapping[str, Any] = {
    "optimizer.name": "adamw",
    "optimizer.lr": 1e-3,
    "zero.stage": 3,
    "precision.compute": "fp32",
}
"""Values for plan fields that a plan leaves open. They are the defaults of the native engine."""


class FullyShardedBackend(Backend):
    """The installed torch's FSDP2."""

    name: ClassVar[str] = "automodel"
    title: ClassVar[str] = "FSDP2 of torch"
    least: ClassVar[int] = 2
    modules = ("compat.automodel.runtime.fsdp",)

    @property
    @override
    def release(self) -> str | None:
        return torch_release()

    @override
    def refusals(self, plan: Plan, world: int) -> tuple[str, ...]:
        whole = complete_plan(plan)
        try:
            undriven = tuple(_find_undriven(lower(whole, DIALECT, None, world)))
        except BridgeError as error:
            return error.problems
        return (*undriven, *unkept(whole, DIALECT, None, world))

    @override
    def open(self, run: Config | Plan, workload: Workload) -> Trainer:
        from compat.automodel.runtime import fsdp

        world = fsdp.join()
        config = run if isinstance(run, Config) else lower(complete_plan(run), DIALECT, None, world)
        BridgeError.raise_if(_find_undriven(config))
        return fsdp.FullyShardedTrainer(config, workload)


def complete_plan(plan: Plan) -> Plan:
    """Return the plan, with open fields set to the native engine's defaults."""
    micro = {} if plan.batch.micro or plan.batch.global_ else {"batch.micro": MICRO}
    return Plan.of({**OPEN, **micro, **plan.values()})


def _find_undriven(config: Config | AutoModelConfig) -> Iterator[str]:
    """Yield an error for each setting of a recipe that this backend cannot run."""
    values = config.effective
    split = (f"distributed.{name}" for name in AXES)
    yield from (
        f"{path}: found {values[path]}; this backend runs only data ranks; use 1"
        for path in split
        if values.get(path, 1) > 1
    )
    strategy = values.get("distributed.strategy")
    if strategy not in (None, "fsdp2"):
        yield f"distributed.strategy: found {strategy}; this backend runs only fsdp2"
    optimizer = values.get("optimizer._target_")
    if optimizer not in OPTIMIZERS:
        yield f"optimizer._target_: found {optimizer}; this backend runs only {', '.join(OPTIMIZERS)}"


BACKEND = FullyShardedBackend()
