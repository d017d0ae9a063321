"""Faults that live on two ranks, of kinds that public threads report: ranks that should agree and do not, or reduce wrongly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.trace.invented import ITSELF, padded
from tests.trace.planting import (
    BATCH,
    DROPS,
    TOKENS,
    VOCAB,
    WIDTH,
    Loop,
    Plant,
    Planted,
    Small,
    alike,
    both,
    mutes,
    plants,
    resumes,
    sets,
)
from tests.trace.reported import swaps


def mean(tensor: Tensor) -> Tensor:
    """Over ranks, in place."""
    dist.all_reduce(tensor)
    return tensor.div_(dist.get_world_size())


def leaves(point: str) -> Plant:
    """Nothing happens there."""
    return lambda loop: loop.at.pop(point)  # type: ignore[arg-type, return-value]


# Reduction


def unwraps(loop: Loop, step: int) -> None:
    """Forward passes call the model, not what wraps it."""
    loop.wrapped = loop.model


def hooked(divisor: Callable[[dist.GradBucket], float | None]) -> Plant:
    """DDP sums each bucket over ranks and divides it; a bucket without a divisor stays as it is."""

    def call(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        found = divisor(bucket)
        if found is None:
            done: Any = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done
        sent: Any = dist.all_reduce(bucket.buffer().div_(found), async_op=True)
        return sent.get_future().then(lambda answer: answer.value()[0])

    return plants(
        "wrapped",
        lambda loop, step: loop.wrapped.register_comm_hook(
            None, lambda state, bucket: call(bucket)
        ),
        0,
    )


def own_bias(loop: Loop) -> None:
    """The loss has a parameter of its own, which DDP does not know; its gradient is reduced by hand."""
    bias = nn.Parameter(torch.zeros(VOCAB))
    plain, group = loop.loss, loop.group
    loop.loss = lambda output, targets: plain(output + bias, targets)
    loop.group = lambda loop: [*group(loop), bias]
    loop.at["backward"] = lambda loop, step: mean(bias.grad)  # type: ignore[arg-type, return-value]


def by_all(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over the targets of all ranks."""
    count = mean((targets >= 0).sum().float())
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum") / count


def clips_together(loop: Loop, step: int) -> None:
    """By the norm over all stages."""
    weights = list(loop.model.parameters())
    square = nn.utils.get_total_norm([one.grad for one in weights]).square()
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(weights, 0.01, square.sqrt())


def clips_alone(loop: Loop, step: int) -> None:
    """By the stage's own norm."""
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)


def halves_norm(loop: Loop, step: int) -> None:
    """A tensor rank has its own part of the gradient of a norm that all have."""
    loop.model.blocks[1].norm2.weight.grad.mul_(0.5)


# State


class Batched(nn.BatchNorm1d):
    """Over the features of each token."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def batched(loop: Loop) -> nn.Module:
    """The last norm is one over batches."""
    model = Small(loop.dropout)
    model.norm = Batched(WIDTH)  # type: ignore[assignment]
    return model


def averages_statistics(loop: Loop, step: int) -> None:
    mean(loop.model.norm.running_mean)
    mean(loop.model.norm.running_var)


def balances(together: bool) -> Callable[[Loop, int], None]:
    """What is chosen too often is chosen less from then on: counted on all ranks, or on this one."""

    def update(loop: Loop, step: int) -> None:
        tokens = torch.cat([part for part, _ in loop.data(step)]) % WIDTH
        count = torch.bincount(tokens.flatten(), minlength=WIDTH).float()
        count = mean(count) if together else count
        loop.model.scale += 1e-2 * (count.mean() - count).sign()

    return update


def moved(names: str = "") -> Callable[[Loop, int], None]:
    """Weights with those names are other ones."""

    def change(loop: Loop, step: int) -> None:
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for name, weight in loop.model.named_parameters():
                if names in name:
                    weight += 0.05 * torch.randn(weight.shape, generator=generator)

    return change


def resumes_first(loop: Loop) -> None:
    """One rank alone finds the moments of its checkpoint."""
    resumes(loop.rank == 0, True)(loop)


def overlaps(loop: Loop) -> None:
    """Each rank shuffles with a seed of its own, and takes its share of that order."""

    def data(step: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(100 + step)
        tokens = torch.randint(VOCAB, (BATCH, TOKENS + 1), generator=generator)
        order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(loop.rank))
        parts = tokens[order].chunk(loop.passes * loop.world)[loop.rank :: loop.world]
        return [(part[:, :-1], part[:, 1:]) for part in parts]

    loop.data = data  # type: ignore[method-assign]


def scheduled(times: Callable[[Loop], int]) -> Plant:
    """The learning rate decays, so many of its steps in each of the training's."""

    def plant(loop: Loop) -> None:
        def wrapped(loop: Loop, step: int) -> None:
            rule = torch.optim.lr_scheduler.LambdaLR
            loop.schedule = rule(loop.optimizer, lambda at: 1 / (1 + at / 10))

        loop.at["wrapped"] = wrapped
        loop.at["stepped"] = lambda loop, step: [loop.schedule.step() for _ in range(times(loop))]  # type: ignore[func-returns-value, return-value]

    return plant


DIFFER = ("replicas-differ",)
BACK = r"1/(backward|reduce)/"
OVER_RANKS: Mapping[str, Planted] = {
    "X1": Planted(
        plants("attached", unwraps, 0),
        r"1/forward/",
        "outside of a pass",
        ("gradient-not-reduced",),
        met="minimind#854",
    ),
    "X2": Planted(
        leaves("backward"),
        r"2/",
        "^the loss, its targets, or the backward pass of head differs",
        ("replicas-differ",),
        clean=own_bias,
        met="pytorch-metric-learning#710",
    ),
    "X3": Planted(
        leaves("stepped"),
        r"[12]/.*(running|buffer)",
        "by each rank alone",
        ("buffers-differ",),
        clean=both(sets(build=batched), plants("stepped", averages_statistics, None)),
        met="pytorch-image-models#110",
    ),
    "X4": Planted(
        sets(loss=Loop.loss),
        r"1/backward/head",
        "^A and B weigh microbatches differently",
        (),
        clean=both(padded, sets(loss=by_all)),
        met="torchtitan#2206",
    ),
    "X5": Planted(
        plants("stepped", balances(together=False), None),
        r"2/forward/",
        "^head is the first layer whose outputs differ",
        ("buffers-differ", "buffers-diverge"),
        clean=plants("stepped", balances(together=True), None),
        met="deepspeed-course#27",
    ),
    "X6": Planted(
        both(sets(buckets={"init_sync": False}), plants("built", moved(), 0, 1)),
        r"0/init/",
        "^the runs start from different weights on rank 1",
        DIFFER,
        met="piper#24",
    ),
    "X7": Planted(
        plants("wrapped", moved(), 0, 0),
        r"0/init/",
        "^the runs start from different weights on rank 1",
        DIFFER,
        clean=plants("wrapped", moved(), 0),
        met="dlrover#1034",
    ),
    "X8": Planted(
        resumes_first,
        r"1/update",
        "the optimizer's moments were not resumed",
        (*DIFFER, "moments-not-resumed"),
        clean=resumes(True, True),
        met="PaddleNLP#7256",
    ),
    "X9": Planted(
        plants("begins", mutes, rank=0),
        r"2/forward/",
        "evaluat|training mode",
        ("not-training", "layer-not-training"),
        clean=DROPS,
        met="joeynmt#184, here on one rank",
    ),
    "X10": Planted(
        overlaps, r"1/forward/.*input", "different data|order", ("same-data",), met="LongLive#71"
    ),
    "X11": Planted(
        scheduled(lambda loop: loop.world),
        r"2/reduce/state",
        r"run step \d with a different learning rate",
        (),
        clean=scheduled(lambda loop: 1),
        met="accelerate#2926",
    ),
    "X12": Planted(
        plants("built", moved("blocks.0.norm1"), 0, 1),
        r"0/init/blocks\.0",
        "^the runs start from different weights on rank 1",
        DIFFER,
        "DTensor",
        alike,
        "Automodel#3822",
    ),
    "X13": Planted(
        plants("backward", clips_alone, None),
        r"1/(reduce|update)",
        "^in A, ranks clip by different norms",
        ("clip-norms-differ",),
        "pipelining",
        plants("backward", clips_together, None),
        "SpecForge#663",
    ),
    "X14": Planted(
        hooked(lambda bucket: dist.get_world_size() ** 2),
        BACK,
        r"0\.5 times B's",
        ("gradient-averaged-twice",),
        met="torchtitan#2323",
    ),
    "X15": Planted(
        hooked(lambda bucket: 1),
        BACK,
        "^all gradients of A are 2 times B's",
        ("gradient-summed",),
        met="pytorch#42399",
    ),
    "X16": Planted(
        hooked(lambda bucket: None if bucket.is_last() else dist.get_world_size()),
        r"1/reduce/",
        "updates weights with the gradient that it computed itself",
        ("gradient-not-reduced",),
        clean=sets(buckets={"bucket_cap_mb": 0.005}),
        met="openvla-oft#160",
    ),
    "X17": Planted(
        plants("backward", halves_norm, rank=1),
        r"2/reduce/blocks\.1",
        r"only .*blocks\.1\.norm2",
        DIFFER,
        "DTensor",
        alike,
        "TransformerEngine#441",
    ),
    "X18": Planted(
        plants("begins", swaps, rank=0),
        r"2/forward/",
        ITSELF,
        (*DIFFER, "weights-changed"),
        met="Open-Sora-Plan#186, here on one rank",
    ),
}
"""By name."""
