"""The same training on the engine, on torch's own parallelism and on DeepSpeed: each as a function that makes one step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from bridge.engine import initialize
from bridge.engine.data import Text
from bridge.engine.models.gpt import GPT, Architecture, mean_cross_entropy
from bridge.plan.plan import Plan

SMALL = Architecture(layers=3, hidden=32, heads=4, kv_heads=2, ffn=64, sequence=16, tied=False)


@dataclass(frozen=True)
class Task:
    """What is trained: a GPT in fp32 with AdamW on bundled text, `batch` sequences in a step over all ranks."""

    shape: Architecture = SMALL
    batch: int = 8
    steps: int = 20
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-6
    weight_decay: float = 0.1
    clip: float = 0.5


Step = Callable[[Tensor, Tensor], Any]
"""Trains on tokens and targets (batch, sequence) of this rank; returns their mean loss, over this rank or over all."""
Builder = Callable[[Task], Step]


def batch_of(task: Task, step: int, place: int = 0, places: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one step: the part of the `place`-th of `places` data ranks."""
    text, rows = Text.of(None, task.shape.sequence), task.batch // places
    first = step * task.batch + place * rows
    samples = torch.stack([text.sample(number) for number in range(first, first + rows)])
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def losses(rank: int, world: int, name: str, task: Task) -> list[float]:
    """Losses of all steps, each a mean over the whole batch."""
    shares = name not in WHOLE_BATCH
    step, found = BUILDERS[name](task), []
    for number in range(task.steps):
        loss = torch.as_tensor(
            step(*batch_of(task, number, rank * shares, world if shares else 1)),
            dtype=torch.float64,
        )
        dist.all_reduce(loss)
        found.append(loss.item() / world)
    return found


def native(task: Task, **values: Any) -> Step:
    """The engine; `values` are plan values, with two underscores for a dot."""
    settings = {
        f"optimizer.{name}": getattr(task, name)
        for name in ("lr", "betas", "eps", "weight_decay", "clip")
    }
    plan = Plan.of(
        {**settings, **{name.replace("__", "."): value for name, value in values.items()}}
    )
    engine = initialize(GPT(task.shape), plan, mean_cross_entropy)
    return lambda tokens, targets: engine.train_batch([(tokens, targets)])


def ddp(task: Task) -> Step:
    """DistributedDataParallel."""
    model = DistributedDataParallel(GPT(task.shape), gradient_as_bucket_view=True)
    return _plain(model, _adamw(task, [list(model.parameters())]), task)


def fsdp(task: Task, reshard: bool) -> Step:
    """FSDP2, a unit for each layer and one for the rest; without `reshard`, weights stay whole between forward and backward."""
    model, mesh = GPT(task.shape), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return _plain(model, _adamw(task, [list(model.parameters())]), task)


def dtensor(task: Task) -> Step:
    """Tensor parallelism by DTensor, vocabulary and loss included."""
    model, mesh = GPT(task.shape), init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, dict(_styles(model)))
    _divide_heads(model, mesh)
    kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for weight in model.parameters():
        kinds[isinstance(weight, DTensor)].append(weight)
    optimizer = _adamw(task, kinds.values())

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            loss = _loss(model(tokens), targets)
            torch.autograd.backward(loss)
        _clip(kinds, task.clip)
        optimizer.step()
        optimizer.zero_grad()
        return _whole(loss.detach())

    return step


def _styles(model: GPT) -> Iterator[tuple[str, Any]]:
    yield "embedding.tokens", RowwiseParallel(input_layouts=Replicate())
    yield "head.logits", ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    for name, module in model.named_modules():
        if name.endswith(("query", "key", "value", "up", "gate")) and isinstance(module, nn.Linear):
            yield name, ColwiseParallel()
        elif name.endswith(("attention.out", "down")):
            yield name, RowwiseParallel()


def _divide_heads(model: GPT, mesh: DeviceMesh) -> None:
    for module in model.modules():
        if hasattr(module, "split_over"):
            module.split_over(mesh.get_local_rank(), mesh.size())


def _clip(kinds: Mapping[bool, list[nn.Parameter]], clip: float) -> None:
    """Clip split and whole parameters by their common norm, which torch's own function takes of one kind only."""
    norms = [_whole(nn.utils.get_total_norm(_gradients(weights))) for weights in kinds.values()]
    norm = torch.stack(norms).norm()
    for weights in kinds.values():
        torch._foreach_mul_(
            [_local(gradient) for gradient in _gradients(weights)],
            (clip / (norm + 1e-6)).clamp(max=1.0),
        )


def _gradients(weights: Iterable[nn.Parameter]) -> list[Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, task: Task) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = _loss(model(tokens), targets)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _adamw(task: Task, groups: Iterable[list[nn.Parameter]]) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {
        name: getattr(task, name) for name in ("lr", "betas", "eps", "weight_decay")
    }
    return torch.optim.AdamW([{"params": group} for group in groups], fused=True, **settings)


def deepspeed(task: Task, level: int, **adam: Any) -> Step:
    """Real DeepSpeed with ZeRO at `level`; `adam` adds to the optimizer's parameters."""
    ds = real_deepspeed()
    ranks = dist.get_world_size()
    settings = {
        name: value
        for name, value in asdict(task).items()
        if name in ("lr", "betas", "eps", "weight_decay")
    }
    config = {
        "train_micro_batch_size_per_gpu": task.batch // ranks,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {**settings, **adam}},
        "zero_optimization": {"stage": level},
        "gradient_clipping": task.clip,
    }
    model = GPT(task.shape)
    engine, *_ = ds.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=False
    )
    assert engine.zero_optimization_stage() == level

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = _loss(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def real_deepspeed() -> Any:
    """DeepSpeed on CPU, without compiling its shared-memory collectives, which only inference calls; with fp16, for which it asks
    for fast products, though torch has slow ones where there are none.
    """
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(dist.get_rank()))
    import deepspeed
    import deepspeed.comm
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    type(deepspeed.accelerator.get_accelerator()).is_fp16_supported = lambda accelerator: True
    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed("gloo")
    return deepspeed


MICROBATCHES = 8
"""Of a step in a pipeline."""


def native_piped(task: Task, **values: Any) -> Step:
    """The engine with two pipeline ranks."""
    given = {"parallel__pipeline": 2, "batch__accumulation": MICROBATCHES, **values}
    settings = {
        f"optimizer.{name}": getattr(task, name)
        for name in ("lr", "betas", "eps", "weight_decay", "clip")
    }
    plan = Plan.of(
        {**settings, **{name.replace("__", "."): value for name, value in given.items()}}
    )
    engine = initialize(GPT(task.shape), plan, mean_cross_entropy)
    return lambda tokens, targets: engine.train_batch(_microbatches(tokens, targets))


def torch_piped(task: Task) -> Step:
    """torch.distributed.pipelining's 1F1B over two halves of the layers, with clipping over ranks, which it leaves to us."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, layers = dist.get_rank(), list(GPT(task.shape))
    half = len(layers) // 2
    part = nn.Sequential(*(layers[half:] if rank else layers[:half]))
    schedule = Schedule1F1B(PipelineStage(part, rank, 2, torch.device("cpu")), MICROBATCHES, _loss)
    weights = list(part.parameters())
    optimizer = _adamw(task, [weights])

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        schedule.step(
            *(() if rank else (tokens,)), **({"target": targets, "losses": losses} if rank else {})
        )
        squares = nn.utils.get_total_norm(_gradients(weights)).double().square()
        agreed = torch.stack(
            [squares, torch.stack(losses).double().mean() if rank else squares.new_zeros(())]
        ).detach()
        dist.all_reduce(agreed)
        torch._foreach_mul_(
            _gradients(weights), float((task.clip / (agreed[0].sqrt() + 1e-6)).clamp(max=1.0))
        )
        optimizer.step()
        optimizer.zero_grad()
        return agreed[1]

    return step


def deepspeed_piped(task: Task, **adam: Any) -> Step:
    """DeepSpeed's PipelineModule with ZeRO 1, over two halves of the layers."""
    ds = real_deepspeed()
    from deepspeed.pipe import PipelineModule

    settings = {
        name: value
        for name, value in asdict(task).items()
        if name in ("lr", "betas", "eps", "weight_decay")
    }
    config = {
        "train_micro_batch_size_per_gpu": task.batch // MICROBATCHES,
        "gradient_accumulation_steps": MICROBATCHES,
        "optimizer": {"type": "AdamW", "params": {**settings, **adam}},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": task.clip,
        "steps_per_print": 10**9,
    }
    net = PipelineModule(
        list(GPT(task.shape)), num_stages=2, loss_fn=_loss, partition_method="uniform"
    )
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    engine, *_ = ds.initialize(
        model=net, model_parameters=weights, config=config, dist_init_required=False
    )
    return lambda tokens, targets: engine.train_batch(iter(_microbatches(tokens, targets)))


def _microbatches(tokens: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True))


BUILDERS: Mapping[str, Builder] = {
    **{f"native zero {level}": partial(native, zero__stage=level) for level in range(4)},
    "native tensor": partial(native, parallel__tensor=2),
    "native tensor and sequence": partial(native, parallel__tensor=2, parallel__sequence=True),
    "ddp": ddp,
    "fsdp2": partial(fsdp, reshard=True),
    "fsdp2 whole until backward": partial(fsdp, reshard=False),
    "dtensor": dtensor,
    **{
        f"deepspeed zero {level}": partial(deepspeed, level=level, torch_adam=True)
        for level in range(4)
    },
    "native 1f1b": native_piped,
    "native zero bubble": partial(native_piped, schedule__name="zero_bubble_v", zero__stage=3),
    "torch 1f1b": torch_piped,
    "deepspeed 1f1b": partial(deepspeed_piped, torch_adam=True),
}
"""Every way to make the same steps on two ranks."""
PIPED = ("native 1f1b", "native zero bubble", "torch 1f1b", "deepspeed 1f1b")
WHOLE_BATCH = ("native tensor", "native tensor and sequence", "dtensor", *PIPED)
"""Those whose ranks all take the whole batch."""
