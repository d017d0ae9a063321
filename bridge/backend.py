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
    """Tokens and targets of a microbatch, each (sequences, tokens), int64; targets of -100 do not count."""

MICRO = 4
"""Sequences in a microbatch where nothing says."""


@dataclass(frozen=True)
class Workload:
    """What is trained, the same on every backend: a native GPT of that shape with the first weights that `seed` draws
    (`bridge.engine.models.gpt.GPT(architecture, seed)`), or a model of the stack's own that computes the same. With a `model` it
    is the one that a plan describes so (`bridge.engine.models.dense.Dense`), of that same shape.

    `micro` counts where the config leaves the microbatch open. With a `folder` it is the model of Hugging Face that the
    config.json there describes, and `architecture` says no more than the words and tokens of its samples; `model` is then what a
    plan says of it, for stacks that bring a model of their own, and `first` its weights under the native names. With `rows` these
    are the samples, and nothing is dropped at random. `groups` are those of the script's optimizer, as in the file that `move`
    writes (`bridge.state.groups`), where the config does not say them; a stack whose groups are its own passes them by.
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
    """What one step gave: the mean loss over all ranks, the global gradient norm before clipping and the learning rate (None
    where the stack does not tell), whether weights changed, and the loss scale that it ran with (None: none, or not told).
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
        """This rank's place among the data ranks, and their number; ranks of one model share a place."""
        ...

    @property
    def accumulation(self) -> int:
        """Microbatches that each data rank takes in a step."""
        ...

    @property
    def micro(self) -> int:
        """Sequences in a microbatch."""
        ...

    def train_batch(self, batches: Iterable[Batch]) -> Step:
        """One step over the next `accumulation` of `batches`, those of this data rank."""
        ...

    def resume(self, place: Path) -> int:
        """Go on from the checkpoint `place`, of the stack's own; the steps behind it, skipped ones too. Raises `BridgeError`."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Every parameter of the native GPT by its global name, whole, on the CPU in fp32: the values that the optimizer keeps
        (masters, where there are any). Rank 0 gets all; others may get less.
        """
        ...

    def bytes(self) -> Mapping[str, int]:
        """Bytes of live tensors on this rank by kind: `weights` (those computed with), `gradients` (the most that stood after a
        microbatch of the last step, before the update), `optimizer` (masters that are kept apart, and moments).
        """
        ...

    def close(self) -> None:
        """End the run and what it set up for the whole process, such as groups; the default process group stays."""
        ...


class Backend(ABC):
    """One engine. A stack has one if its folder has a module `runtime.backend` with a `BACKEND`; see `bridge.stacks.backends`.

    Loading it must be light: neither torch nor the stack before `open`.
    """

    name: ClassVar[str]
    """The dialect's name, or "native"."""
    title: ClassVar[str]
    optional: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Settings that do without something of the training script (None: unset), which `verify` tries when numbers differ."""

    modules: ClassVar[tuple[str, ...]] = ()
    """What `open` imports."""
    least: ClassVar[int] = 1
    """Ranks that it needs."""
    inside: Backend | None = None
    """The native engine behind the stack's own interface, for the scripts of its users."""

    @property
    @abstractmethod
    def release(self) -> str | None:
        """The release that would run; None if it is not installed."""

    def load(self) -> None:
        """Import what `open` needs, so that processes which are forked from this one have it."""
        for module in self.modules:
            import_module(module)

    @abstractmethod
    def refusals(self, plan: Plan, world: int) -> tuple[str, ...]:
        """Why this engine cannot run `plan` on `world` ranks with the numbers that it means: `path: found VALUE; REASON` for each
        field in the way; empty if it can. Not being installed is no such reason.
        """

    @abstractmethod
    def open(self, run: Config | Plan, workload: Workload) -> Trainer:
        """Set up a run on the ranks of this process group (joined, or as the launcher's environment says).

        A config of the stack's own runs as it is written, its traps included, with a training script as its users write it. A
        plan runs as it is meant, by the config that the dialect writes for it; the native engine lifts configs of any stack.
        Raises `BridgeError` if that cannot be run.
        """

    def start(self, written: Written, config: Config, workload: Workload) -> Trainer:
        """Set up the run of a whole script, which `Dialect.program` wrote for `config`, as `open` sets up that of a config."""
        raise BridgeError(f"{self.name}: runs no script of its own")

    def taken(self, hub: Hub) -> Hub:
        """A checkpoint as a run of this engine on this machine keeps it, where that is otherwise; else `hub` itself."""
        return hub

    def following(self, config: Config) -> Backend:
        """This engine for runs that go on from checkpoints of `config`, which may be made small before it is opened."""
        return self

    def edited(self, config: Config, changes: Mapping[str, Any], world: int) -> Config:
        """A config of the stack's own with those plan fields changed, all else as it was written; see `bridge.edits`."""
        return edited(config, changes, world)

    def meaning(self, config: Config) -> Plan:
        """What a config of the stack's own means, together with what the training script does in `open`."""
        return lift(config)


LAYOUT = (
    *(f"parallel.{axis}" for axis in ("data", "tensor", "pipeline", "context", "expert", "sequence")),
    *("zero.stage", "schedule.name", "schedule.virtual"),
)
"""Fields that place a model on ranks: who asks for them means them, though they change no numbers."""


def unkept(plan: Plan, dialect: Dialect, version: str | None, world: int) -> Iterator[str]:
    """The fields of `plan` that numbers or places depend on and that a config of `dialect` does not keep, each with why; what the
    stack refuses to read counts too.
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
        if matters and not path.startswith(("model.", "run.")) and not _as_good(path, value, kept.get(path), plan):
            yield f"{path}: found {value!r}; {rule.lossy or rule.note or f'{dialect.title} makes it {kept.get(path)!r}'}"


def _as_good(path: str, value: Any, kept: Any, plan: Plan) -> bool:
    """Whether what is kept means the same: what is off may stay unsaid, and a higher ZeRO level shards more."""
    if path == "zero.stage" and kept is not None:
        return bool(kept >= (value or 0))
    if value is None or kept == value or (path == "parallel.sequence" and (plan.parallel.tensor or 1) == 1):
        return True
    return kept is None and value in (False, 0, 1, "none", "1f1b") and value is not True
