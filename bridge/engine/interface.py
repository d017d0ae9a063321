"""Backends: the engines that train a plan, either the native engine or the engine of a stack, all
with one small interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from bridge.errors import BridgeError
from bridge.layout.architecture import Architecture
from bridge.plan.model import Model
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config, Dialect, Written
from bridge.stack.rules import Effect
from bridge.translation.edit import edit_config
from bridge.translation.lift import lift, lower, plan_claims

if TYPE_CHECKING:
    from torch import Tensor

    from bridge.checkpoint.groups import Row
    from bridge.checkpoint.hub import Hub
    from bridge.engine.rows import Batch, Rows

MICRO = 4
"""Default number of sequences in a microbatch, used if neither the config nor the caller sets it.
"""


@dataclass(frozen=True)
class Workload:
    """The model and data of a run, the same on every backend.

    By default the model is the native GPT with the sizes in `architecture` and the first weights
    that `seed` draws (`bridge.engine.models.gpt.GPT(architecture, seed)`), or the stack's own model
    with the same weights and outputs. If `model` is set and `folder` is not, the model is
    `bridge.engine.models.dense.Dense`, built from `model`, the model section of a plan.

    If `folder` is set, the model is the Hugging Face model of the config.json in this folder.
    `architecture` then only gives the size of the vocabulary and the length of the samples. A stack
    with model code of its own builds the Hugging Face model anew from `model`; `first` holds the
    weights of the Hugging Face model under the native names.

    `micro` is the number of sequences in a microbatch if the config leaves it open. `rows` are the
    samples; if they are given, dropout is off. `groups` are the parameter groups of the script's
    optimizer, in the form of the file that `move` writes (`bridge.checkpoint.groups`). The groups are
    used if the config states none. Stacks that make their own groups ignore them.
    """

    architecture: Architecture
    seed: int = 1234
    micro: int = MICRO
    model: Model | None = None
    folder: Path | None = None
    first: Mapping[str, Tensor] | None = None
    rows: Rows | None = None
    groups: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one step: the mean loss over all ranks, the global gradient norm before
    clipping, the learning rate, whether weights changed, and the loss scale of the step. None
    stands for a value that the stack does not report.
    """

    loss: float
    grad_norm: float | None = None
    lr: float | None = None
    updated: bool = True
    scale: float | None = None


class Trainer(Protocol):
    """A run that was opened on this rank. All ranks call the same methods in the same order."""

    @property
    def data(self) -> tuple[int, int]:
        """This rank's index among the data ranks, and the number of data ranks; all ranks of one
        copy of the model have the same index.
        """
        ...

    @property
    def accumulation(self) -> int:
        """Number of microbatches that each data rank runs in a step."""
        ...

    @property
    def micro(self) -> int:
        """Number of sequences in a microbatch."""
        ...

    def train_batch(self, batches: Iterable[Batch]) -> Step:
        """Run one step on the next `accumulation` microbatches of `batches`, and return the result
        of the step. `batches` yields the microbatches of this data rank.
        """
        ...

    def resume(self, place: Path) -> int:
        """Resume from the checkpoint at `place`, which is in the stack's own format. Returns the
        number of steps that were made before the checkpoint was written, skipped steps included.

        Raises `BridgeError` if the checkpoint cannot be read.
        """
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return every parameter of the native GPT by its global name: whole tensors on the CPU in
        fp32. If the optimizer has masters, the values are those of the masters.

        Rank 0 gets all parameters; other ranks may get fewer.
        """
        ...

    def bytes(self) -> Mapping[str, int]:
        """Bytes of live tensors on this rank by kind: `weights` (in the format of the forward
        pass), `gradients` (the most that were live after a microbatch of the last step, before the
        update), `optimizer` (moments, and masters that are separate tensors).
        """
        ...

    def close(self) -> None:
        """End the run, and close everything that the run opened in this process, such as process
        groups. The default process group stays open.
        """
        ...


class Backend(ABC):
    """One engine. `bridge.engine.backends` finds the engines of stacks: each is the constant
    `BACKEND` of a stack's module `runtime.backend`.

    Loading this module must be fast: neither torch nor the stack is imported before `open` is
    called.
    """

    name: ClassVar[str]
    """The dialect's name, or "native"."""
    title: ClassVar[str]
    optional: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Changes of settings, each of which switches off one part of the training script; None removes
    a setting. If numbers differ, `verify` repeats the run with such a change to find the cause.
    """

    modules: ClassVar[tuple[str, ...]] = ()
    """Modules that `open` imports."""
    least: ClassVar[int] = 1
    """The least number of ranks that the engine needs."""
    inside: Backend | None = None
    """The engine for scripts that were written for the stack: the native engine, which implements
    the classes and functions that such scripts import from the stack.
    """

    @property
    @abstractmethod
    def release(self) -> str | None:
        """The installed release of the stack; None if the stack is not installed."""

    def load(self) -> None:
        """Import the modules that `open` uses, so that processes forked from this one need not
        import them.
        """
        for module in self.modules:
            import_module(module)

    @abstractmethod
    def refusals(self, plan: Plan, world: int) -> tuple[str, ...]:
        """Return the reasons why a run of `plan` on `world` ranks is impossible with this engine,
        or would give other numbers than the plan means.

        Each reason reads `path: found VALUE; REASON` and is about one field. The result is empty if
        the engine can run the plan, even if the stack is not installed.
        """

    @abstractmethod
    def open(self, run: Config | Plan, workload: Workload) -> Trainer:
        """Set up a run on the ranks of the process group: the one that this process has joined, or
        else the one that the launcher's environment describes.

        A config of the engine's own stack runs as it is written, even where the stack ignores a
        setting or gets it wrong. The engine runs the config with a training script such as users
        of the stack write. For a plan, the dialect first writes a config. The native engine takes
        configs of all stacks, and lifts each to a plan. Raises `BridgeError` if the engine cannot
        run the config or plan.
        """

    def start(self, script: Written, config: Config, workload: Workload) -> Trainer:
        """Like `open`, but set up a run of the training script instead of a config.
        `Dialect.program` generated `script` for `config`.
        """
        raise BridgeError(f"{self.name}: this engine runs no training scripts")

    def as_loaded(self, hub: Hub) -> Hub:
        """Return the checkpoint `hub` with the values that this engine would have after loading it
        on this machine. If loading changes no value, this is `hub` itself.
        """
        return hub

    def following(self, config: Config) -> Backend:
        """Return the engine for a run that resumes from a checkpoint of a run of `config`. By
        default this is the same engine.
        """
        return self

    def edit_config(self, config: Config, changes: Mapping[str, Any], world: int) -> Config:
        """Return `config`, a config of this stack, changed so that the plan fields in `changes`
        have the given values. Everything else stays as it was written.
        """
        return edit_config(config, changes, world)

    def meaning(self, config: Config) -> Plan:
        """Return the plan that `config`, a config of this stack, means when it runs with the
        training script that `open` uses.
        """
        return lift(config)


LAYOUT = (
    *(
        f"parallel.{axis}"
        for axis in ("data", "tensor", "pipeline", "context", "expert", "sequence")
    ),
    *("zero.stage", "schedule.name", "schedule.virtual"),
)
"""Plan fields that place a model on ranks. They change no numbers, but a user who sets one of these
fields expects this placement.
"""


def unkept(plan: Plan, dialect: Dialect, version: str | None, world: int) -> Iterator[str]:
    """Yield one line for each field of `plan` that a config of `dialect` cannot express, if the
    field changes numbers or the placement. The line states the reason. If the stack refuses the
    whole plan, yield the lines of this refusal.
    """
    try:
        target = lower(plan, dialect, version, world)
        values = lift(target).values()
    except BridgeError as error:
        yield from error.problems
        return
    effective = target.effective.flat()
    for path, rule in plan_claims(dialect).items():
        value = plan.values().get(path)
        matters = path in LAYOUT or rule.effect_of(effective).reaches(Effect.NUMBERS)
        if (
            matters
            and not path.startswith(("model.", "run."))
            and not _as_good(path, value, values.get(path), plan)
        ):
            reason = rule.lossy or rule.note or f"{dialect.title} uses {values.get(path)!r} instead"
            yield f"{path}: found {value!r}; {reason}"


def _as_good(path: str, value: Any, other: Any, plan: Plan) -> bool:
    """Return whether a plan with the value `other` at `path` runs like a plan with `value` there:
    the two are equal, or `other` is a higher ZeRO level, or `other` is unset and `value` is a default
    such as 0 or "none".
    """
    if path == "zero.stage" and other is not None:
        # A higher level shards more of the state and computes the same numbers.
        return bool(other >= (value or 0))
    if value is None or other == value:
        return True
    if path == "parallel.sequence" and (plan.parallel.tensor or 1) == 1:
        return True
    # True equals 1 in Python, so a switch that is on would pass for a size of one.
    asks_for_nothing = value in (False, 0, 1, "none", "1f1b") and value is not True
    return other is None and asks_for_nothing
