"""What watching costs: desync checks and layer logs as ratios to the same step without them, and checks to a full comparison.

Prints a table, row by row.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine import RANKS, TIMEOUT, WARMUP, Pair, Time, line, ratios, task_of, timed
from oracles import batch_of
from pool import Pool

from bridge.engine import initialize
from bridge.engine.models.gpt import GPT, mean_cross_entropy
from bridge.engine.runner import Engine
from bridge.engine.tracing import EngineSource
from bridge.plan import Plan
from bridge.trace.desync import Desync, DesyncCheck, Policy
from bridge.trace.layer_log import LayerLog
from bridge.trace.record import Name

WIDTH = 512
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2, ZeRO 0": {"parallel.data": 2, "zero.stage": 0},
    "data 2, ZeRO 2": {"parallel.data": 2, "zero.stage": 2},
    "tensor 2": {"parallel.tensor": 2},
}
CHECKS = {"debug.tensor_parallel": True}
LOGS = {f"debug.{name}": 2 for name in ("layer_outputs", "layer_gradients", "all_param_gradients", "param_update")}
WATCHED = {"checks": (CHECKS, 1.03), "logs at level 2": (LOGS, 1.10)}
"""What is added to a step, and the largest ratio wanted."""
CHEAPER = 3.0
"""How much cheaper checks have to be than gathering the same tensors whole."""


def engine_of(plan: dict[str, Any], folder: str) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """A step on the engine."""
    engine = built(plan, folder)
    return lambda tokens, targets: engine.train_batch([(tokens, targets)])


def built(plan: dict[str, Any], folder: str) -> Engine:
    """An engine with the plan's debug settings."""
    task = task_of(WIDTH)
    settings = {f"optimizer.{name}": getattr(task, name) for name in ("lr", "betas", "eps", "weight_decay", "clip")}
    return initialize(GPT(task.shape), Plan.of({**settings, **plan}), mean_cross_entropy, trace=folder, policy=Policy())


def data_of(rank: int, plan: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """2,048 tokens for each rank, the same for tensor ranks."""
    task = task_of(WIDTH)
    if "parallel.tensor" in plan:
        return batch_of(replace(task, batch=task.batch // RANKS), 0)
    return batch_of(task, 0, rank, RANKS)


def added(rank: int, world: int, plan: dict[str, Any], more: dict[str, Any], folder: str, pairs: int) -> tuple[list[Pair], float]:
    """Times with and without `more`, in turns; and processor time spent within what watches, as a share of the rest."""
    steps, data = [engine_of({**plan, **more}, folder), engine_of(plan, folder)], data_of(rank, plan)
    for step in steps:
        timed(step, data, WARMUP)
    with clocked() as spent:
        found = [in_turns(lambda index: timed(steps[index], data, 1), pair) for pair in range(pairs)]
    whole = sum(watched.processor for watched, _ in found)
    return found, spent[0] / (whole - spent[0])


@contextmanager
def clocked() -> Iterator[list[float]]:
    """Adds up the processor time of all calls of observers while inside."""
    spent, plain = [0.0], [(kind, name, getattr(kind, name)) for kind in (DesyncCheck, LayerLog) for name in ("saw", "reached")]

    def within(call: Callable[..., None]) -> Callable[..., None]:
        def measured(*arguments: object) -> None:
            start = time.process_time()
            call(*arguments)
            spent[0] += time.process_time() - start

        return measured

    for kind, name, call in plain:
        setattr(kind, name, within(call))
    try:
        yield spent
    finally:
        for kind, name, call in plain:
            setattr(kind, name, call)


def in_turns(time: Callable[[int], Time], pair: int) -> Pair:
    """The times of both, the first changing from pair to pair."""
    times = {index: time(index) for index in ((0, 1) if pair % 2 == 0 else (1, 0))}
    return times[0], times[1]


def beside_gathering(rank: int, world: int, plan: dict[str, Any], folder: str, pairs: int) -> list[Pair]:
    """Times of checking every weight, gradient and moment that ranks hold alike, by digests and by gathering them whole."""
    engine, data = built(plan, folder), data_of(rank, plan)
    engine.train_batch([data])
    source, axis = EngineSource(engine), next(axis for axis in ("tensor", "data") if f"parallel.{axis}" in plan)
    kinds = ("weight", "gradient", "moment", "replica")
    held = [part for kind in kinds for part in source.tensors(kind) if axis in part.placement.replicas]  # type: ignore[arg-type]
    desync, group = Desync(engine.comm), engine.comm.group(axis)

    def digests(*_: object) -> None:
        for number, part in enumerate(held):
            desync.hold(Name(1, "reduce", part.layer, None, part.kind, f"{part.tensor} {number}"), part.local, part.placement)
        desync.compare(1)

    def whole(*_: object) -> None:
        for part in held:
            every = part.local.new_empty(group.size, part.local.numel())
            engine.comm.all_gather("yardstick", every.view(-1), part.local.reshape(-1), group)()
            assert not bool((every != every[group.index]).any())

    calls: tuple[Any, Any] = (digests, whole)
    for call in calls:
        call()
    return [in_turns(lambda index: timed(calls[index], data, 1), pair) for pair in range(pairs)]


def row(layout: str, what: str, beside: str, bound: float, found: list[Pair], inside: float | None = None) -> str:
    """One line of the table."""
    times = [f"{statistics.median(pair[index].wall for pair in found) * 1e3:.0f} ms" for index in (0, 1)]
    cells = [layout, what, beside, *times]
    for kind in ("wall", "processor"):
        found_ratios = ratios(found, kind)
        cells.append(f"{statistics.median(found_ratios):.3f} ({found_ratios[0]:.3f} to {found_ratios[-1]:.3f})")
    return line([*cells, "" if inside is None else f"{1 + inside:.3f}", f"{bound:.2f}"])


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--pairs", type=int, default=9, help="measurements of each comparison")
    options.add_argument("--layout", choices=LAYOUTS, action="append", help="only this one")
    given = options.parse_args()
    heads = ("layout", "step with", "beside", "with", "beside", "wall time", "processor time", "measured inside", "bound")
    print(line(heads), line(["---"] * len(heads)), sep="\n")
    pool = Pool(RANKS)
    with tempfile.TemporaryDirectory() as folder:
        for layout in given.layout or LAYOUTS:
            plan = LAYOUTS[layout]
            for what, (more, bound) in WATCHED.items():
                found, inside = pool.run(added, plan, more, str(Path(folder, "run")), given.pairs, timeout=TIMEOUT)[0]
                print(row(layout, what, "the same step without", bound, found, inside), flush=True)
            found = pool.run(beside_gathering, plan, str(Path(folder, "run")), given.pairs, timeout=TIMEOUT)[0]
            print(row(layout, "digests of all replicated state", "gathering it whole", 1 / CHEAPER, found), flush=True)
    pool.close()


if __name__ == "__main__":
    main()
