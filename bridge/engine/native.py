"""The native engine as a backend for `bridge.engine.interface`: runs the plan of a config, whichever stack
the config is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import bridge.engine  # its names need torch, which a config is read without
from bridge import __version__
from bridge.checkpoint.groups import FILE, check_groups
from bridge.engine.fields import check
from bridge.engine.interface import Backend, Step, Workload
from bridge.errors import ConfigError
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config
from bridge.translation.lift import lift

if TYPE_CHECKING:
    from torch import Tensor

    from bridge.engine.rows import Batch, Rows
    from bridge.engine.runner import Engine


class NativeBackend(Backend):
    """The native engine as a backend."""

    name: ClassVar[str] = "native"
    title: ClassVar[str] = "native engine"
    modules = (
        "bridge.engine",
        "bridge.engine.models.dense",
        "torch._dynamo",
    )  # torch's first optimizer asks for its compiler

    @property
    def release(self) -> str:
        """The version of this package."""
        return __version__

    def refusals(self, plan: Plan, world: int) -> tuple[str, ...]:
        try:
            check(plan, world)
        except ConfigError as error:
            return error.problems
        return ()

    def open(self, run: Config | Plan, workload: Workload) -> NativeTrainer:
        from bridge.engine.layers import logits_in
        from bridge.engine.models.dense import native
        from bridge.engine.models.gpt import mean_cross_entropy, sum_cross_entropy
        from bridge.engine.optimizer import groups_of_file, trainable_names

        plan = lift(run) if isinstance(run, Config) else run
        if workload.model is not None:
            # The model brings its own experts. The engine has none, and would refuse a plan that
            # names them.
            plan = Plan.of(
                {path: value for path, value in plan.values().items() if path not in EXPERTS}
            )
        loss = sum_cross_entropy if plan.loss == "per_token" else mean_cross_entropy
        model, rows = native(workload), workload.groups
        if rows:
            check_groups(rows, trainable_names(model), FILE)
        groups = groups_of_file(rows, plan.optimizer)
        engine = bridge.engine.initialize(
            model,
            plan,
            lambda output, targets: loss(logits_in(output), targets),
            seed=workload.seed,
            groups=groups,
        )
        return NativeTrainer(engine, plan.batch.micro or workload.micro, workload.rows)


class NativeTrainer:
    """A run of the native engine. If `rows` is given, microbatches are taken from the user's own
    batch.
    """

    def __init__(self, engine: Engine, micro: int, rows: Rows | None = None) -> None:
        self.engine, self.micro, self.accumulation, self.rows = (
            engine,
            micro,
            engine.accumulation,
            rows,
        )
        self.data = (engine.data.index, engine.data.size)
        # Gradients are counted when they are whole: after the update their buffers may hold
        # anything.
        self._gradients = 0
        engine.watchers["reduced"].append(self._count)

    def train_batch(self, batches: Iterable[Batch]) -> Step:
        engine, before, scale = self.engine, self.engine.progress.steps, self.engine.scaler.scale
        loss, progress = (
            engine.train_batch(
                batches if self.rows is None else map(self._arguments_and_targets, batches)
            ),
            engine.progress,
        )
        return Step(loss, progress.grad_norm, progress.lr, progress.steps > before, scale)

    def _arguments_and_targets(self, batch: Batch) -> Any:
        """Return the arguments of the model and the targets, for a microbatch of the user's own
        batch.
        """
        from bridge.engine.layers import Arguments

        assert self.rows is not None
        return Arguments((batch[1],), self.rows.model_arguments(batch[0]))

    def resume(self, place: Path) -> int:
        self.engine.load_checkpoint(place.parent, place.name)
        return self.engine.progress.steps + self.engine.progress.skipped

    def weights(self) -> Mapping[str, Tensor]:
        return {name: whole.detach().cpu().float() for name, whole in self.engine.state_dict()}

    def bytes(self) -> Mapping[str, int]:
        sizes = self.engine.bytes()
        return {
            "weights": sizes["weights"],
            "gradients": self._gradients,
            "optimizer": sizes["master"] + sizes["moments"],
        }

    def close(self) -> None:
        self.engine.weights.settle()

    def _count(self) -> None:
        self._gradients = self.engine.bytes()["gradients"]


EXPERTS = ("model.experts", "parallel.expert", "parallel.expert_tensor")
"""Plan fields that set how experts are divided among ranks. The engine ignores them if the model
itself has experts.
"""
BACKEND = NativeBackend()
