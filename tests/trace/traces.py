"""What the ranks of a pool run for tests of traces."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bridge.engine import initialize
from bridge.engine.interface import Workload
from bridge.engine.models.gpt import mean_cross_entropy, sum_cross_entropy
from bridge.errors import BridgeError
from bridge.plan.plan import Plan
from bridge.trace import attach
from bridge.trace.desync import DesyncError, Policy
from bridge.trace.retention import Keep
from compat.deepspeed.runtime.tracing import DeepSpeedSource
from tests.engine.blocks import MICROBATCHES, batches, small
from tests.engine.oracles import real_deepspeed
from tests.engine.runs import Case, global_batch, microbatches, model_of
from tests.trace.faults import NORM, Batches, flip, owned


def traced(
    rank: int, world: int, case: Case, folder: Path, full: bool = False, strict: bool = False
) -> list[float]:
    """Train with the plan's debug levels, and end at a mismatch if `strict`; the losses."""
    plan = Plan.of(case.plan)
    loss = sum_cross_entropy if plan.loss == "per_token" else mean_cross_entropy
    engine = initialize(
        model_of(case),
        plan,
        loss,
        seed=11,
        trace=folder,
        full=full,
        policy=Policy() if strict else None,
    )
    return [engine.train_batch(microbatches(case, engine, step)) for step in range(case.steps)]


def checked(
    rank: int, world: int, case: Case, at: int | None = None, policy: Policy | None = None
) -> tuple[list[str], int]:
    """Train with desync checks, with one bit of a weight flipped on rank `at` in the second step; reports, and steps done."""
    torch.manual_seed(5)
    plan, steps = Plan.of({**case.plan, "debug.tensor_parallel": True}), 0
    try:
        engine = initialize(
            model_of(case), plan, mean_cross_entropy, seed=11, policy=policy or Policy()
        )
        for step in range(case.steps):
            if step == 1 and rank == at:
                flip(owned(engine, engine.weights.shards, NORM))
            engine.train_batch(microbatches(case, engine, step))
            steps += 1
    except DesyncError as error:
        return list(error.problems), steps
    return [], steps


def wavering(rank: int, world: int, case: Case) -> list[str]:
    """Train with a layer whose second forward of a microbatch gives other bits than the first; the reports."""
    engine = initialize(
        model_of(case), Plan.of({**case.plan, "debug.tensor_parallel": True}), mean_cross_entropy
    )
    seen: set[int] = set()

    def waver(module: Any, inputs: Any, output: Tensor) -> Tensor:
        again = engine.place in seen
        seen.add(engine.place)
        return output * 1.00001 if again else output

    engine.model.get_submodule("block1").register_forward_hook(waver, prepend=True)
    with reports() as said:
        engine.train_batch(microbatches(case, engine, 0))
    return said


@contextmanager
def reports() -> Iterator[list[str]]:
    """What the checks log while inside."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("bridge.trace")
    level = logger.level
    logger.setLevel(
        logging.NOTSET
    )  # another test may have silenced it in a process that tests share
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)
    logger.setLevel(level)


def traced_module(
    rank: int,
    world: int,
    case: Case,
    folder: Path,
    keep: Keep | None = None,
    odd: int | None = None,
) -> None:
    """The same training by plain torch, in DistributedDataParallel on several ranks, with a log that is thinned, and a weight of
    rank `odd` changed after the second step's backward.
    """
    plan, module = Plan.of(case.plan), model_of(case)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    wrapped = DistributedDataParallel(module) if world > 1 else module
    accumulation = plan.batch.accumulation or 1
    policy = Policy() if odd is None else Policy(action="log")
    attach(
        wrapped,
        plan.debug,
        folder,
        optimizer=optimizer,
        accumulation=accumulation,
        policy=policy,
        keep=keep,
    )

    def backward(loss: Tensor, last: bool) -> None:
        with nullcontext() if last or world == 1 else wrapped.no_sync():  # type: ignore[operator]
            torch.autograd.backward(loss / accumulation)

    for step in range(case.steps):
        optimizer.zero_grad()
        batches = fed(case, rank, world, accumulation, step)
        for place, (inputs, targets) in enumerate(batches):
            backward(mean_cross_entropy(wrapped(inputs), targets), place == accumulation - 1)
        if step == 1 and rank == odd:
            module.get_submodule("block1").norm1.weight.data[3] *= 1.01
        optimizer.step()


LOGS = ("layer_outputs", "layer_gradients", "param_init", "all_param_gradients", "param_update")
LOGGED = {f"debug.{name}": 5 for name in LOGS}
RATE = 0.1


def traced_replicas(rank: int, world: int, name: str, folder: Path, steps: int) -> None:
    """A small model of transformers trained in DistributedDataParallel, in the loop that everyone writes."""
    module = small(name).float().train()
    wrapped, optimizer = DistributedDataParallel(module), torch.optim.SGD(module.parameters(), RATE)
    mine = MICROBATCHES // world
    attach(
        wrapped,
        Plan.of(LOGGED).debug,
        folder,
        optimizer=optimizer,
        accumulation=mine,
        policy=Policy(),
    )
    for step in range(steps):
        optimizer.zero_grad()
        for place, batch in enumerate(batches(step)[rank::world]):
            with nullcontext() if place == mine - 1 else wrapped.no_sync():
                torch.autograd.backward(wrapped(**batch, use_cache=False).loss / mine)
        optimizer.step()


def traced_blocks(
    rank: int,
    world: int,
    name: str,
    folder: Path,
    values: Any,
    steps: int,
    fault: str | None = None,
) -> int:
    """The same on the engine, with the output of the module `fault` a thousandth too large; how many layers it has."""
    plan = {
        "precision.compute": "fp32",
        "optimizer.name": "sgd",
        "optimizer.lr": RATE,
        **LOGGED,
        **values,
    }
    engine = initialize(
        small(name).float(), Plan.of(plan), seed=5, trace=folder, policy=Policy(action="log")
    )
    if fault:
        engine.model.get_submodule(fault).register_forward_hook(_larger, prepend=True)
    for step in range(steps):
        engine.train_batch(batches(step)[engine.data.index :: engine.data.size])
    return len(engine.chain.layers)


def _larger(module: Any, inputs: Any, output: Any) -> Any:
    return (output[0] * 1.001, *output[1:]) if isinstance(output, tuple) else output * 1.001


def fed(case: Case, rank: int, world: int, accumulation: int, step: int) -> Batches:
    """What `microbatches` gives an engine on data ranks alone."""
    inputs, targets = global_batch(case, step)
    parts = torch.arange(case.batch).chunk(accumulation * world)
    return [
        (inputs[rows], targets[rows])
        for rows in (parts[place * world + rank] for place in range(accumulation))
    ]


def traced_deepspeed(
    rank: int, world: int, case: Case, folder: Path, level: int, adam: bool
) -> None:
    """The same training by DeepSpeed itself, with ZeRO at `level`."""
    ds, plan, module = real_deepspeed(), Plan.of(case.plan), model_of(case)
    accumulation = plan.batch.accumulation or 1
    config = {
        "train_micro_batch_size_per_gpu": case.batch // accumulation // world,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": level},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": plan.optimizer.clip or 0.0,
    }
    kind = torch.optim.AdamW if adam else torch.optim.SGD
    settings: Any = {"eps": plan.optimizer.eps, "weight_decay": 0.0} if adam else {}
    optimizer = kind(module.parameters(), lr=plan.optimizer.lr, **settings)
    engine, *_ = ds.initialize(
        model=module, optimizer=optimizer, config=config, dist_init_required=False
    )
    attach(DeepSpeedSource(engine), plan.debug, folder, policy=Policy())
    for step in range(case.steps):
        for inputs, targets in fed(case, rank, world, accumulation, step):
            engine.backward(mean_cross_entropy(engine(inputs), targets))
            engine.step()


def traced_megatron(
    rank: int, world: int, case: Case, folder: Path, at: int | None = None
) -> list[str]:
    """The same training by Megatron-Core itself, with a weight changed on rank `at` before the second step; what ended it."""
    from compat.megatron.runtime.backend import BACKEND

    plan = Plan.of(case.plan)
    trainer = BACKEND.open(plan, Workload(case.shape, case.seed))
    try:
        from compat.megatron.runtime.tracing import MegatronSource

        source = MegatronSource(trainer.chunks, trainer.optimizer, trainer.accumulation, case.shape)
        attach(source, plan.debug, folder, policy=Policy())
        for step in range(case.steps):
            if step == 1 and rank == at:
                source.models[0].decoder.final_layernorm.weight.data[2] += 1
            trainer.train_batch(fed(case, *trainer.data, trainer.accumulation, step))
    except DesyncError as error:
        return list(error.problems)
    finally:
        trainer.close()
    return []


def logged(
    rank: int, world: int, case: Case, folder: Path
) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    """Train two steps; gradient norms, the weights at the end, and the elements of each gradient slice that is kept."""
    engine = initialize(
        model_of(case), Plan.of(case.plan), mean_cross_entropy, seed=11, trace=folder
    )
    norms = []
    for step in range(2):
        engine.train_batch(microbatches(case, engine, step))
        norms.append(engine.progress.grad_norm)
    return (
        norms,
        dict(engine.state_dict()),
        [flat.shard for flat in engine.gradients.flats.values()],
    )


def drifted(rank: int, world: int, case: Case) -> tuple[list[str], int]:
    """Train three steps, with one rank's weight other than the other's from the second on; what was logged, and steps done."""
    engine = initialize(model_of(case), Plan.of(case.plan), mean_cross_entropy, seed=11)
    with reports() as said:
        for step in range(3):
            if step == 1 and rank == 1:
                owned(engine, engine.weights.shards, NORM)[2] += 1
            engine.train_batch(microbatches(case, engine, step))
    return said, engine.progress.steps


def failing(rank: int, world: int, case: Case, policy: Policy) -> tuple[list[str], int]:
    """The problems of an error that is no `DesyncError`."""
    try:
        return checked(rank, world, case, 1, policy)
    except BridgeError as error:
        return list(error.problems), -1
