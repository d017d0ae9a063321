"""Backends: what trains a plan, the native engine or a stack's own, each behind the same small interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from bridge.dialect import Config, Dialect, Written
from bridge.edits import edited
from bridge.errors import BridgeError
from bridge.layout.architecture import Architecture
from bridge.model import Model
from bridge.plan import Plan
from bridge.rules import Effect
from bridge.translation import lift, lower, plan_claims

if TYPE_CHECKING:
    from torch import Tensor

    from bridge.engine.rows import Rows
    from bridge.state.groups import Row
    from bridge.state.hub import Hub

    Batch = tuple[Tensor, Tensor]
    """Tokens and targets of a microbatch, each (sequences, tokens), int64; the loss leaves out
    targets of -100.
    """

MICRO = 4
"""Sequences in a microbatch if neither the config nor the caller sets their number."""


@dataclass(frozen=True)
class Workload:
    """The model and data of a run, the same on every backend.

    By default the model is the native GPT of that shape, with the first weights that `seed` draws
    (`bridge.engine.models.gpt.GPT(architecture, seed)`), or a model of the stack's own that
    computes the same. With a `model` it is the model that a plan describes
    (`bridge.engine.models.dense.Dense`), of that same shape.

    With a `folder` it is the Hugging Face model that the config.json there describes.
    `architecture` then only gives the size of the vocabulary and the length of the samples. `model`
    is what a plan says of that model, for stacks that bring one of their own, and `first` holds its
    weights under the native names.

    `micro` is used if the config leaves the microbatch open. `rows` are the samples if they are
    given; dropout is then off.
    `groups` are those of the script's optimizer, in the form of the file that `move` writes
    (`bridge.state.groups`), if the config does not have them; stacks that make their own groups
    ignore them.
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
        """Run one step on the next `accumulation` microbatches of `batches`, which are those of
        this data rank.
        """
        ...

    def resume(self, place: Path) -> int:
        """Resume from the checkpoint at `place`, which is in the stack's own format. Returns the
        number of steps before it, skipped steps included.

        Raises `BridgeError` if the checkpoint cannot be read.
        """
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Every parameter of the native GPT by its global name, whole, on the CPU in fp32.

        They are the values that the optimizer keeps: the masters, if there are any. Rank 0 gets all
        of them; other ranks may get fewer.
        """
        ...

    def bytes(self) -> Mapping[str, int]:
        """Bytes of live tensors on this rank by kind: `weights` (in the format of the forward
        pass), `gradients` (the most that were live after a microbatch of the last step, before the
        update), `optimizer` (moments, and masters that are separate tensors).
        """
        ...

    def close(self) -> None:
        """End the run, and close what it set up in this process, such as groups; the default
        process group stays open.
        """
        ...


class Backend(ABC):
    """One engine. `bridge.stacks.backends` finds the engines of stacks: each is the constant
    `BACKEND` of a stack's module `runtime.backend`.

    Loading it must be light: it imports neither torch nor the stack before `open`.
    """

    name: ClassVar[str]
    """The dialect's name, or "native"."""
    title: ClassVar[str]
    optional: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Settings that switch off a part of the training script (None: unset). `verify` tries them
    when numbers differ.
    """

    modules: ClassVar[tuple[str, ...]] = ()
    """Modules that `open` imports."""
    least: ClassVar[int] = 1
    """The least number of ranks that it needs."""
    inside: Backend | None = None
    """The native engine behind the stack's own interface, for the scripts of its users."""

    @property
    @abstractmethod
    def release(self) -> str | None:
        """The release that would run; None if it is not installed."""

    def load(self) -> None:
        """Import what `open` needs, so that processes forked from this one need not."""
        for module in self.modules:
            import_module(module)

    @abstractmethod
    def refusals(self, plan: Plan, world: int) -> tuple[str, ...]:
        """The reasons why this engine cannot run `plan` on `world` ranks with the numbers that the
        plan means.

        Each reads `path: found VALUE; REASON` and is about one field; empty if the engine can run
        the plan. A stack that is not installed is no such reason.
        """

    @abstractmethod
    def open(self, run: Config | Plan, workload: Workload) -> Trainer:
        """Set up a run on the ranks of the process group: the one that this process has joined, or
        else the one that the launcher's environment describes.

        A config of the stack's own runs as it is written, even where the stack ignores a setting or
        gets it wrong, with a training script like those of its users. A plan runs as it is meant:
        with the config that the dialect writes for it. The native engine lifts configs of any
        stack. Raises `BridgeError` if it cannot run them.
        """

    def start(self, written: Written, config: Config, workload: Workload) -> Trainer:
        """Set up the run of the script `written`, which `Dialect.program` made for `config`, as
        `open` does for a config.
        """
        raise BridgeError(f"{self.name}: runs no script of its own")

    def taken(self, hub: Hub) -> Hub:
        """`hub` as this engine would load it on this machine; `hub` itself if loading changes no
        value.
        """
        return hub

    def following(self, config: Config) -> Backend:
        """The engine for runs that resume from checkpoints of `config`. Such a run may train a
        smaller model.
        """
        return self

    def edited(self, config: Config, changes: Mapping[str, Any], world: int) -> Config:
        """`config`, which is one of the stack's own, with the plan fields `changes` changed and
        everything else as it was written.
        """
        return edited(config, changes, world)

    def meaning(self, config: Config) -> Plan:
        """The meaning of a config of the stack's own, together with that of the training script in
        `open`.
        """
        return lift(config)


LAYOUT = (
    *(
        f"parallel.{axis}"
        for axis in ("data", "tensor", "pipeline", "context", "expert", "sequence")
    ),
    *("zero.stage", "schedule.name", "schedule.virtual"),
)
"""Fields that place a model on ranks. They change no numbers, but whoever sets one asks for that
placement.
"""


def unkept(plan: Plan, dialect: Dialect, version: str | None, world: int) -> Iterator[str]:
    """A line with the reason for each field of `plan` that a config of `dialect` does not keep, if
    numbers or the placement depend on it. If the stack refuses the plan, the lines are those of the
    refusal.
    """
    try:
        target = lower(plan, dialect, version, world)
        kept = lift(target).values()
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
            and not _as_good(path, value, kept.get(path), plan)
        ):
            yield f"{path}: found {value!r}; {rule.lossy or rule.note or f'{dialect.title} makes it {kept.get(path)!r}'}"


def _as_good(path: str, value: Any, kept: Any, plan: Plan) -> bool:
    """Whether `kept` runs as `value` would: it is the same, shards more, or is unset for a value
    that asks for nothing.
    """
    if path == "zero.stage" and kept is not None:
        # A higher level shards more of the state and computes the same numbers.
        return bool(kept >= (value or 0))
    if value is None or kept == value:
        return True
    if path == "parallel.sequence" and (plan.parallel.tensor or 1) == 1:
        return True
    # True equals 1 in Python, so a switch that is on would pass for a size of one.
    asks_for_nothing = value in (False, 0, 1, "none", "1f1b") and value is not True
    return kept is None and asks_for_nothing
