"""Pipelines on real ranks: what each runs, every combination of them, and a script that runs them all.

`python -m tests.engine.pipelines` runs every combination in fp64, fp32 and bf16 and prints the largest errors; a number format
after it runs that one, and part of a name after that some of the combinations.
"""

from __future__ import annotations

import re
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, product
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import compat
from bridge.engine import initialize
from bridge.engine.models.gpt import Architecture, mean_cross_entropy, sum_cross_entropy
from bridge.engine.training import Training
from bridge.layout.schedule.timeline import in_flight
from bridge.plan.plan import Plan
from bridge.translation.lift import lift
from tests.engine.runs import (
    SHAPE,
    Case,
    Outcome,
    distance,
    global_batch,
    microbatches,
    model_of,
    plain,
    trained,
)

RATE = 0.3
SGD = {"precision.compute": "fp64", "optimizer.name": "sgd", "optimizer.lr": RATE}
ADAMW = {
    "precision.compute": "fp64",
    "optimizer.name": "adamw",
    "optimizer.lr": 0.01,
    "optimizer.eps": 1e-4,
    "optimizer.weight_decay": 0.1,
    "optimizer.clip": 0.5,
}
DEEP = replace(SHAPE, layers=6)
"""Eight layers: embedding, six blocks, head; tied."""
ACTION = re.compile(r"\d+(F|B|I|W|R|SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD)\d*")
FULL = {"recompute.granularity": "full"}

SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "gpipe": {"schedule.name": "gpipe"},
    "1f1b": {"schedule.name": "1f1b"},
    "interleaved": {"schedule.name": "interleaved_1f1b", "schedule.virtual": 2},
    "groups of five": {
        "schedule.name": "interleaved_1f1b",
        "schedule.virtual": 2,
        "schedule.group": 5,
    },
    "breadth first": {
        "schedule.name": "looped_bfs",
        "stages.layers_per_stage": 1,
        "schedule.depth_first": 2,
    },
    "zero bubble": {"schedule.name": "zero_bubble", "schedule.virtual": 2},
    "zero bubble, one stage": {"schedule.name": "zero_bubble"},
    "zero bubble v": {"schedule.name": "zero_bubble_v"},
    "zero bubble v, recomputed": {"schedule.name": "zero_bubble_v", **FULL},
    "pre-recompute": {"schedule.name": "pre_recompute_1f1b", **FULL},
    "last no recompute": {"schedule.name": "last_no_recompute_1f1b", **FULL},
    "critical path": {"schedule.name": "shifted_critical_path", **FULL},
    "1f1b, recomputed": {
        "schedule.name": "1f1b",
        **FULL,
        "recompute.layers": 2,
        "stages.layers_per_stage": 4,
    },
}
"""Schedules and what else a plan needs for them."""
MESHES: Mapping[str, Mapping[str, Any]] = {
    "pp2 dp2": {"parallel.pipeline": 2, "parallel.data": 2},
    "pp4": {"parallel.pipeline": 4},
    "pp2 tp2": {"parallel.pipeline": 2, "parallel.tensor": 2, "parallel.sequence": True},
}
BUFFERS: Mapping[str, Mapping[str, Any]] = {
    "one buffer": {"zero.weight_buffers": 1, "zero.grad_buffers": 1},
    "all buffers": {},
}


def combinations() -> Iterator[tuple[str, Case]]:
    """Every schedule on every mesh at every ZeRO level, with one buffer and with as many as the level has."""
    for (name, schedule), (mesh, sizes), level, (buffers, counts) in product(
        SCHEDULES.items(), MESHES.items(), range(4), BUFFERS.items()
    ):
        if mesh == "pp2 tp2" and (level, buffers) not in ((0, "all buffers"), (3, "one buffer")):
            continue
        if name == "1f1b, recomputed" and mesh == "pp4":
            schedule = {**schedule, "stages.layers_per_stage": 2}
        microbatch_number = 10 if name == "groups of five" else 8
        values = {
            **SGD,
            **sizes,
            **schedule,
            **counts,
            "zero.stage": level,
            "batch.accumulation": microbatch_number,
        }
        batch = microbatch_number * 2
        yield f"{name}; {mesh}; ZeRO {level}, {buffers}", Case(values, DEEP, batch=batch)


@dataclass(frozen=True)
class Run:
    """Losses, norms and gradients of each step; the actions that one rank took in the last and those planned; its traffic."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    actions: list[str]
    planned: list[str]
    traffic: dict[str, tuple[int, int]]
    predicted: dict[str, tuple[int, int]]
    peak: int
    bytes: dict[str, int]
    predicted_bytes: dict[str, int]


def piped(rank: int, world: int, case: Case) -> Run:
    """Train on the engine with a bare rate, so that the change of a weight is its gradient."""
    plan = Plan.of(case.plan)
    loss = sum_cross_entropy if plan.loss == "per_token" else mean_cross_entropy
    engine = initialize(model_of(case), plan, loss, seed=11)
    losses, norms, gradients, actions = [], [], [], list[str]()
    before = {name: weight.clone() for name, weight in engine.state_dict()}
    for step in range(case.steps):
        engine.comm.ledger.clear()
        events = engine.comm.ledger.events = []
        losses.append(engine.train_batch(list(microbatches(case, engine, step))))
        engine.comm.ledger.events = None
        actions = [event for event in events if ACTION.fullmatch(event)]
        norms.append(engine.progress.grad_norm)
        traffic = {
            name: (found.count, found.bytes) for name, found in engine.comm.ledger.totals.items()
        }
        after = {name: weight.clone() for name, weight in engine.state_dict()}
        gradients.append({name: (before[name] - after[name]) / RATE for name in after})
        before = after
    predicted = engine.traffic(case.batch * case.tokens // engine.accumulation // engine.data.size)
    return Run(
        losses,
        norms,
        gradients if rank == 0 else [],
        actions,
        [str(action) for action in engine.executor.row],
        traffic,
        {name: (found.count, found.bytes) for name, found in predicted.items()},
        engine.executor.peak,
        engine.bytes(),
        engine.layout.bytes(),
    )


def piped_all(rank: int, world: int, cases: list[Case]) -> list[Run]:
    """Several, one after the other."""
    return [piped(rank, world, case) for case in cases]


def alone(case: Case) -> Run:
    """The same training in one process with nothing but torch."""
    model = model_of(case)
    losses, norms, gradients = [], [], []
    for step in range(case.steps):
        inputs, targets = global_batch(case, step)
        total, count = sum_cross_entropy(model(inputs), targets)
        model.zero_grad()
        torch.autograd.backward(total / count)
        found = {
            name: weight.grad.clone()
            for name, weight in model.named_parameters()
            if weight.grad is not None
        }
        norms.append(
            float(
                torch.stack([gradient.square().sum() for gradient in found.values()]).sum().sqrt()
            )
        )
        losses.append(float(total.detach() / count))
        gradients.append(found)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight -= RATE * found[name]
    return Run(losses, norms, gradients, [], [], {}, {}, 0, {}, {})


def error(runs: list[Run], expected: Run) -> float:
    """The largest relative error of losses, norms and gradients; every rank must have done and sent what was planned."""
    for run in runs:
        assert run.actions == run.planned
        assert run.traffic == run.predicted
        assert run.bytes == run.predicted_bytes
    numbers = [
        abs(found / wanted - 1)
        for run in runs
        for found, wanted in zip(
            run.losses + run.norms, expected.losses + expected.norms, strict=True
        )
    ]
    steps = [
        distance(found, wanted)
        for found, wanted in zip(runs[0].gradients, expected.gradients, strict=True)
    ]
    return max(numbers + steps)


def rounded(case: Case, compute: str) -> Case:
    """The case in another number format: five steps of AdamW from the same weights."""
    return replace(
        case,
        plan={**case.plan, **ADAMW, "precision.compute": compute},
        dtype=torch.float32,
        steps=5,
    )


@cache
def references(batch: int) -> tuple[Outcome, Outcome]:
    """The same five steps in one process, in fp32 and all in bf16."""
    case = Case(ADAMW, DEEP, batch=batch, steps=5)
    return plain(replace(case, dtype=torch.float32)), plain(replace(case, dtype=torch.bfloat16))


def excess(outcomes: list[Outcome], case: Case) -> float:
    """Distance from one process in fp32 over what is allowed: 1e-5 of the first gradient norm and of each loss in fp32; in bf16
    twice the distance that one process has in it.
    """
    exact, rough = references(case.batch)
    losses = max(_apart(outcome, exact) for outcome in outcomes)
    if case.plan["precision.compute"] == "bf16":
        return losses / (2 * _apart(rough, exact))
    return max(losses, *(abs(outcome.norms[0] / exact.norms[0] - 1) for outcome in outcomes)) / 1e-5


def _apart(one: Outcome, other: Outcome) -> float:
    """The largest relative distance of two runs' losses."""
    return max(
        abs(found / wanted - 1) for found, wanted in zip(one.losses, other.losses, strict=True)
    )


def resumed(
    rank: int, world: int, first: Case, second: Case, folder: Path
) -> tuple[list[float], list[float]]:
    """Losses of steps two and three: trained on with `first`, and read back into `second`, another layout and seed."""
    engine = initialize(model_of(first), Plan.of(first.plan), mean_cross_entropy, seed=11)
    engine.train_batch(list(microbatches(first, engine, 0)))
    engine.save_checkpoint(folder)
    expected = [engine.train_batch(list(microbatches(first, engine, step))) for step in (1, 2)]
    other = initialize(
        model_of(replace(second, seed=99)), Plan.of(second.plan), mean_cross_entropy, seed=12
    )
    other.load_checkpoint(folder)
    return expected, [other.train_batch(list(microbatches(second, other, step))) for step in (1, 2)]


def evaluated(rank: int, world: int, case: Case) -> tuple[float, float, float]:
    """Loss of one batch by evaluation, before and after another step of training, and the loss of that step."""
    engine = initialize(model_of(case), Plan.of(case.plan), mean_cross_entropy, seed=11)
    batch = global_batch(case, 0)
    before = float(engine.eval_batch(batch))
    loss = engine.train_batch(list(microbatches(case, engine, 0)))
    return before, float(engine.eval_batch(batch)), loss


def overflowed(rank: int, world: int, case: Case) -> tuple[list[float], int, bool]:
    """Three steps, in the second of which the last pipeline rank of one data rank gets an infinite loss."""
    engine = initialize(model_of(case), Plan.of(case.plan), mean_cross_entropy)
    plain, scales, same = engine.loss_fn, [], False
    for step in range(3):
        bad = step == 1 and engine.data.index == engine.data.size - 1
        engine.loss_fn = (
            (lambda output, targets: plain(output, targets) * torch.inf) if bad else plain
        )
        before = {name: weight.clone() for name, weight in engine.state_dict()}
        engine.train_batch(list(microbatches(case, engine, step)))
        scales.append(engine.scaler.scale)
        unchanged = all(torch.equal(weight, before[name]) for name, weight in engine.state_dict())
        same = unchanged if step == 1 else same and not unchanged
    return scales, engine.progress.skipped, same


def unequal(
    rank: int, world: int, values: Mapping[str, Any], variable: bool
) -> tuple[list[float], list[float]]:
    """Losses with microbatches of unequal lengths, through pipelines and alone."""
    lengths = [(4, 6, 3, 5), (6, 6, 2, 4)]
    case = Case({**SGD, **values})
    plan = Plan.of(case.plan)
    engine = initialize(model_of(case), plan, sum_cross_entropy, variable_shapes=variable)
    model, losses, expected = model_of(case), [], []
    for step, sizes in enumerate(lengths):
        inputs, targets = global_batch(case, step)
        parts = [
            (inputs[2 * row : 2 * row + 2, :size], targets[2 * row : 2 * row + 2, :size])
            for row, size in enumerate(sizes)
        ]
        losses.append(engine.train_batch(parts))
        found = [sum_cross_entropy(model(part), goal) for part, goal in parts]
        total = torch.stack([part for part, _ in found]).sum() / sum(count for _, count in found)
        model.zero_grad()
        torch.autograd.backward(total)
        with torch.no_grad():
            for weight in model.parameters():
                weight -= RATE * weight.grad
        expected.append(float(total.detach()))
    return losses, expected


class Kept(torch.nn.Module):
    """A layer that knows how many of its activations wait for backward."""

    alive: ClassVar[set[int]] = set()
    most = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        """(rows, 4) to the same."""
        found: Tensor = _Watched.apply(self.linear(value))  # type: ignore[no-untyped-call]
        return found


class _Watched(torch.autograd.Function):
    """Keeps an activation for backward, and counts those that live."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        kept = value.sin()
        Kept.alive.add(id(kept))
        Kept.most = max(Kept.most, len(Kept.alive))
        weakref.finalize(kept, Kept.alive.discard, id(kept))
        context.kept = kept
        return kept.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.5


def peaks(rank: int, world: int, values: Mapping[str, Any], stages: int) -> tuple[int, int, int]:
    """The most activations in flight: planned, counted by the executor, and tensors that were alive at a time."""
    model = [Kept() for _ in range(stages)]
    engine = initialize(model, Plan.of(values), torch.nn.functional.mse_loss)
    Kept.alive.clear()
    Kept.most = 0
    batches = [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(engine.accumulation)]
    planned = in_flight(engine.executor.row)
    counted = []
    run = engine.executor.run
    engine.executor.run = lambda feed: (run(feed), counted.append(engine.executor.peak))[0]  # type: ignore[method-assign]
    engine.train_batch(batches)
    return planned, counted[0], Kept.most


def from_file(
    rank: int, world: int, path: Path, one: bool = False
) -> tuple[list[str], list[float]]:
    """Train what a recipe on disk says on the model that it describes, or with `one` without its pipeline: this rank's layers,
    and the losses.
    """
    plan = lift(compat.load("automodel").read(path, world_size=2))
    single = {
        "parallel.pipeline": None,
        "stages.boundaries": None,
        "stages.rule": None,
        "schedule.virtual": None,
    }
    shape = Architecture.of(plan.model.model_copy(update={"vocab": 256, "sequence": 8}))
    training = Training.of(Plan.of({**plan.values(), **(single if one else {})}), shape)
    engine = training.engine
    local = engine.pipeline.local(engine.line.index)
    layers = [shape.names[layer] for stage in local for layer in engine.pipeline.layers[stage]]
    return layers, [report.loss for report in training.steps(3)]


def endless(folder: Path) -> None:
    """Train for ever with a checkpoint after the second step, as a launcher's rank does; a file for each step that is done."""
    case = Case({**SGD, "parallel.pipeline": 2, "batch.accumulation": 4})
    engine = initialize(model_of(case), Plan.of(case.plan), mean_cross_entropy, seed=11)
    for step in count():
        engine.train_batch(list(microbatches(case, engine, step % 3)))
        if step == 1:
            engine.save_checkpoint(folder)
        (folder / f"{engine.comm.rank}.{step}").touch()


@cache
def one_process(batch: int) -> Run:
    """The three steps of a combination with as many sequences, in one process."""
    return alone(Case(SGD, DEEP, batch=batch))


def measured(pool: Any, case: Case, compute: str) -> float:
    """A combination's error over what is allowed."""
    if compute == "fp64":
        return error(pool.run(piped, case), one_process(case.batch)) / 1e-9
    case = rounded(case, compute)
    return excess(pool.run(trained, case), case)


def main(compute: str = "", part: str = "") -> None:
    """Run the combinations whose names contain `part`; exit with 1 if one is off."""
    from tests.engine.pool import Pool

    pool, worst = Pool(4), 0.0
    for each in [compute] if compute else ["fp64", "fp32", "bf16"]:
        start, errors = time.perf_counter(), dict[str, float]()
        for name, case in combinations():
            if part in name:
                try:
                    errors[name] = measured(pool, case, each)
                except Exception as problem:
                    errors[name] = float("inf")
                    print(
                        f"{each}; {name}: FAILED {type(problem).__name__} {str(problem)[-600:]}",
                        flush=True,
                    )
        for name, found in errors.items():
            if 1 < found < float("inf"):
                print(f"{each}; {name}: {found:.2g} of what is allowed", flush=True)
        worst = max(worst, *errors.values())
        seconds = time.perf_counter() - start
        print(
            f"{each}: {len(errors)} combinations, largest error {max(errors.values()):.2g} of what is allowed, {seconds:.0f} s"
        )
    pool.close()
    sys.exit(worst > 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
