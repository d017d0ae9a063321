"""Trains with the real DeepSpeed. The input is a DeepSpeed config, or a plan, which is first
translated to a config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from bridge import __version__
from bridge.engine.interface import Backend, Trainer, Workload, unkept
from bridge.errors import BridgeError, VersionError
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config, Written
from bridge.translation.edit import edit_config, without
from bridge.translation.lift import lift, lower
from compat.deepspeed import live
from compat.deepspeed.code import PASSES
from compat.deepspeed.dialect import DIALECT

if TYPE_CHECKING:
    from bridge.checkpoint.hub import Hub
    from compat.deepspeed.dialect import DeepSpeedFile

CODE = {
    "parallel.context": (
        "the model's own code would have to implement attention over parts of the sequence"
        " (Ulysses), and this model does not"
    ),
    "parallel.expert": "this model has no experts",
    "model.experts": "this model has no experts",
}
"""Plan fields that this backend can run only with the value 1, each with the reason. Larger values
would need code in the training script that this backend does not have.
"""


COUNTED = ("batch.accumulation", "batch.global_")
OFFLOADED = frozenset({"zero.offload.optimizer", "zero.offload.parameters"})
OFFLOADS = ("zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param")
"""Old switches in DeepSpeed's config for the plan fields in `OFFLOADED`."""
LENGTHS = {
    "optimizer.schedule.warmup_steps": "scheduler.params.warmup_num_steps",
    "optimizer.schedule.total_steps": "scheduler.params.total_num_steps",
}
"""Maps each length in the plan's schedule to the key of DeepSpeed's schedulers that sets the
length.
"""


class _DropIn(Backend):
    """Backend that runs a DeepSpeed config with the native engine, through DeepSpeed's interface
    and with DeepSpeed's own schedulers.
    """

    name: ClassVar[str] = "native"
    title: ClassVar[str] = "native engine behind DeepSpeed's interface"
    modules = ("compat.deepspeed.runtime.native",)

    @property
    @override
    def release(self) -> str:
        return __version__

    @override
    def refusals(self, plan: Plan, world: int) -> tuple[str, ...]:
        return ()

    @override
    def open(self, run: Config | Plan, workload: Workload) -> Trainer:
        from compat.deepspeed.runtime.native import DropInTrainer

        if isinstance(run, Plan):
            raise VersionError(
                "deepspeed: the native engine behind DeepSpeed's interface runs a DeepSpeed"
                " config, not a plan"
            )
        return DropInTrainer(run, workload)

    @override
    def edit_config(self, config: Config, changes: Mapping[str, Any], world: int) -> Config:
        return BACKEND.edit_config(config, changes, world)


class DeepSpeedBackend(Backend):
    """Backend with the installed DeepSpeed: its engine, AutoTP and its pipeline engine."""

    name: ClassVar[str] = "deepspeed"
    title: ClassVar[str] = "DeepSpeed"
    inside = _DropIn()
    optional: ClassVar[tuple[Mapping[str, Any], ...]] = ({"code.manual_accumulation": None},)

    @property
    @override
    def release(self) -> str | None:
        try:
            return live.release_of_package()
        except VersionError:
            return None

    @override
    def load(self) -> None:
        from compat.deepspeed.runtime.trainers import load_deepspeed

        load_deepspeed()

    @override
    def refusals(self, plan: Plan, world: int) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys((*_code(plan), *unkept(plan, DIALECT, self._installed_release(), world)))
        )

    @override
    def open(self, run: Config | Plan, workload: Workload) -> Trainer:
        from compat.deepspeed.runtime import trainers

        # DeepSpeed's own answer to such a run speaks of batch sizes.
        BridgeError.raise_if(tuple(_split_stages(lift(run) if isinstance(run, Config) else run)))
        world = trainers.join()
        config = run if isinstance(run, Config) else self.config_of_plan(run, world)
        return trainers.open_trainer(config, workload)  # type: ignore[arg-type]

    @override
    def start(self, output: Written, config: Config, workload: Workload) -> Trainer:
        from compat.deepspeed.runtime import script, trainers

        BridgeError.raise_if(tuple(_split_stages(lift(config))))
        trainers.join()
        return script.open_trainer(output, config, workload)  # type: ignore[arg-type]

    def config_of_plan(self, plan: Plan, world: int) -> DeepSpeedFile:
        """Return the DeepSpeed config that `plan` translates to, for `world` ranks."""
        return lower(plan, DIALECT, self._installed_release(), world)  # type: ignore[return-value]

    @override
    def as_loaded(self, hub: Hub) -> Hub:
        """Return `hub` with its config changed so that DeepSpeed can load the checkpoint here.
        `round_robin_gradients` is removed, and on a CPU `torch_adam` is added.
        """
        from torch.cuda import is_available

        from compat.deepspeed.runtime.trainers import undealt

        plain = undealt(hub.config or {})
        hub = hub if plain == (hub.config or {}) else replace(hub, config=plain)
        section = (hub.config or {}).get("optimizer")
        if (
            is_available()
            or not isinstance(section, Mapping)
            or str(section.get("type", "")).lower() not in ("adam", "adamw")
        ):
            return hub
        options = section.get("params") or {}
        if options.get("torch_adam"):
            return hub
        return replace(
            hub,
            config={
                **(hub.config or {}),
                "optimizer": {**section, "params": {**options, "torch_adam": True}},
            },
        )

    @override
    def edit_config(self, config: Config, changes: Mapping[str, Any], world: int) -> Config:
        """Return `config` with `changes` to plan fields. If the config has a scheduler, its type
        stays and only its lengths change. For a script with manual accumulation, batch sizes are
        divided by the number of calls of `backward` in a step, because DeepSpeed's batch keys do
        not count these calls.
        """
        if config.effective.get("code.manual_accumulation"):
            changes = {
                path: value // PASSES if path in COUNTED and value else value
                for path, value in changes.items()
            }
        old = (
            {path: None for path in config.given if path in OFFLOADS}
            if OFFLOADED & changes.keys()
            else {}
        )
        config = without(config, old)
        if config.given.get("scheduler.type") is None:
            return edit_config(config, changes, world)
        lengths = {
            LENGTHS[path]: value for path, value in changes.items() if path in LENGTHS and value
        }
        others = {
            path: value for path, value in changes.items() if path not in LENGTHS or not value
        }
        settings = {path: value for path, value in lengths.items() if path in config.effective}
        return without(edit_config(config, others, world), settings)

    @override
    def meaning(self, config: Config) -> Plan:
        """Return the plan of `config`. For a script with manual accumulation, the plan's batch
        counts all calls of `backward` in a step.
        """
        plan = lift(config)
        if not config.effective.get("code.manual_accumulation"):
            return plan
        return Plan.of(
            {
                path: value * PASSES if path in COUNTED else value
                for path, value in plan.values().items()
            }
        )

    def _installed_release(self) -> str | None:
        """Return the release of the installed DeepSpeed. Return None, which stands for the newest
        release in our tables, if DeepSpeed is not installed or our tables lack its release.
        """
        return self.release if self.release in DIALECT.versions else None


def _code(plan: Plan) -> Iterator[str]:
    values = plan.values()
    yield from (
        f"{path}: found {values[path]}; {why}"
        for path, why in CODE.items()
        if values.get(path, 1) > 1
    )
    yield from _split_stages(plan)


def _split_stages(plan: Plan) -> Iterator[str]:
    """Yield a reason why DeepSpeed cannot run the plan, if the plan has both tensor ranks and
    pipeline stages.
    """
    if (plan.parallel.tensor or 1) > 1 and (plan.parallel.pipeline or 1) > 1:
        yield (
            f"parallel.tensor: found {plan.parallel.tensor} with {plan.parallel.pipeline} pipeline"
            " ranks; AutoTP cannot be combined with a PipelineModule; the model's own code would"
            " have to implement tensor-parallel layers"
        )


BACKEND = DeepSpeedBackend()
