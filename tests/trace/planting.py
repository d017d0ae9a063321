"""Faults planted into small trainings of every stack, and what finds them: a twin run beside it, or the run alone.

`python -m tests.trace.planting [FAULT ...]` plants them all, or those named, and prints the table.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bridge.plan.plan import Debug
from bridge.trace import attach
from bridge.trace.desync import Policy
from bridge.trace.retention import Keep
from bridge.trace.run import TracedRun
from bridge.trace.run_comparison import compare_runs
from bridge.trace.step_meeting import VARIABLE

VOCAB, WIDTH, TOKENS, BATCH, STEPS, AT = 29, 16, 8, 8, 3, 2
"""The last is the step in which a fault strikes that is not there from the start."""
LOGS = Debug(
    layer_outputs=9,
    layer_gradients=9,
    param_init=9,
    all_param_gradients=9,
    param_update=9,
    tensor_parallel=True,
)


class Block(nn.Module):
    """Attention and a feed-forward part, with dropout after both."""

    def __init__(self, owner: Sequence[Any], causal: bool = True) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.norm2, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.drop = nn.Dropout(owner[0])
        self.causal = causal

    def attend(self, stream: Tensor) -> Tensor:
        """Two heads."""
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(stream)).chunk(3, -1)
        )
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def feed(self, stream: Tensor) -> Tensor:
        """The feed-forward part."""
        return self.drop(self.down(torch.tanh(self.up(self.norm2(stream)))))  # type: ignore[no-any-return]

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.drop(self.attend(stream))
        return stream + self.feed(stream)


class Small(nn.Module):
    """A language model with positions, a buffer, and tied embeddings."""

    def __init__(self, dropout: float = 0.0, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS + 2, WIDTH)
        self.blocks = nn.ModuleList(Block((dropout,)) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("scale", torch.linspace(0.9, 1.1, WIDTH))
        self.skipped: int | None = None
        self.first = 0
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]) + self.first)
        for index, block in enumerate(self.blocks):
            stream = stream if index == self.skipped else block(stream)
        return self.head(self.norm(stream) * self.scale)  # type: ignore[no-any-return]


def STEP(loop: Any, step: int) -> None:
    """What a loop does at the end of a step."""
    loop.optimizer.step()


@dataclass
class Loop:
    """A training whose parts a fault may change. Functions in `at` are called with the loop and the step: once the model is
    `built`, it and its optimizer are `wrapped`, it is `attached`, a step `begins`, its `backward` is done, it is `stepped`.
    """

    rank: int
    world: int
    dropout: float = 0.0
    rate: float = 1e-2
    passes: int = 2
    decay: float = 0.0
    alike: bool = False
    """Whether all ranks take the same data."""
    clears: bool = True
    clip: float | None = None
    dtype: torch.dtype = torch.float32
    seeds: Callable[[int, int, int], int | None] = lambda rank, step, place: None
    at: dict[str, Callable[[Loop, int], None]] = field(default_factory=dict)
    model: Any = None
    wrapped: Any = None
    optimizer: Any = None
    loss: Callable[[Tensor, Tensor], Tensor] = lambda output, targets: nn.functional.cross_entropy(
        output.float().flatten(0, 1), targets.flatten()
    )
    build: Callable[[Loop], nn.Module] = lambda loop: Small(loop.dropout).to(loop.dtype)
    group: Callable[[Loop], Any] = lambda loop: [
        weight for weight in loop.model.parameters() if weight.requires_grad
    ]
    kind: Any = torch.optim.AdamW
    settings: dict[str, Any] = field(default_factory=lambda: {"eps": 1e-3})
    step: Callable[[Loop, int], None] = STEP
    told: int | None = None
    """The number of microbatches that the stack is told, if it is not theirs."""
    buckets: dict[str, Any] = field(default_factory=dict)
    schedule: Any = None
    keep: Keep = field(default_factory=Keep)
    """What of the run its log keeps."""

    def reached(self, point: str, step: int = 0) -> None:
        """Call what waits for that point."""
        self.at.get(point, lambda loop, step: None)(self, step)

    def whole(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """The microbatches of all ranks, in order."""
        generator = torch.Generator().manual_seed(100 + step)
        tokens = torch.randint(VOCAB, (BATCH, TOKENS + 1), generator=generator)
        return [(part[:, :-1], part[:, 1:]) for part in tokens.chunk(self.passes * self.world)]

    def data(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """The microbatches of this rank, of which several ranks have as many as one rank has alone."""
        generator = torch.Generator().manual_seed(100 + step)
        tokens = torch.randint(VOCAB, (BATCH, TOKENS + 1), generator=generator)
        rank = 0 if self.alike else self.rank
        parts = tokens.chunk(self.passes * self.world)
        return [
            (part[:, :-1], part[:, 1:])
            for part in (parts[place * self.world + rank] for place in range(self.passes))
        ]

    def optimise(self) -> None:
        """Make the optimizer."""
        self.optimizer = self.kind(
            self.group(self), lr=self.rate, weight_decay=self.decay, **self.settings
        )


# Stacks


def by_torch(
    loop: Loop, folder: Path | None, debug: Debug | None, wrap: Callable[[Loop], Any]
) -> Any:
    """A plain loop; what the trace found."""
    torch.manual_seed(50 + loop.rank)
    loop.model = loop.build(loop)
    loop.reached("built")
    loop.wrapped = wrap(loop)
    loop.optimise()
    loop.reached("wrapped")
    passes, policy = loop.passes, Policy(action="log")
    tracer = attach(
        loop.wrapped,
        debug,
        folder or "trace",
        optimizer=loop.optimizer,
        accumulation=passes,
        policy=policy,
        keep=loop.keep,
    )
    loop.reached("attached")
    for step in range(1, STEPS + 1):
        loop.reached("begins", step)
        if loop.clears:
            loop.optimizer.zero_grad()
        for place, (tokens, targets) in enumerate(loop.data(step)):
            seed = loop.seeds(loop.rank, step, place)
            if seed is not None:
                torch.manual_seed(seed)
            later = place < loop.passes - 1 and hasattr(loop.wrapped, "no_sync")
            with loop.wrapped.no_sync() if later else nullcontext():
                (loop.loss(loop.wrapped(tokens), targets) / loop.passes).backward()  # type: ignore[no-untyped-call]
            loop.reached("passed", step)
        loop.reached("backward", step)
        if loop.clip:
            nn.utils.clip_grad_norm_(loop.wrapped.parameters(), loop.clip)
        loop.step(loop, step)
        loop.reached("stepped", step)
    tracer.remove()
    return tracer.findings.found


def ddp(loop: Loop) -> Any:
    """Replicas."""
    return nn.parallel.DistributedDataParallel(loop.model, broadcast_buffers=False, **loop.buckets)


def fsdp2(loop: Loop) -> Any:
    """Sharded by torch."""
    from torch.distributed.fsdp import fully_shard

    for block in loop.model.blocks:
        fully_shard(block)
    return fully_shard(loop.model)


def fsdp1(loop: Loop) -> Any:
    """Sharded by torch's first way, as flat parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy, device = ModuleWrapPolicy({Block}), torch.device("cpu")
    return FullyShardedDataParallel(
        loop.model, auto_wrap_policy=policy, use_orig_params=True, device_id=device
    )


def dtensor(loop: Loop) -> Any:
    """Feed-forward parts split over tensor ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (loop.world,), mesh_dim_names=("tp",))
    for block in loop.model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return loop.model


def started(loop: Loop) -> None:
    """What a launcher tells a process, which accelerate asks for; and nothing is left of an earlier run in it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    told = {
        "RANK": loop.rank,
        "WORLD_SIZE": loop.world,
        "LOCAL_RANK": loop.rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }
    os.environ.update({name: str(value) for name, value in told.items()})
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def accelerated(loop: Loop, folder: Path | None, debug: Debug | None, told: bool = False) -> Any:
    """accelerate's loop."""
    from accelerate import Accelerator

    started(loop)
    torch.manual_seed(50 + loop.rank)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=loop.passes)
    loop.model = loop.build(loop)
    loop.reached("built")
    loop.optimise()
    loop.wrapped, optimizer = accelerator.prepare(loop.model, loop.optimizer)
    loop.reached("wrapped")
    passes = loop.passes if told else None
    tracer = attach(
        loop.wrapped,
        debug,
        folder or "trace",
        optimizer=optimizer,
        accumulation=passes,
        policy=Policy(action="log"),
    )
    for step in range(1, STEPS + 1):
        loop.reached("begins", step)
        for place, (tokens, targets) in enumerate(loop.data(step)):
            with accelerator.accumulate(loop.wrapped):
                accelerator.backward(loop.loss(loop.wrapped(tokens), targets))
                if place == loop.passes - 1:
                    loop.reached("backward", step)
                    if loop.clip:
                        accelerator.clip_grad_norm_(loop.wrapped.parameters(), loop.clip)
                loop.step(loop, step) if loop.step is not STEP else optimizer.step()
                if loop.clears:
                    optimizer.zero_grad()
        loop.reached("stepped", step)
    tracer.remove()
    return tracer.findings.found


class Loss(nn.Module):
    """A model that computes its own loss, as the Trainer of transformers expects."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.inner, self.loop = loop.model, loop

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.inner(input_ids)
        return {"loss": self.loop.loss(output, labels), "logits": output}


def by_trainer(loop: Loop, folder: Path | None, debug: Debug | None) -> Any:
    """The Trainer of transformers, with its callback."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from compat.huggingface.runtime.tracing import TraceCallback

    started(loop)
    torch.manual_seed(50 + loop.rank)
    loop.model = loop.build(loop)
    loop.reached("built")
    loop.wrapped = Loss(loop)
    loop.optimise()
    loop.reached("wrapped")
    samples = [
        (t, y)
        for step in range(1, STEPS + 1)
        for t, y in ((a, b) for x, z in loop.whole(step) for a, b in zip(x, z, strict=True))
    ]
    data = [{"input_ids": tokens, "labels": targets} for tokens, targets in samples]

    class Points(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            loop.reached("begins", state.global_step + 1)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            loop.reached("backward", state.global_step + 1)

    class Ordered(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *given: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)  # type: ignore[arg-type]

    micro = BATCH // loop.passes // loop.world
    arguments = TrainingArguments(
        str(folder) + "-out",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=loop.passes,
        max_steps=STEPS,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        max_grad_norm=loop.clip or 0.0,
        lr_scheduler_type="constant",
        ddp_find_unused_parameters=bool(loop.buckets.get("find_unused_parameters")),
        ddp_broadcast_buffers=False,
        remove_unused_columns=False,
    )
    callback = TraceCallback(debug, folder, policy=Policy(action="log"))
    Ordered(
        loop.wrapped,
        arguments,
        train_dataset=data,
        callbacks=[callback, Points()],
        optimizers=(loop.optimizer, None),
    ).train()
    return callback.found


def by_deepspeed(level: int) -> Stack:
    """DeepSpeed's engine, with ZeRO at that level."""

    def train(loop: Loop, folder: Path | None, debug: Debug | None) -> Any:
        from tests.engine.oracles import real_deepspeed

        ds = real_deepspeed()
        torch.manual_seed(50 + loop.rank)
        loop.model = loop.build(loop)
        loop.reached("built")
        loop.optimise()
        config = {
            "train_micro_batch_size_per_gpu": BATCH // loop.passes // loop.world,
            "gradient_accumulation_steps": loop.told or loop.passes,
            "zero_optimization": {"stage": level},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": loop.clip or 0.0,
            **loop.buckets,
        }
        engine, *_ = ds.initialize(
            model=loop.model, optimizer=loop.optimizer, config=config, dist_init_required=False
        )
        loop.wrapped = engine
        loop.reached("wrapped")
        tracer = attach(
            engine, debug, folder or "trace", policy=Policy(action="log"), keep=loop.keep
        )
        for step in range(1, STEPS + 1):
            loop.reached("begins", step)
            for place, (tokens, targets) in enumerate(loop.data(step)):
                engine.backward(loop.loss(engine(tokens), targets))
                if place == loop.passes - 1:
                    loop.reached("backward", step)
                if not loop.told or place == loop.passes - 1:
                    engine.step()
            loop.reached("stepped", step)
        tracer.remove()
        return tracer.findings.found

    return train


def by_pipelining(loop: Loop, folder: Path | None, debug: Debug | None) -> Any:
    """A schedule of torch's pipelining, with a stage on each rank; all ranks take the same samples."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from tests.trace.attaching import Stage

    torch.manual_seed(50 + loop.rank)
    loop.model = Stage(Small(loop.dropout, tied=False), loop.rank == 0)
    loop.reached("built")
    loop.optimise()
    stage = PipelineStage(loop.model, loop.rank, loop.world, torch.device("cpu"))
    loop.wrapped = Schedule1F1B(
        stage, loop.passes, lambda output, targets: loop.loss(output, targets), **loop.buckets
    )
    loop.reached("wrapped")
    tracer = attach(
        loop.wrapped,
        debug,
        folder or "trace",
        optimizer=loop.optimizer,
        policy=Policy(action="log"),
    )
    for step in range(1, STEPS + 1):
        loop.reached("begins", step)
        if loop.clears:
            loop.optimizer.zero_grad()
        tokens, targets = (torch.cat(parts) for parts in zip(*loop.whole(step), strict=True))
        loop.wrapped.step(
            *((tokens,) if loop.rank == 0 else ()),
            **({} if loop.rank == 0 else {"target": targets}),
        )
        loop.reached("backward", step)
        loop.step(loop, step)
        loop.reached("stepped", step)
    tracer.remove()
    return tracer.findings.found


def native(layout: Mapping[str, Any], **shape: int) -> Stack:
    """The native engine, in a layout."""

    def train(loop: Loop, folder: Path | None, debug: Debug | None) -> Any:
        from bridge.engine import initialize
        from bridge.engine.models.gpt import mean_cross_entropy
        from bridge.plan.plan import Plan
        from tests.engine.runs import SEQUENCE, SHAPE, Case, microbatches, model_of

        torch.manual_seed(5)
        logs = {
            f"debug.{name}": value
            for name, value in (debug or LOGS).model_dump(exclude_none=True).items()
        }
        usual = {
            "optimizer.name": "adamw",
            "optimizer.lr": loop.rate,
            "optimizer.eps": 1e-3,
            "precision.compute": "fp32",
        }
        plan = {**usual, **layout, **loop.buckets, **logs}
        case = Case(plan, replace(SHAPE, **shape), tokens=SEQUENCE, dtype=torch.float32)
        loop.model = model_of(case)
        loop.reached("built")
        loop.wrapped = initialize(
            loop.model,
            Plan.of(case.plan),
            mean_cross_entropy,
            seed=11,
            trace=folder,
            policy=Policy(action="log"),
        )
        loop.reached("wrapped")
        for step in range(1, STEPS + 1):
            loop.reached("begins", step)
            loop.wrapped.train_batch(list(microbatches(case, loop.wrapped, step)))
        return loop.wrapped.tracer.findings.found

    return train


def megatron(layout: Mapping[str, Any], **shape: int) -> Stack:
    """Megatron-Core, in a layout."""

    def train(loop: Loop, folder: Path | None, debug: Debug | None) -> Any:
        from bridge.engine.interface import Workload
        from bridge.plan.plan import Plan
        from compat.megatron.runtime.backend import BACKEND
        from tests.engine.runs import SHAPE, Case
        from tests.trace.traces import fed

        usual = {
            "optimizer.name": "adamw",
            "optimizer.lr": loop.rate,
            "optimizer.eps": 1e-3,
            "precision.compute": "fp32",
        }
        case = Case(
            {**usual, "batch.micro": 4, "batch.accumulation": 2, **layout, **loop.buckets},
            replace(SHAPE, **{"layers": 4, **shape}),
            dtype=torch.float32,
        )
        trainer = BACKEND.open(Plan.of(case.plan), Workload(case.shape, case.seed))
        try:
            loop.wrapped = trainer
            tracer = attach(
                trainer.chunks,
                debug,
                folder or "trace",
                optimizer=trainer.optimizer,
                accumulation=trainer.accumulation,
                policy=Policy(action="log"),
            )
            for step in range(1, STEPS + 1):
                loop.reached("begins", step)
                place = (0, trainer.data[1]) if loop.alike else trainer.data
                trainer.train_batch(fed(case, *place, trainer.accumulation, step))
            return tracer.findings.found
        finally:
            trainer.close()

    return train


Stack = Callable[[Loop, "Path | None", "Debug | None"], Any]
STACKS: Mapping[str, Stack] = {
    "DDP": lambda loop, folder, debug: by_torch(loop, folder, debug, ddp),
    "FSDP2": lambda loop, folder, debug: by_torch(loop, folder, debug, fsdp2),
    "FSDP1": lambda loop, folder, debug: by_torch(loop, folder, debug, fsdp1),
    "DTensor": lambda loop, folder, debug: by_torch(loop, folder, debug, dtensor),
    "pipelining": by_pipelining,
    "accelerate": accelerated,
    "Trainer": by_trainer,
    "DeepSpeed ZeRO 0": by_deepspeed(0),
    "DeepSpeed ZeRO 1": by_deepspeed(1),
    "DeepSpeed ZeRO 2": by_deepspeed(2),
    "DeepSpeed ZeRO 3": by_deepspeed(3),
    "native, tensor 2": native({"parallel.tensor": 2, "batch.micro": 4, "batch.accumulation": 2}),
    "native, tensor 2, sequence": native(
        {"parallel.tensor": 2, "parallel.sequence": True, "batch.micro": 4, "batch.accumulation": 2}
    ),
    "native, data 2": native({"parallel.data": 2, "batch.micro": 2, "batch.accumulation": 2}),
    "Megatron-Core, pipeline 2": megatron({"parallel.pipeline": 2}),
    "Megatron-Core, tensor 2, sequence": megatron(
        {"parallel.tensor": 2, "parallel.sequence": True}
    ),
    "Megatron-Core, tensor 2": megatron({"parallel.tensor": 2}),
    "Megatron-Core, data 2": megatron({"parallel.data": 2, "batch.micro": 2}),
    "plain": lambda loop, folder, debug: by_torch(loop, folder, debug, lambda loop: loop.model),
}


# Faults

Plant = Callable[[Loop], None]


@dataclass(frozen=True)
class Planted:
    """A fault: how it is planted, on which stack, which place a comparison must name, which causes are right, and which findings
    of the run alone are right (none: nothing can be known without a twin).
    """

    plant: Plant
    where: str
    cause: str
    findings: tuple[str, ...] = ()
    stack: str = "DDP"
    clean: Plant = lambda loop: None
    """What the twin has too."""
    met: str = ""
    """The public report that it was met in, as `repository#number`; `none found` where a search found none, empty where none was
    made.
    """


def plants(
    point: str, call: Callable[[Loop, int], None], step: int | None = AT, rank: int | None = None
) -> Plant:
    """`call` at that point of a step, on one rank or all."""

    def plant(loop: Loop) -> None:
        def strike(loop: Loop, now: int) -> None:
            if step in (None, now) and rank in (None, loop.rank):
                call(loop, now)

        loop.at[point] = strike

    return plant


def sets(**values: Any) -> Plant:
    """Other values of the loop's own settings."""

    def plant(loop: Loop) -> None:
        for name, value in values.items():
            setattr(loop, name, value)

    return plant


def both(*several: Plant) -> Plant:
    """One after the other."""

    def plant(loop: Loop) -> None:
        for one in several:
            one(loop)

    return plant


def skip_clear(loop: Loop, step: int) -> None:
    loop.clears = step != AT


def scales(block: int, factor: float) -> Callable[[Loop, int], None]:
    """A block's output, from then on."""
    return lambda loop, step: loop.model.blocks[block].register_forward_hook(
        lambda *given: given[-1] * factor, prepend=True
    )


def betas(loop: Loop, step: int) -> None:
    loop.optimizer.param_groups[0]["betas"] = (0.5, 0.9)


def inside(loop: Loop, step: int) -> None:
    """The feed-forward part of each block is computed again, with other random numbers."""
    for block in loop.model.blocks:
        plain = block.feed
        block.feed = lambda stream, plain=plain: checkpoint(
            plain, stream, use_reentrant=False, preserve_rng_state=False
        )


def whole(loop: Loop, step: int) -> None:
    """Each block is computed again, with other random numbers."""
    for block in loop.model.blocks:
        plain = block.forward
        block.forward = lambda stream, plain=plain: checkpoint(
            plain, stream, use_reentrant=False, preserve_rng_state=False
        )


def kept(part: str, reentrant: bool = False) -> Callable[[Loop, int], None]:
    """The same done right."""

    def plant(loop: Loop, step: int) -> None:
        for block in loop.model.blocks:
            plain = getattr(block, part)
            setattr(
                block,
                part,
                lambda stream, plain=plain: checkpoint(plain, stream, use_reentrant=reentrant),
            )

    return plant


def summed(loop: Loop, step: int) -> None:
    for weight in loop.model.parameters():
        weight.grad *= loop.world


def unreduced(loop: Loop, step: int) -> None:
    """The last norm's gradient is what this rank computed alone."""
    twin = loop.build(loop)
    twin.load_state_dict(loop.model.state_dict())
    for tokens, targets in loop.data(step):
        (loop.loss(twin(tokens), targets) / loop.passes).backward()  # type: ignore[no-untyped-call]
    loop.model.norm.weight.grad.copy_(twin.norm.weight.grad)


def largest(loop: Loop, step: int) -> None:
    """The largest hundredth of each gradient is dropped."""
    for weight in loop.model.parameters():
        flat = weight.grad.view(-1)
        flat[flat.abs().topk(max(1, flat.numel() // 100)).indices] = 0


def cuts_mask(loop: Loop, step: int) -> None:
    for block in loop.model.blocks:
        block.causal = False


def unties(loop: Loop, step: int) -> None:
    loop.model.head.weight = nn.Parameter(loop.model.tok.weight.detach().clone())


def without_block(loop: Loop) -> Any:
    own = {id(weight) for weight in loop.model.blocks[1].parameters()}
    return [weight for weight in loop.model.parameters() if id(weight) not in own]


def moves_buffer(loop: Loop, step: int) -> None:
    loop.model.scale.mul_(1.01)


def same_seed(loop: Loop) -> None:
    loop.seeds = lambda rank, step, place: 7


own_seed = sets(seeds=lambda rank, step, place: 1000 * rank + 10 * step + place)
DROPS = both(sets(dropout=0.2), own_seed)
FAULTS: dict[str, Planted] = {
    "A1": Planted(
        plants("begins", skip_clear, None), r"2/reduce/", "not cleared", ("gradient-stale",)
    ),
    "A2": Planted(
        plants("backward", lambda loop, step: loop.optimizer.zero_grad()),
        r"2/reduce/",
        "no gradient is left",
        ("gradient-lost",),
    ),
    "A3": Planted(
        sets(group=without_block),
        r"1/update/blocks\.1",
        r"blocks\.1.* not updated",
        ("not-in-optimizer",),
    ),
    "A5": Planted(sets(alike=True), r"1/forward/.*input", "different data", ("same-data",)),
    "M6": Planted(
        sets(alike=True),
        r"1/forward/.*input",
        "different data",
        ("same-data",),
        "Megatron-Core, data 2",
    ),
    "A12": Planted(
        plants("built", moves_buffer, 0, 1),
        r"0/init/.*scale",
        "different buffers on rank 1",
        ("buffers-differ",),
    ),
    "A14": Planted(sets(decay=0.1), r"1/update/", "weight decay differs", ("decay-on-norms",)),
    "A17": Planted(
        both(
            plants("begins", lambda loop, step: setattr(loop.model, "first", int(step == AT)), None)
        ),
        r"2/forward/.*pos/output",
        "pos is the first",
        ("positions-moved",),
    ),
    "A18": Planted(
        plants("begins", scales(2, 1.001), rank=1),
        r"2/forward/.*blocks\.2/output",
        r"blocks\.2 is the first",
        (),
    ),
    "A21": Planted(
        plants("begins", betas, rank=1),
        r"2/(reduce/state/group 0.betas|update)",
        r"^the optimizer's group 0\.betas changes",
        ("replicas-differ",),
    ),
    "A22": Planted(
        plants("built", inside, 0),
        r"1/(backward|reduce)",
        r"^the backward pass of blocks\.\d computes different values.*recomputation",
        ("recompute-differs",),
        clean=both(DROPS, plants("built", kept("feed"), 0)),
    ),
    "A22w": Planted(
        plants("built", whole, 0),
        r"1/(backward|reduce)",
        r"^the backward pass of blocks\.\d computes different values.*recomputation",
        ("recompute-differs",),
        clean=both(DROPS, plants("built", kept("forward"), 0)),
    ),
    "A23": Planted(
        plants(
            "begins",
            lambda loop, step: setattr(loop.model, "skipped", 1 if step == AT else None),
            None,
            1,
        ),
        r"2/forward/.*blocks\.1",
        r"rank 1 does not run blocks\.1",
        ("layers-differ",),
        clean=sets(buckets={"find_unused_parameters": True}),
    ),
    "A24": Planted(
        plants("backward", summed, None),
        r"1/reduce/",
        "^all gradients of A are 2 times B's",
        ("gradient-summed",),
    ),
    "A25": Planted(
        plants("backward", unreduced, rank=1),
        r"2/reduce/norm/gradient",
        "only .*norm.weight",
        ("gradient-not-reduced", "replicas-differ"),
    ),
    "A26": Planted(
        plants("backward", largest), r"2/reduce/", "are zero in A alone", ("gradient-changed",)
    ),
    "A27": Planted(
        same_seed,
        r"1/forward/.*blocks\.0/output",
        r"blocks\.0 is the first",
        ("dropout-repeated", "dropout-alike"),
        clean=DROPS,
    ),
    "A28": Planted(
        plants("built", cuts_mask, 0),
        r"1/forward/.*blocks\.0/output",
        r"blocks\.0 is the first",
        ("future-seen",),
    ),
    "A30": Planted(
        plants("built", unties, 0),
        r"0/init/head",
        r"^B ties tok\.weight and head\.weight",
        ("untied",),
    ),
}


# On other stacks


def twice(loop: Loop, step: int) -> None:
    """A step twice, in the second step."""
    STEP(loop, step)
    if step == AT:
        STEP(loop, step)


def nudges(name: str) -> Callable[[Loop, int], None]:
    """A weight is changed by hand."""

    def strike(loop: Loop, step: int) -> None:
        weight: Any = dict(loop.model.named_parameters())[name].data
        getattr(weight, "_local_tensor", weight).view(-1)[2] += 0.01

    return strike


def rates(factor: float) -> Callable[[Loop, int], None]:
    """The learning rate, from then on."""

    def strike(loop: Loop, step: int) -> None:
        for group in loop.optimizer.param_groups:
            group["lr"] *= factor

    return strike


def copied(loop: Loop) -> Any:
    """The parameters of another copy of the model."""
    return list(loop.build(loop).parameters())


def local_clip(loop: Loop, step: int) -> None:
    """Each rank clips by the norm of its own shards."""
    from torch.distributed.tensor import DTensor

    local = []
    for weight in loop.model.parameters():
        grad = weight.grad
        part = nn.Parameter(
            torch.zeros_like(grad._local_tensor if isinstance(grad, DTensor) else grad)
        )
        part.grad = grad._local_tensor if isinstance(grad, DTensor) else grad
        local.append(part)
    nn.utils.clip_grad_norm_(local, 0.01)


def halves(prefix: str) -> Callable[[Loop, int], None]:
    """Gradients of a layer."""

    def strike(loop: Loop, step: int) -> None:
        for name, weight in loop.model.named_parameters():
            if name.startswith(prefix):
                weight.grad *= 0.5

    return strike


def wrong_targets(loop: Loop) -> None:
    plain = loop.loss
    loop.loss = lambda output, targets: plain(output, targets.roll(1, 1))


def whole_loss(loop: Loop) -> None:
    plain, passes = loop.loss, loop.passes
    loop.loss = lambda output, targets: plain(output, targets) * passes


def swapped(loop: Loop) -> None:
    plain = loop.data
    loop.data = lambda step: plain(step)[::-1] if step == AT else plain(step)  # type: ignore[method-assign]


def blunt_norm(loop: Loop, step: int) -> None:
    loop.model.blocks[1].norm1.eps = 0.1


def mutes(loop: Loop, step: int) -> None:
    loop.model.eval()


def other_data(loop: Loop) -> None:
    """Other samples on one of the ranks that should have the same."""
    plain = loop.data
    loop.data = lambda step: plain(step + 10 * (loop.rank == 1))  # type: ignore[method-assign]


alike = sets(alike=True)


def of_engine(name: str, factor: float) -> Callable[[Loop, int], None]:
    """The output of a layer of the native engine."""
    return lambda loop, step: loop.wrapped.model.get_submodule(name).register_forward_hook(
        lambda *given: given[-1] * factor, prepend=True
    )


def biased(loop: Loop, step: int) -> None:
    """The bias of each row-parallel layer is added by every tensor rank."""
    from bridge.engine.tensor_parallel import RowLinear

    for module in loop.wrapped.model.modules():
        if isinstance(module, RowLinear) and module.bias is not None:
            module.register_forward_hook(lambda module, given, output: output + module.bias)


def kept_apart(loop: Loop, step: int) -> None:
    """No column-parallel layer sums the gradient of its input."""
    from bridge.engine.tensor_parallel import _Enter

    def backward(context: Any, gradient: Tensor) -> Any:
        context.started.append(lambda: None)
        return gradient, None, None, None

    plain = _Enter.backward
    _Enter.backward = staticmethod(backward)  # type: ignore[method-assign]
    MENDED.append(lambda: setattr(_Enter, "backward", staticmethod(plain)))


def coarse(loop: Loop, step: int) -> None:
    """Masters hold no more than bf16 does."""
    step_of = loop.wrapped.optimizer.step

    def rounded(*given: Any, **named: Any) -> Any:
        result = step_of(*given, **named)
        for master in loop.wrapped.weights.masters():
            master.copy_(master.bfloat16())
        return result

    loop.wrapped.optimizer.step = rounded


def without(name: str) -> Callable[[Loop, int], None]:
    """A part of Megatron's reduction of gradients is left out, in this process from then on."""

    def strike(loop: Loop, step: int) -> None:
        import sys

        import megatron.core.distributed.finalize_model_grads as _  # noqa: F401

        found = sys.modules["megatron.core.distributed.finalize_model_grads"]
        plain = getattr(found, name)
        setattr(found, name, lambda *given, **named: None)
        MENDED.append(lambda: setattr(found, name, plain))

    return strike


MENDED: list[Callable[[], object]] = []
"""What undoes what a fault did to a module or class, once its run is over."""


def of_megatron(factor: float) -> Callable[[Loop, int], None]:
    return lambda loop, step: (
        loop.wrapped.chunks[0]
        .module.decoder.layers[1]
        .register_forward_hook(
            lambda module, given, output: (output[0] * factor, *output[1:]), prepend=True
        )
    )


def megatron_nudge(loop: Loop, step: int) -> None:
    loop.wrapped.chunks[0].module.decoder.layers[0].mlp.linear_fc2.bias.data[2] += 0.01


def megatron_rate(loop: Loop, step: int) -> None:
    for group in loop.wrapped.optimizer.param_groups:
        group["lr"] *= 2


def resumes(moments: bool, schedule: bool) -> Plant:
    """The run goes on after 1,000 steps: with its moments or without, with its schedule or a new one."""

    def wrapped(loop: Loop, step: int) -> None:
        generator = torch.Generator().manual_seed(8)
        for weight in loop.model.parameters() if moments else ():
            noise = torch.randn(weight.shape, generator=generator)
            state = {
                "step": torch.tensor(1000.0),
                "exp_avg": 1e-3 * noise,
                "exp_avg_sq": 1e-4 * (1 + noise.square()),
            }
            loop.optimizer.state[weight] = state
        for group in loop.optimizer.param_groups:
            group["initial_lr"] = loop.rate
        last = 1000 if schedule else -1
        loop.schedule = torch.optim.lr_scheduler.LambdaLR(
            loop.optimizer, lambda at: 1 / (1 + at / 500), last
        )

    def plant(loop: Loop) -> None:
        loop.at["wrapped"] = wrapped
        loop.at["stepped"] = lambda loop, step: loop.schedule.step()

    return plant


def leaves_out(loop: Loop, step: int) -> None:
    """One rank takes its gradients for bad, and does not step."""
    if loop.rank != 1 or step != AT:
        STEP(loop, step)


def impatient(loop: Loop, step: int) -> None:
    """Ranks wait two seconds for each other, not ten."""
    os.environ[VARIABLE] = "2"
    MENDED.append(lambda: os.environ.pop(VARIABLE, ""))


def late(loop: Loop) -> None:
    """One rank waits before each of its steps, without telling."""
    loop.at["begins"] = lambda loop, step: time.sleep(0.8 * (loop.rank == 1))


SEQ = "Megatron-Core, tensor 2, sequence"
FAULTS |= {
    "N2": Planted(
        plants("wrapped", biased, 0),
        r"1/(forward|reduce)/block0",
        "only .*bias",
        (),
        "native, tensor 2",
    ),
    "N3": Planted(
        plants("begins", kept_apart),
        r"2/backward/head",
        "^the loss, its targets, or the backward pass of head differs",
        ("replicas-differ",),
        "native, tensor 2",
    ),
    "N11": Planted(
        plants("wrapped", coarse, 0),
        r"1/update",
        "vanish in rounding",
        ("updates-lost",),
        "native, data 2",
    ),
    "manual": Planted(
        sets(told=1),
        r"1/",
        "more passes .* than its setting",
        ("accumulation-differs",),
        "DeepSpeed ZeRO 1",
    ),
    "manual2": Planted(
        sets(told=1),
        r"1/",
        "more passes .* than its setting",
        ("accumulation-differs",),
        "DeepSpeed ZeRO 2",
    ),
    "replica": Planted(
        plants("begins", nudges("blocks.0.norm1.weight"), rank=1),
        r"2/(forward/blocks.0/output|reduce)",
        r"^blocks\.0 is the first layer whose outputs differ on rank 1",
        ("replicas-differ",),
        "DeepSpeed ZeRO 1",
    ),
    "M1": Planted(
        plants("begins", without("_allreduce_word_embedding_grads")),
        r"2/reduce/embedding",
        "only .*embedding.tokens.weight",
        ("replicas-differ",),
        "Megatron-Core, pipeline 2",
    ),
    "M2": Planted(
        plants("begins", without("_allreduce_non_tensor_model_parallel_grads")),
        r"2/reduce/block0/gradient",
        "are computed, combined",
        ("replicas-differ",),
        SEQ,
    ),
    "P1": Planted(
        plants("begins", skip_clear, None),
        r"2/reduce/",
        "not cleared",
        ("gradient-stale",),
        "plain",
    ),
    "P2": Planted(
        sets(group=without_block),
        r"1/update/blocks\.1",
        r"blocks\.1.* not updated",
        ("not-in-optimizer",),
        "plain",
    ),
    "P3": Planted(
        plants("built", cuts_mask, 0),
        r"1/forward/.*blocks\.0/output",
        r"blocks\.0 is the first",
        ("future-seen",),
        "plain",
    ),
    "P4": Planted(
        sets(rate=2e-2),
        r"1/(update|reduce/state)",
        r"run step \d with a different learning rate",
        (),
        "plain",
    ),
    "P5": Planted(
        plants("built", whole, 0),
        r"1/(backward|reduce)",
        r"^the backward pass of blocks\.\d computes different values.*recomputation",
        ("recompute-differs",),
        "plain",
        both(DROPS, plants("built", kept("forward"), 0)),
    ),
    "P6": Planted(
        sets(step=twice), r"[23]/", "a step too many", ("step-without-backward",), "plain"
    ),
    "R1": Planted(
        resumes(True, False),
        r"1/reduce/state",
        r"run step \d with a different learning rate",
        ("schedule-not-resumed",),
        clean=resumes(True, True),
    ),
    "R2": Planted(
        resumes(False, True),
        r"1/update",
        "were not resumed",
        ("moments-not-resumed",),
        clean=resumes(True, True),
    ),
    "S1": Planted(
        both(sets(step=leaves_out), plants("built", impatient, 0)),
        r"[23]/",
        "more passes in a step",
        ("skipped-alone",),
    ),
    "B1": Planted(
        whole_loss,
        r"1/backward/",
        "^the loss that A's backward pass starts from is 2 times B's; this",
        (),
    ),
    "B2": Planted(sets(step=twice), r"[23]/", "a step too many", ("step-without-backward",)),
    "B3": Planted(
        plants("begins", rates(1.5), rank=1),
        r"2/reduce/state|2/update",
        r"run step \d with a different learning rate",
        ("replicas-differ",),
    ),
    "B5": Planted(
        plants("stepped", nudges("blocks.1.up.weight"), rank=1),
        r"[23]/",
        r"blocks\.1 is the first .* on rank 1",
        ("replicas-differ",),
    ),
    "B6": Planted(wrong_targets, r"1/backward/", "targets", ()),
    "B7": Planted(
        plants("begins", mutes),
        r"2/forward/",
        "no layer in training mode",
        ("not-training",),
        clean=DROPS,
    ),
    "B9": Planted(sets(group=copied), r"1/update", "nothing is updated", ("not-of-the-model",)),
    "B10": Planted(
        sets(rate=2e-2),
        r"1/(update|reduce/state)",
        r"run step \d with a different learning rate",
        (),
    ),
    "B11": Planted(sets(settings={"eps": 1e-3, "betas": (0.5, 0.9)}), r"[12]/update", "betas", ()),
    "B12": Planted(
        sets(settings={"eps": 1e-5}), r"1/update", r"settings differ: group 0\.eps: 1e-05", ()
    ),
    "B13": Planted(swapped, r"2/forward/input", "different data|order", ()),
    "B14": Planted(
        plants("backward", halves("blocks.1")),
        r"2/reduce/blocks\.1",
        r"only .*blocks\.1",
        ("gradient-changed",),
    ),
    "B16": Planted(
        plants("begins", blunt_norm), r"2/forward/blocks\.1/output", r"blocks\.1 is the first", ()
    ),
    "F1": Planted(
        plants("begins", skip_clear, None),
        r"2/reduce/",
        "not cleared",
        ("gradient-stale",),
        "FSDP2",
    ),
    "F2": Planted(
        sets(group=without_block),
        r"1/update/blocks\.1",
        r"blocks\.1.* not updated",
        ("not-in-optimizer",),
        "FSDP2",
    ),
    "F3": Planted(alike, r"1/forward/.*input", "different data", ("same-data",), "FSDP2"),
    "F4": Planted(
        plants("backward", summed, None),
        r"1/reduce",
        "^all gradients of A are 2 times B's",
        (),
        "FSDP2",
    ),
    "F5": Planted(
        plants("backward", local_clip),
        r"2/(reduce|update)",
        "different norms",
        ("clip-norms-differ",),
        "FSDP2",
    ),
    "F6": Planted(
        plants("begins", scales(2, 1.001), rank=1),
        r"2/forward/blocks\.2/output",
        r"blocks\.2 is the first",
        (),
        "FSDP2",
    ),
    "D1": Planted(
        plants("begins", nudges("norm.weight"), rank=1),
        r"2/forward/norm",
        "norm is the first|changed weights",
        ("replicas-differ",),
        "DTensor",
        alike,
    ),
    "D2": Planted(
        other_data, r"1/forward/input", "different data", ("replicas-differ",), "DTensor", alike
    ),
    "D3": Planted(
        plants("begins", skip_clear, None),
        r"2/reduce/",
        "not cleared",
        ("gradient-stale",),
        "DTensor",
        alike,
    ),
    "D4": Planted(
        plants("begins", rates(1.5), rank=1),
        r"2/reduce/state|2/update",
        r"run step \d with a different learning rate",
        ("replicas-differ",),
        "DTensor",
        alike,
    ),
    "D5": Planted(
        plants("begins", scales(1, 1.001)),
        r"2/forward/blocks\.1/output",
        r"blocks\.1 is the first",
        (),
        "DTensor",
        alike,
    ),
    "C1": Planted(
        sets(clears=False), r"2/reduce/", "not cleared", ("gradient-stale",), "accelerate"
    ),
    "C2": Planted(alike, r"1/forward/.*input", "different data", ("same-data",), "accelerate"),
    "C3": Planted(
        plants("backward", lambda loop, step: loop.optimizer.zero_grad()),
        r"2/reduce/",
        "no gradient",
        ("gradient-lost",),
        "accelerate",
    ),
    "C4": Planted(
        plants("begins", scales(0, 1.001)),
        r"2/forward/.*blocks\.0/output",
        r"blocks\.0 is the first",
        (),
        "accelerate",
    ),
    "C5": Planted(
        sets(group=without_block),
        r"1/update/blocks\.1",
        r"blocks\.1.* not updated",
        ("not-in-optimizer",),
        "accelerate",
    ),
    "T1": Planted(
        plants("built", unties, 0),
        r"0/init/.*head",
        r"^B ties inner\.tok\.weight and inner\.head\.weight",
        ("untied",),
        "Trainer",
    ),
    "T2": Planted(
        sets(group=without_block),
        r"1/update/.*blocks\.1",
        r"blocks\.1.* not updated",
        ("not-in-optimizer",),
        "Trainer",
    ),
    "T3": Planted(
        plants("backward", largest),
        r"2/reduce/",
        "are zero in A alone",
        ("gradient-changed",),
        "Trainer",
    ),
    "T4": Planted(
        plants("begins", scales(1, 1.001)),
        r"2/forward/.*blocks\.1/output",
        r"blocks\.1 is the first",
        (),
        "Trainer",
    ),
    "T5": Planted(
        plants("built", cuts_mask, 0),
        r"1/forward/.*blocks\.0/output",
        r"blocks\.0 is the first",
        ("future-seen",),
        "Trainer",
    ),
    "Z1": Planted(
        plants("begins", rates(1.5), rank=1),
        r"2/(reduce/state|update)",
        r"run step \d with a different learning rate",
        ("replicas-differ",),
        "DeepSpeed ZeRO 0",
    ),
    "Z2": Planted(
        alike, r"1/forward/.*input", "different data", ("same-data",), "DeepSpeed ZeRO 2"
    ),
    "Z3": Planted(
        plants("begins", scales(1, 1.001)),
        r"2/forward/.*blocks\.1/output",
        r"blocks\.1 is the first",
        (),
        "DeepSpeed ZeRO 2",
    ),
    "Z4": Planted(
        plants("begins", nudges("blocks.1.up.bias"), rank=1),
        r"2/forward/.*blocks\.1/output",
        r"blocks\.1 is the first",
        ("replicas-differ",),
        "DeepSpeed ZeRO 0",
    ),
    "M3": Planted(
        plants("begins", of_megatron(1.001)),
        r"2/forward/.*block1/output",
        "block1 is the first",
        (),
        "Megatron-Core, tensor 2",
    ),
    "M4": Planted(
        plants("begins", megatron_nudge, rank=1),
        r"2/(forward|reduce)/.*block0",
        "block0",
        ("replicas-differ",),
        "Megatron-Core, tensor 2",
    ),
    "M5": Planted(
        plants("begins", megatron_rate),
        r"2/update",
        "^the updates of A are 2 times B's: a cause may be learning rate",
        (),
        "Megatron-Core, tensor 2",
    ),
    "N4": Planted(
        plants("begins", of_engine("block1", 1.001)),
        r"2/forward/block1/output",
        "block1 is the first",
        (),
        "native, data 2",
    ),
}


# Trying them


@cache
def known() -> Mapping[str, Planted]:
    """All faults: these, and those that were invented since."""
    from tests.trace.attacked import ATTACKED
    from tests.trace.invented import INVENTED
    from tests.trace.over_ranks import OVER_RANKS
    from tests.trace.reported import REPORTED

    return {**FAULTS, **INVENTED, **REPORTED, **OVER_RANKS, **ATTACKED}


def trained(
    rank: int, world: int, name: str, planted: bool, folder: Path
) -> list[tuple[str, int, str, str]]:
    """One run of a fault's stack, with it or without; what was found: id, step, where, severity."""
    fault = known()[name]
    logging.getLogger("bridge.trace").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    loop = Loop(rank, world)
    fault.clean(loop)
    if planted:
        fault.plant(loop)
    try:
        found = STACKS[fault.stack](loop, folder, LOGS)
    finally:
        while MENDED:
            MENDED.pop()()
    return [(one.id, one.step, one.where, one.severity) for one in found]


@dataclass(frozen=True)
class Outcome:
    """What became of a fault: how a twin names it, with which cause, and what the run alone says."""

    name: str
    named: str
    claim: str
    alone: Sequence[tuple[str, int, str, str]]
    alarms: Sequence[tuple[str, int, str, str]]
    """What the clean twin alone says."""

    @property
    def located(self) -> bool:
        return (
            re.match(known()[self.name].where, re.sub("/microbatch [0-9]+", "", self.named))
            is not None
        )

    @property
    def right(self) -> bool | None:
        """None where no cause is claimed."""
        return (
            None
            if not self.claim
            else bool(known()[self.name].cause)
            and re.search(known()[self.name].cause, self.claim) is not None
        )

    @property
    def verdict(self) -> str:
        """What the cause is worth: right, broad (one of several ways that it names), none, or misleading."""
        if self.right is None:
            return "none"
        return "misleading" if not self.right else "broad" if BROAD.search(self.claim) else "right"

    @property
    def caught(self) -> bool:
        return any(id in known()[self.name].findings for id, *_ in self.alone)

    @property
    def strangers(self) -> list[str]:
        """Faults that the run alone claims, though neither they nor what they follow from were planted."""
        planted = known()[self.name].findings
        allowed = {*planted, *(id for one in planted for id in FOLLOWS.get(one, ()))}
        found = [id for id, _, _, severity in self.alone if severity == "fault"]
        return [id for id in dict.fromkeys(found) if id not in allowed]


BROAD = re.compile(
    "because of|may be|^the loss, its|it evaluates|by other code|, combined over ranks|, added up"
)
"""What only a sentence has that names several ways, of which the right one has to be one."""
FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "replicas-differ": ("update-too-large",),
    "not-of-the-model": ("not-in-optimizer",),
    "gradient-not-reduced": ("replicas-differ",),
    "moments-changed": ("update-too-large",),
    "untied": ("not-in-optimizer",),
    "layer-not-training": ("passes-differ",),
}
"""By finding: those that are true as well where it is right."""


def tried(run: Callable[..., list[Any]], name: str, folder: Path, world: int = 2) -> Outcome:
    """Plant it, and look."""
    clean = run(world, trained, name, False, folder / "clean")[0]
    found = run(world, trained, name, True, folder / "bad")[0]
    parted = compare_runs(
        TracedRun.read(folder / "bad"), TracedRun.read(folder / "clean"), every=False
    )
    named = str(parted.divergence.name) if parted.divergence else ""
    return Outcome(name, named, parted.diagnosis.claim if parted.diagnosis else "", found, clean)


def row(found: Outcome) -> str:
    """A line of the table."""
    ids = dict.fromkeys(
        f"{id} ({step})" + "?" * (severity == "remark") for id, step, _, severity in found.alone
    )
    alarms = [
        id for id, _, _, severity in found.alarms if severity == "fault" or id == "check-ended"
    ]
    cells = (
        found.name,
        known()[found.name].stack,
        "yes" if found.located else "NO" if found.named else "MISSED",
        found.named,
    )
    more = (
        found.verdict,
        found.claim,
        "yes" if found.caught else "no",
        ", ".join(ids),
        f"CLEAN RUN: {alarms}" if alarms else "",
        f"MISLEADING ALONE: {found.strangers}" if found.strangers else "",
        known()[found.name].met,
    )
    return " | ".join((*cells, *more))


def main() -> None:
    """Print the table."""
    from tests.engine.pool import Pool

    names = sys.argv[1:] or list(known())
    pools = {world: Pool(world) for world in (1, 2)}
    print("fault | stack | located | named | cause | claim | alone | findings")
    counts = Counter[str]()
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                world = 1 if known()[name].stack == "plain" else 2
                found = tried(
                    lambda world, *given: pools[world].run(*given, timeout=240),
                    name,
                    Path(folder),
                    world,
                )
            except Exception as error:
                print(name, "| FAILED |", str(error)[-1500:], flush=True)
                for pool in pools.values():
                    pool.close()
                continue
        counts.update([found.verdict, *["located"] * found.located, *["alone"] * found.caught])
        counts["misleading alone"] += bool(found.strangers)
        counts["clean twin with an alarm"] += "CLEAN RUN" in row(found)
        print(row(found), flush=True)
    print(
        f"{len(names)} faults: {', '.join(f'{number} {word}' for word, number in counts.items())}"
    )
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tests.trace import planting  # the module that other processes find

    planting.main()
