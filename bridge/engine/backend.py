"""The native engine as a backend: it lifts a config of any stack, and runs what that means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bridge import __version__
from bridge.backend import Backend, Step, Workload
from bridge.dialect import Config
from bridge.engine.fields import check
from bridge.errors import ConfigError
from bridge.plan import Plan
from bridge.translation import lift

if TYPE_CHECKING:
    from torch import Tensor

    from bridge.backend import Batch
    from bridge.engine.rows import Rows
    from bridge.engine.runner import Engine


class NativeBackend(Backend):
    """The engine of this package."""

    name: ClassVar[str] = "native"
    title: ClassVar[str] = "native engine"
    modules = ("bridge.engine", "bridge.engine.models.dense", "torch._dynamo")  # torch's first optimizer asks for its compiler

    @property
    def release(self) -> str:
        """The version of this package."""
        return __version__

    def refusals(self, plan: Plan, world: int) -> tuple[str, ...]:
        """See `Backend`."""
        try:
            check(plan, world)
        except ConfigError as error:
            return error.problems
        return ()

    def open(self, run: Config | Plan, workload: Workload) -> NativeTrainer:
        """See `Backend`."""
        from bridge.engine import initialize
        from bridge.engine.layers import logits_in
        from bridge.engine.models.dense import native
        from bridge.engine.models.gpt import mean_cross_entropy, summed_cross_entropy

        plan = lift(run) if isinstance(run, Config) else run
        if workload.model is not None:  # which has the experts that the engine itself has not
            plan = Plan.of({path: value for path, value in plan.values().items() if path not in EXPERTS})
        loss = summed_cross_entropy if plan.loss == "per_token" else mean_cross_entropy
        engine = initialize(native(workload), plan, lambda output, targets: loss(logits_in(output), targets), seed=workload.seed)
        return NativeTrainer(engine, plan.batch.micro or workload.micro, workload.rows)


class NativeTrainer:
    """A run of the native engine; see `Trainer`."""

    def __init__(self, engine: Engine, micro: int, rows: Rows | None = None) -> None:
        self.engine, self.micro, self.accumulation, self.rows = engine, micro, engine.accumulation, rows
        self.data = (engine.data.index, engine.data.size)
        self._gradients = 0
        engine.watchers["reduced"].append(self._count)

    def train_batch(self, batches: Iterable[Batch]) -> Step:
        """See `Trainer`."""
        engine, before, scale = self.engine, self.engine.progress.steps, self.engine.scaler.scale
        loss, progress = engine.train_batch(batches if self.rows is None else map(self._named, batches)), engine.progress
        return Step(loss, progress.grad_norm, progress.lr, progress.steps > before, scale)

    def _named(self, batch: Batch) -> Any:
        """Rows of the user's own as the model is called with them."""
        from bridge.engine.layers import Arguments

        assert self.rows is not None
        return Arguments((batch[1],), self.rows.named(batch[0]))

    def resume(self, place: Path) -> int:
        """See `Trainer`."""
        self.engine.load_checkpoint(place.parent, place.name)
        return self.engine.progress.steps + self.engine.progress.skipped

    def weights(self) -> Mapping[str, Tensor]:
        """See `Trainer`."""
        return {name: whole.detach().cpu().float() for name, whole in self.engine.state_dict()}

    def bytes(self) -> Mapping[str, int]:
        """See `Trainer`."""
        found = self.engine.bytes()
        return {"weights": found["weights"], "gradients": self._gradients, "optimizer": found["master"] + found["moments"]}

    def close(self) -> None:
        """See `Trainer`."""
        self.engine.weights.settle()

    def _count(self) -> None:
        self._gradients = self.engine.bytes()["gradients"]


EXPERTS = ("model.experts", "parallel.expert", "parallel.expert_tensor")
"""What a plan says of experts, to an engine whose model has them."""
BACKEND = NativeBackend()
