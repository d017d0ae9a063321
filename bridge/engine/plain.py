"""A plain training loop of torch as a backend for plans: on one rank, with DDP, or with FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, ClassVar

from bridge.engine.interface import Backend, Workload
from bridge.errors import BridgeError
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config
from bridge.translation.lift import lift

if TYPE_CHECKING:
    from bridge.engine.loops import PlainTrainer

FORMATS = (None, "fp32", "bf16")
OPTIMIZERS = (None, "adam", "adamw", "sgd")
OTHERS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "optimizer.bias_correction": (
        (None, True),
        "torch's Adam always corrects the bias of its moments",
    ),
    "optimizer.embedding_lr": ((None, 1.0), "a plain loop has one learning rate"),
    "optimizer.output_lr": ((None, 1.0), "a plain loop has one learning rate"),
    "optimizer.decay_ramp.shape": ((None, "constant"), "a plain loop has a constant weight decay"),
    "optimizer.amsgrad": ((None, False), "a plain loop does not have amsgrad"),
    "adapters.rank": ((None,), "a plain loop trains the model without adapters"),
}
"""For plan fields, the values that a plain loop supports, and the reason why it supports no others.
"""


class PlainBackend(Backend):
    """A plain loop on one rank, with torch's own optimizer. If there are several ranks, each of
    them does the same.
    """

    name: ClassVar[str] = "torch"
    title: ClassVar[str] = "plain loop of torch"
    wrap: ClassVar[str] = "none"

    @property
    def release(self) -> str | None:
        return torch_release()

    def refusals(self, plan: Plan, world: int) -> tuple[str, ...]:
        return tuple(_refusals(plan))

    def open(self, run: Config | Plan, workload: Workload) -> PlainTrainer:
        """Return a trainer for a plan, or for the plan that a config means."""
        plan = lift(run) if isinstance(run, Config) else run
        BridgeError.raise_if(_refusals(plan))
        from bridge.engine.loops import TRAINERS

        return TRAINERS[self.wrap](plan, workload)


class ReplicatedBackend(PlainBackend):
    """A plain loop with DistributedDataParallel."""

    name: ClassVar[str] = "ddp"
    title: ClassVar[str] = "DDP of torch"
    least: ClassVar[int] = 2
    wrap: ClassVar[str] = "ddp"


class ShardedBackend(PlainBackend):
    """A plain loop with `fully_shard`, block by block."""

    name: ClassVar[str] = "fsdp2"
    title: ClassVar[str] = "FSDP2 of torch"
    least: ClassVar[int] = 2
    wrap: ClassVar[str] = "fsdp2"


def torch_release() -> str | None:
    """Return the installed release of torch without importing it, or None if torch is not
    installed.
    """
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _refusals(plan: Plan) -> Iterator[str]:
    values = plan.values()
    name, compute = plan.optimizer.name, plan.precision.compute
    if name not in OPTIMIZERS:
        yield f"optimizer.name: found {name}; a plain loop supports only {', '.join(filter(None, OPTIMIZERS))}"
    if compute not in FORMATS:
        yield f"precision.compute: found {compute}; a plain loop supports only fp32, or bf16 under autocast"
    yield from (
        f"{path}: found {values[path]}; {why}"
        for path, (runs, why) in OTHERS.items()
        if values.get(path) not in runs
    )


BACKENDS: Mapping[str, Backend] = {
    backend.name: backend for backend in (PlainBackend(), ReplicatedBackend(), ShardedBackend())
}
