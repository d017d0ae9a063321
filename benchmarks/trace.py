"""What watching costs: desync checks, invariants and layer logs as ratios to the same step without them, and checks to a full
comparison.

Prints a table, row by row.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from engine import RANKS, TIMEOUT, WARMUP, Pair, Time, line, ratios, task_of, timed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bridge.engine import initialize
from bridge.engine.models.gpt import GPT, mean_cross_entropy
from bridge.engine.runner import Engine
from bridge.engine.tracing import EngineSource
from bridge.plan.plan import Debug, Plan
from bridge.trace import attach
from bridge.trace.desync import Desync, DesyncCheck, Policy
from bridge.trace.invariants import Invariants
from bridge.trace.invariants.gradients import Cleared, Reduced
from bridge.trace.invariants.inputs import Positions
from bridge.trace.invariants.recompute import Recomputed
from bridge.trace.layer_log import LayerLog
from bridge.trace.record import Name
from bridge.trace.tracer import Tracer
from tests.engine.oracles import Step, Task, batch_of
from tests.engine.pool import Pool

WIDTH = 512
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2, ZeRO 0": {"parallel.data": 2, "zero.stage": 0},
    "data 2, ZeRO 2": {"parallel.data": 2, "zero.stage": 2},
    "tensor 2": {"parallel.tensor": 2},
}
CHECKS = {"debug.tensor_parallel": True}
LOGS = {
    f"debug.{name}": 2
    for name in ("layer_outputs", "layer_gradients", "all_param_gradients", "param_update")
}
WATCHED = {"checks": (CHECKS, 1.03), "logs at level 2": (LOGS, 1.10)}
"""What is added to a step, and the largest ratio wanted."""
LEVEL_2 = Debug(layer_outputs=2, layer_gradients=2, all_param_gradients=2, param_update=2)
LEVEL_2_CHECKED = LEVEL_2.model_copy(update={"tensor_parallel": True})
ATTACHED: dict[str, tuple[Debug | None, bool, float]] = {
    "attach: what is on by default": (None, True, 1.05),
    "attach: logs at level 2": (LEVEL_2, False, 1.10),
    "attach: both": (LEVEL_2_CHECKED, True, 0.0),
}
"""What a user's line asks for, with invariants or without, and the largest ratio wanted (0: none)."""
PROBING = 3
"""Steps at the start in which invariants look closer, and that are measured apart."""
CHEAPER = 3.0
"""How much cheaper checks have to be than gathering the same tensors whole."""


def engine_of(plan: dict[str, Any], folder: str) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """A step on the engine."""
    engine = built(plan, folder)
    return lambda tokens, targets: engine.train_batch([(tokens, targets)])


def built(plan: dict[str, Any], folder: str) -> Engine:
    """An engine with the plan's debug settings."""
    task = task_of(WIDTH)
    settings = {
        f"optimizer.{name}": getattr(task, name)
        for name in ("lr", "betas", "eps", "weight_decay", "clip")
    }
    return initialize(
        GPT(task.shape),
        Plan.of({**settings, **plan}),
        mean_cross_entropy,
        trace=folder,
        policy=Policy(),
    )


def data_of(rank: int, plan: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """2,048 tokens for each rank, the same for tensor ranks."""
    task = task_of(WIDTH)
    if "parallel.tensor" in plan:
        return batch_of(replace(task, batch=task.batch // RANKS), 0)
    return batch_of(task, 0, rank, RANKS)


def added(
    rank: int, world: int, plan: dict[str, Any], more: dict[str, Any], folder: str, pairs: int
) -> tuple[list[Pair], float]:
    """Times with and without `more`, in turns; and processor time spent within what watches, as a share of the rest."""
    steps, data = (
        [engine_of({**plan, **more}, folder), engine_of(plan, folder)],
        data_of(rank, plan),
    )
    for step in steps:
        timed(step, data, WARMUP)
    with clocked(ENGINE) as spent:
        found = [
            in_turns(lambda index: timed(steps[index], data, 1), pair) for pair in range(pairs)
        ]
    whole = sum(watched.processor for watched, _ in found)
    return found, spent[0] / (whole - spent[0])


ENGINE = tuple((kind, name) for kind in (DesyncCheck, LayerLog) for name in ("saw", "reach_moment"))
HOOKS = (
    *((Invariants, name) for name in ("saw", "reach_moment", "_passing", "_hook_output")),
    *(
        (Reduced, "_add_gradient_sketch"),
        (Recomputed, "_ran"),
        (Positions, "_record_start"),
        (Cleared, "backward"),
        (Tracer, "_saw"),
    ),
)
"""What hooks call."""


@contextmanager
def clocked(calls: Sequence[tuple[type, str]]) -> Iterator[list[float]]:
    """Adds up the processor time of all these calls while inside, of one within another once."""
    spent, depth = [0.0], [0]
    plain = [(kind, name, getattr(kind, name)) for kind, name in calls]

    def within(call: Callable[..., None]) -> Callable[..., None]:
        def measured(*arguments: object) -> None:
            start = time.process_time()
            depth[0] += 1
            try:
                call(*arguments)
            finally:
                depth[0] -= 1
                spent[0] += (time.process_time() - start) * (not depth[0])

        return measured

    for kind, name, call in plain:
        setattr(kind, name, within(call))
    try:
        yield spent
    finally:
        for kind, name, call in plain:
            setattr(kind, name, call)


@dataclass(frozen=True)
class Shape:
    """A model of a user: its width and blocks, and how torch wraps it; `bounded` where a bound is wanted."""

    width: int
    blocks: int
    sharded: bool = False
    bounded: bool = True
    llama: bool = False

    @property
    def task(self) -> Task:
        """A GPT of that shape."""
        task = task_of(self.width)
        return replace(task, shape=replace(task.shape, layers=self.blocks))

    def model(self) -> nn.Module:
        """A GPT, or a Llama of transformers."""
        return Llama(self) if self.llama else GPT(self.task.shape)

    def __str__(self) -> str:
        wrapper = f"{'FSDP2' if self.sharded else 'DDP'}{', Llama' if self.llama else ''}"
        return f"{wrapper}, {self.blocks} blocks of {self.width}"


class Llama(nn.Module):
    """A Llama that returns logits alone."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": shape.width, "intermediate_size": 688, "num_attention_heads": 4}
        config = LlamaConfig(
            vocab_size=shape.task.shape.vocab, num_hidden_layers=shape.blocks, **sizes
        )
        self.inner = LlamaForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]


SHAPES = {
    "ddp": Shape(512, 4),
    "fsdp2": Shape(512, 4, sharded=True),
    "deep": Shape(128, 48, bounded=False),
    "llama": Shape(256, 4, llama=True),
}


def users_step(shape: Shape, watch: tuple[Debug | None, bool] | None, folder: str) -> Step:
    """A loop of plain torch as its users write it, watched or not."""
    task = shape.task
    model = shape.model()
    if shape.sharded:
        for block in list(model.children())[1:-1]:
            fully_shard(block)
        wrapped: Any = fully_shard(model)
    else:
        wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=task.lr)
    if watch is not None:
        policy = Policy(action="log") if watch[0] else None
        attach(wrapped, watch[0], folder, optimizer=optimizer, invariants=watch[1], policy=policy)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> None:
        optimizer.zero_grad()
        mean_cross_entropy(wrapped(tokens), targets).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()

    return step


def attached(
    rank: int, world: int, shape: Shape, watch: tuple[Debug | None, bool], folder: str, pairs: int
) -> tuple[list[Pair], list[Pair], float]:
    """Pairs of the first steps, pairs of later ones, and the share of the later ones that watching takes."""
    with clocked((*ENGINE, *HOOKS)) as spent:
        steps, data = (
            [users_step(shape, watch, folder), users_step(shape, None, folder)],
            batch_of(shape.task, 0, rank, world),
        )
        early = [
            in_turns(lambda index: timed(steps[index], data, 1), pair) for pair in range(PROBING)
        ]
        spent[0] = 0.0
        found = [
            in_turns(lambda index: timed(steps[index], data, 1), pair) for pair in range(pairs)
        ]
    whole = sum(watched.processor for watched, _ in found)
    return early, found, spent[0] / (whole - spent[0])


def in_turns(time: Callable[[int], Time], pair: int) -> Pair:
    """The times of both, the first changing from pair to pair."""
    times = {index: time(index) for index in ((0, 1) if pair % 2 == 0 else (1, 0))}
    return times[0], times[1]


def beside_gathering(
    rank: int, world: int, plan: dict[str, Any], folder: str, pairs: int
) -> list[Pair]:
    """Times of checking every weight, gradient and moment that ranks hold alike, by digests and by gathering them whole."""
    engine, data = built(plan, folder), data_of(rank, plan)
    engine.train_batch([data])
    source, axis = (
        EngineSource(engine),
        next(axis for axis in ("tensor", "data") if f"parallel.{axis}" in plan),
    )
    kinds = ("weight", "gradient", "moment", "replica")
    held = [
        part for kind in kinds for part in source.tensors(kind) if axis in part.placement.replicas
    ]  # type: ignore[arg-type]
    desync, group = Desync(engine.comm), engine.comm.group(axis)

    def digests(*_: object) -> None:
        for number, part in enumerate(held):
            desync.hold(
                Name(1, "reduce", part.layer, None, part.kind, f"{part.tensor} {number}"),
                part.local,
                part.placement,
            )
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


def row(
    layout: str,
    what: str,
    beside: str,
    bound: float,
    found: list[Pair],
    inside: float | None = None,
) -> str:
    """One line of the table."""
    times = [
        f"{statistics.median(pair[index].wall for pair in found) * 1e3:.0f} ms" for index in (0, 1)
    ]
    cells = [layout, what, beside, *times]
    for kind in ("wall", "processor"):
        found_ratios = ratios(found, kind)
        cells.append(
            f"{statistics.median(found_ratios):.3f} ({found_ratios[0]:.3f} to {found_ratios[-1]:.3f})"
        )
    return line(
        [*cells, "" if inside is None else f"{1 + inside:.3f}", f"{bound:.2f}" if bound else ""]
    )


def users_rows(pool: Pool, shape: Shape, folder: str, pairs: int) -> Iterator[str]:
    """The rows of what a user's line costs."""
    for what, (debug, invariants, bound) in ATTACHED.items():
        given = (shape, (debug, invariants), folder, pairs)
        early, found, inside = pool.run(attached, *given, timeout=TIMEOUT)[0]
        if invariants and not debug:
            yield row(
                str(shape), f"{what}, first {PROBING} steps", "the same step without", 0.0, early
            )
        yield row(str(shape), what, "the same step without", bound * shape.bounded, found, inside)


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--pairs", type=int, default=9, help="measurements of each comparison")
    options.add_argument(
        "--layout", choices=(*LAYOUTS, *SHAPES), action="append", help="only this one"
    )
    given = options.parse_args()
    heads = (
        "layout",
        "step with",
        "beside",
        "with",
        "beside",
        "wall time",
        "processor time",
        "measured inside",
        "bound",
    )
    print(line(heads), line(["---"] * len(heads)), sep="\n")
    pool = Pool(RANKS)
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder, "run"))
        for layout in given.layout or (*LAYOUTS, *SHAPES):
            if layout in SHAPES:
                for text in users_rows(pool, SHAPES[layout], run, given.pairs):
                    print(text, flush=True)
                continue
            plan = LAYOUTS[layout]
            for what, (more, bound) in WATCHED.items():
                found, inside = pool.run(added, plan, more, run, given.pairs, timeout=TIMEOUT)[0]
                print(row(layout, what, "the same step without", bound, found, inside), flush=True)
            found = pool.run(beside_gathering, plan, run, given.pairs, timeout=TIMEOUT)[0]
            print(
                row(
                    layout,
                    "digests of all replicated state",
                    "gathering it whole",
                    1 / CHEAPER,
                    found,
                ),
                flush=True,
            )
    pool.close()


if __name__ == "__main__":
    main()
