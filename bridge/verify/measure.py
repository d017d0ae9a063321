"""Measures runs: trains a few steps on an engine, and computes the distance between two such runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bridge.checkpoint import renaming
from bridge.checkpoint.hub import Hub, Model, Origin, Parameter
from bridge.checkpoint.lazy import Held
from bridge.engine.comm import everyones, rank_and_world, together
from bridge.engine.data import Drawn, Text
from bridge.engine.interface import Backend, Step, Trainer, Workload
from bridge.engine.rows import IGNORED, Batch, Rows
from bridge.errors import BridgeError
from bridge.files.progress import count_items
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config, Written

STEPS = 3
PATIENCE = 20.0
"""Seconds for which a rank that failed waits until the other ranks have failed too."""
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class EngineRun:
    """A config or a plan to run on an engine, with initial weights or from the checkpoint `start`.
    If `script` is set, the config runs in this script.
    """

    backend: Backend
    what: Config | Plan
    start: Path | None = None
    script: Written | None = None

    def open_trainer(self, workload: Workload) -> Trainer:
        """Return a trainer that is set up for this run, before the first step."""
        if self.script is not None and isinstance(self.what, Config):
            return self.backend.start(self.script, self.what, workload)
        return self.backend.open(self.what, workload)


@dataclass(frozen=True)
class Measured:
    """The numbers of the steps of a run. On the first rank, `weights` has the weights at the start,
    after the first step and at the end. `first` is the number of steps that the checkpoint had done
    before the run.
    """

    steps: tuple[Step, ...]
    weights: tuple[Weights, ...] = ()
    first: int = 0

    @property
    def losses(self) -> tuple[float, ...]:
        """Mean loss of each step."""
        return tuple(step.loss for step in self.steps)


class StrandedError(RuntimeError):
    """Raised if this rank failed while other ranks wait for it in a collective.

    Other ranks go on waiting until this process ends.
    """


def measure(
    run: EngineRun, workload: Workload, steps: int = STEPS, padded: bool = False
) -> Measured:
    """Train `steps` steps, and return the same numbers on all ranks.

    With `padded`, the second half of every third sample has no targets. If a rank fails while other
    ranks wait for it in a collective, the failed rank raises `StrandedError`. If a rank fails
    otherwise, every rank raises `BridgeError`.
    """
    result, problem = _attempt(run, workload, steps, padded)
    # A rank that failed waits for the others to fail as well. If they do not, they are in a
    # collective, and would not come to the comparison below.
    if not together(PATIENCE if problem else 0.0) and problem:
        raise StrandedError(problem)
    problems = everyones(problem)
    BridgeError.raise_if(problem for problem in problems if problem)
    assert result is not None, "no rank reported a problem, yet there is no result"
    return Measured(everyones(result.steps)[0], result.weights, result.first)


def _attempt(
    run: EngineRun, workload: Workload, steps: int, padded: bool
) -> tuple[Measured | None, str]:
    """Return the numbers of the run and "", or None and the reason why the run failed."""
    # Any exception: these are the stack's own, of whatever kind.
    try:
        trainer = run.open_trainer(workload)
    except BridgeError as error:
        return None, "; ".join(error.problems)
    except Exception as error:
        return None, f"{run.backend.name}: failed before training: {type(error).__name__}: {error}"
    try:
        return _train(trainer, workload, steps, padded, run.start), ""
    except Exception as error:
        return None, f"{run.backend.name}: failed while training: {type(error).__name__}: {error}"
    finally:
        trainer.close()


def _train(
    trainer: Trainer, workload: Workload, steps: int, padded: bool, start: Path | None
) -> Measured:
    first = trainer.resume(start) if start else 0
    shape = workload.architecture
    random_data = workload.folder is not None
    own = workload.rows or (
        Drawn(shape.vocab, shape.sequence, workload.seed) if random_data else None
    )
    text = own or Text.of(None, shape.sequence, workload.seed)
    weights, results = [dict(trainer.weights())], []
    for step in count_items(range(first, first + steps)):
        results.append(trainer.train_batch(batches(text, trainer, step, padded)))
        if step in (first, first + steps - 1):
            weights.append(dict(trainer.weights()))
    return Measured(tuple(results), tuple(weights), first)


def batches(
    text: Text | Drawn | Rows, trainer: Trainer, step: int, padded: bool = False
) -> Iterator[Batch]:
    """Yield this data rank's microbatches of a step. A microbatch has tokens and targets, each a
    tensor of shape (samples, sequence).

    Runs with the same global batch get the same samples in a step, however they split the batch.
    """
    (place, places), rows = trainer.data, trainer.micro
    start = step * rows * trainer.accumulation * places
    for index in range(trainer.accumulation):
        first = start + (index * places + place) * rows
        if isinstance(text, Rows):
            yield text.batch(range(first, first + rows))
            continue
        tokens = torch.stack([text.sample(first + row) for row in range(rows)])
        targets = tokens[:, 1:].contiguous()
        if padded:
            targets[
                [row for row in range(rows) if (first + row) % 3 == 0], text.sequence // 2 :
            ] = IGNORED
        yield tokens[:, :-1].contiguous(), targets


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a run is from another run.

    `loss` and `norm` are the largest relative differences between losses and between gradient norms
    of a step. `update` is the relative difference between the changes of all weights. `share` is
    the length of this run's change of all weights, measured along the other run's change and
    divided by the length of the latter. `tensor` names the tensor with the largest relative
    difference, and `worst` is this difference. `scale` is a text on the first step with another
    loss scale, or empty. In a distance that measures rounding, `floor` is a factor for `LOSS` and
    `UPDATE`, the differences that are always allowed. `noise` names tensors that change only by
    rounding, such as biases of keys. Their exact gradients are zero, but Adam turns rounding errors
    into full updates.
    """

    loss: float
    norm: float | None
    update: float
    share: float
    tensor: str
    worst: float
    scale: str = ""
    floor: float = 1.0
    noise: tuple[str, ...] = ()

    def at_least(self, digits: float) -> Distance:
        """Return this distance, enlarged so that it can serve as a measure of rounding. `digits` is
        the distance from 1 to the next number in the format of the run. A run of few tokens may
        round too little by chance, so each part becomes at least a fixed multiple of `digits`.
        """
        # A loss averages over many tokens and a norm over many weights, an update over nothing.
        norm, share = max(self.norm or 0.0, digits / 8), max(abs(self.share - 1), digits / 2)
        return replace(
            self,
            loss=max(self.loss, digits / 80),
            norm=norm,
            update=max(self.update, digits * 2),
            share=1 - share,
        )

    def beyond(self, rounding: Distance) -> tuple[str, ...]:
        """Return the names of the parts of this distance that are larger than rounding explains:
        some of "loss", "norm", "weights" and "scale".
        """
        loss, update = LOSS * rounding.floor, UPDATE * rounding.floor
        noise = MARGIN * rounding.update
        share_loss = noise * noise / 2  # the loss of share that noise of this length causes
        too_far = self.update > noise + update
        too_short = abs(self.share - 1) > MARGIN * abs(rounding.share - 1) + share_loss + update
        verdicts = {
            "loss": self.loss > MARGIN * rounding.loss + loss,
            "norm": self.norm is not None and self.norm > MARGIN * (rounding.norm or 0.0) + loss,
            "weights": too_far or too_short,
            "scale": bool(self.scale),
        }
        return tuple(name for name, further in verdicts.items() if further)


MARGIN = 4.0
"""A distance counts as rounding if it is at most this factor times the measured rounding. The
factor is above 1, because both runs round, and they may sum in different orders.
"""
LOSS, UPDATE = 1e-6, 1e-4
"""Relative differences of losses and of updates that always count as rounding: about the last
digits in fp32.
"""


class OtherModelError(BridgeError):
    """Raised if two runs do not train the same model."""


def _unlike(run: Measured, other: Measured) -> str:
    """Return a text on tensors that only one of the two runs has, or whose shapes differ. The text
    is empty if there are none.
    """
    mine, theirs = (
        {name: tuple(weight.shape) for name, weight in one.weights[0].items()}
        for one in (run, other)
    )
    names = [name for name in dict.fromkeys((*mine, *theirs)) if mine.get(name) != theirs.get(name)]
    differences = "; ".join(
        f"found {name} {mine.get(name, 'missing')}, expected {theirs.get(name, 'missing')}"
        for name in names[:SHOWN]
    )
    return (
        f"tensors differ: {differences}{f' and {len(names) - SHOWN} more tensors' if len(names) > SHOWN else ''}"
        if names
        else ""
    )


SHOWN = 3


def differ_beyond_rounding(run: Measured, other: Measured, rounding: Distance) -> bool:
    """Return whether `run` differs from `other` by more than rounding, or trains another model."""
    try:
        return bool(distance(run, other, rounding.noise).beyond(rounding))
    except OtherModelError:
        return True


def distance(run: Measured, other: Measured, noise: tuple[str, ...] = ()) -> Distance:
    """Return the distance of `run` from `other`, the same on all ranks. The tensors that `noise`
    names are left out.

    Raises `OtherModelError` if the tensors of the two runs differ in names or shapes.
    """
    first = (rank_and_world() or (0, 1))[0] == 0
    unlike = _unlike(run, other) if first else ""
    problem = next(filter(None, everyones(unlike)), "")
    if problem:
        raise OtherModelError(problem)
    gap = everyones(_distance(run, other, noise) if first else None)[0]
    assert gap is not None, "the first rank computes the distance"
    return gap


def _distance(run: Measured, other: Measured, noise: tuple[str, ...]) -> Distance:
    loss = max(
        _relative(first, second) for first, second in zip(run.losses, other.losses, strict=True)
    )
    norm_pairs = [
        (one.grad_norm, two.grad_norm) for one, two in zip(run.steps, other.steps, strict=True)
    ]
    norms = [_relative(one, two) for one, two in norm_pairs if one is not None and two is not None]
    # What training added to each tensor in both runs, after the first step and in the end.
    ends = [
        {
            name: (
                run.weights[end][name].double() - run.weights[0][name],
                other.weights[end][name].double() - start,
            )
            for name, start in other.weights[0].items()
            if name not in noise
        }
        for end in (1, -1)
    ]
    whole = max((_apart(list(pairs.values())) for pairs in ends), key=lambda it: it[0])
    each = {name: _apart([pair])[0] for name, pair in ends[-1].items()}
    worst = max(each, key=lambda name: each[name])
    random = tuple(name for name, off in each.items() if off > RANDOM) if whole[0] < RANDOM else ()
    return Distance(
        loss,
        max(norms, default=None),
        *whole,
        worst,
        each[worst],
        _scales(run, other),
        noise=random,
    )


RANDOM = 0.9
"""If the relative distance between two changes of a tensor is larger than this, the changes are
unrelated. The tensor then changes only by rounding.
"""


def _scales(run: Measured, other: Measured) -> str:
    for number, (one, two) in enumerate(zip(run.steps, other.steps, strict=True), 1):
        if None not in (one.scale, two.scale) and one.scale != two.scale:
            return f"found loss scale {one.scale:g} in step {number}, expected {two.scale:g}"
    return ""


def _apart(pairs: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Return the relative distance between two updates, and the length of the first update relative
    to the second. A pair has one tensor's change in the first and in the second update.

    The distance is the length of the difference divided by the length of the second update. For the
    relative length, the first update is projected on the second.
    """
    squares = sum(float(two.square().sum()) for _, two in pairs)
    gap = sum(float((one - two).square().sum()) for one, two in pairs)
    both = sum(float((one * two).sum()) for one, two in pairs)
    if squares == 0.0:
        return (0.0, 1.0) if gap == 0.0 else (math.inf, math.inf)
    return math.sqrt(gap / squares), both / squares


def _relative(one: float, two: float) -> float:
    if math.isnan(one) or math.isnan(two):
        return 0.0 if math.isnan(one) and math.isnan(two) else math.inf
    return 0.0 if one == two else abs(one - two) / max(abs(two), 1e-30)


def neutral(weights: Weights, facts: Model) -> Weights:
    """Return the weights with the parameter names of the native engine. `facts` are what the
    translation of names needs to know of the model.
    """
    if not weights:
        return weights
    hub = Hub(Origin("a run"), {name: Parameter(Held(weight)) for name, weight in weights.items()})
    return {
        name: parameter.weight.whole()
        for name, parameter in renaming.rename_parameters(
            hub, renaming.Neutral(), facts
        ).parameters.items()
    }
