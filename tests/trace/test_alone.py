"""What a run says of itself, without a twin: what changed in its structure, state and gradients, as fault or as remark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trace.planting import AT, Loop, Small, by_torch, ddp as wrapped_by_ddp, fsdp2

Said = set[tuple[str, int, str]]
"""Ids of findings, with their steps and severities."""


def at(step: int, call: Callable[[Loop], None]) -> Callable[[Loop, int], None]:
    """What a loop does at a point of one step alone."""
    return lambda loop, now: call(loop) if now == step else None


def loses_tie(loop: Loop) -> None:
    loop.model.head.weight = nn.Parameter(loop.model.tok.weight.detach().clone())


def replaces(loop: Loop) -> None:
    block = loop.model.blocks[1]
    block.up.weight = nn.Parameter(block.up.weight.detach().clone())


def freezes(loop: Loop) -> nn.Module:
    model = Small()
    model.blocks[0].up.requires_grad_(False)
    return model


def merges(loop: Loop) -> None:
    with torch.no_grad():
        loop.model.blocks[0].up.weight.add_(0.01)


def takes_back(loop: Loop) -> None:
    """Each update is taken back, and the moments stay."""
    kept: list[Tensor] = []

    def keeps(*_: Any) -> None:
        kept[:] = [weight.detach().clone() for weight in loop.model.parameters()]

    def restores(*_: Any) -> None:
        with torch.no_grad():
            for weight, old in zip(loop.model.parameters(), kept, strict=True):
                weight.copy_(old)

    loop.optimizer.register_step_pre_hook(keeps)
    loop.optimizer.register_step_post_hook(restores)


def shuffles_moments(loop: Loop) -> None:
    for state in loop.optimizer.state.values():
        moment = state["exp_avg"]
        moment.copy_(moment.flatten().flip(0).view_as(moment))


def rounds_moments(loop: Loop) -> None:
    for state in loop.optimizer.state.values():
        state["exp_avg_sq"].copy_(state["exp_avg_sq"].bfloat16().float())


def each_gradient(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Loop, int], None]:
    def changes(loop: Loop, step: int) -> None:
        for weight in loop.model.parameters():
            if weight.grad is not None:
                weight.grad.copy_(change(weight.grad, weight.detach()))

    return changes


def clips_by_weights(gradient: Tensor, weight: Tensor) -> Tensor:
    most = 0.01 * weight.norm().clamp(min=1e-3)
    return gradient * (most / gradient.norm().clamp(min=1e-12)).clamp(max=1.0)


def centralises(gradient: Tensor, weight: Tensor) -> Tensor:
    return gradient - gradient.mean(-1, keepdim=True) if gradient.dim() > 1 else gradient


def adds_noise(gradient: Tensor, weight: Tensor) -> Tensor:
    noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(7))
    return gradient + 0.5 * gradient.norm() / gradient.numel() ** 0.5 * noise


def projects(gradient: Tensor, weight: Tensor) -> Tensor:
    """PCGrad: of two tasks whose gradients conflict, the part that conflicts is taken out."""
    other = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(8))
    share = (gradient * other).sum().clamp(max=0.0) / other.square().sum()
    return gradient - share * other


ALONE: Mapping[str, tuple[dict[str, Any], Said]] = {
    "a tie is lost": (
        {"begins": at(AT, loses_tie)},
        {("untied", AT, "fault"), ("not-in-optimizer", AT, "fault")},
    ),
    "a parameter is replaced": ({"begins": at(AT, replaces)}, {("not-in-optimizer", AT, "fault")}),
    "frozen weights change": (
        {"build": freezes, "begins": at(AT, merges)},
        {("weights-changed", AT, "remark")},
    ),
    "a block evaluates": (
        {"begins": at(AT, lambda loop: loop.model.blocks[1].eval())},
        {("layer-not-training", AT, "remark")},
    ),
    "a part of a block evaluates": (
        {"begins": at(AT, lambda loop: loop.model.blocks[1].drop.eval())},
        {("layer-not-training", AT, "remark")},
    ),
    "moments are permuted": (
        {"begins": at(AT, shuffles_moments)},
        {("moments-changed", AT, "remark"), ("update-too-large", AT, "fault")},
    ),
    "moments are rounded": (
        {"begins": at(AT, rounds_moments)},
        {("moments-changed", AT, "remark")},
    ),
    "updates are taken back": (
        {"wrapped": lambda loop, _: takes_back(loop)},
        {("not-updated", 1, "fault"), ("update-unexplained", 1, "fault")},
    ),
    **{
        name: ({"backward": each_gradient(change)}, {("gradient-changed", 1, "remark")})
        for name, change in {
            "gradients are clipped by weights": clips_by_weights,
            "gradients are centralised": centralises,
            "noise is added": adds_noise,
            "gradients are projected": projects,
        }.items()
    },
}


def alone(rank: int, world: int, folder: Path, changes: dict[str, Any], wrap: Any) -> Said:
    """A training in which something is done."""
    parts = {name: changes[name] for name in ("build", "group") if name in changes}
    points = {name: call for name, call in changes.items() if name not in parts}
    loop = Loop(rank, world, at=points, **parts)
    found = by_torch(loop, folder, None, wrap)
    return {(one.id, one.step, one.severity) for one in found if one.id != "decay-on-norms"}


@pytest.mark.parametrize("name", ALONE)
def test_what_can_be_known_alone_is_said(name: str, tmp_path: Path) -> None:
    points, said = ALONE[name]
    found = alone(0, 1, tmp_path, points, lambda loop: loop.model)
    assert said <= found
    faults = {id for id, _, severity in found if severity == "fault"}
    assert faults == {id for id, _, severity in said if severity == "fault"}


class Outside(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


def outside(loop: Loop) -> list[nn.Parameter]:
    """The optimizer holds what DDP does not."""
    loss, plain = Outside(), loop.loss
    loop.loss = lambda output, targets: plain(output, targets) * loss.scale.square().mean()
    return [*loop.model.parameters(), *loss.parameters()]


def balances(loop: Loop) -> None:
    """The bias of a router follows what this rank alone has counted."""
    loop.model.scale.add_(0.001 * (1 + loop.rank))


def skips_by_rank(loop: Loop) -> None:
    loop.model.skipped = 1 if loop.rank else None


def keeps_gathered(loop: Loop) -> Any:
    wrapped = fsdp2(loop)
    wrapped.set_reshard_after_backward(False)
    return wrapped


def leaves_unused(loop: Loop) -> Any:
    loop.buckets = {"find_unused_parameters": True}
    return wrapped_by_ddp(loop)


BY_RANK: Mapping[str, tuple[dict[str, Any], Any, Said]] = {
    "a parameter outside of DDP": (
        {"group": outside},
        wrapped_by_ddp,
        {("replicas-differ", 2, "fault")},
    ),
    "a bias that balances": (
        {"stepped": lambda loop, _: balances(loop)},
        wrapped_by_ddp,
        {("buffers-diverge", 2, "remark")},
    ),
    "layers dropped at random": (
        {"begins": at(AT, skips_by_rank)},
        leaves_unused,
        {("layers-differ", AT, "remark")},
    ),
    "weights that stay gathered": ({}, keeps_gathered, set()),
    "one rank evaluates": (
        {"begins": at(AT, lambda loop: loop.model.eval() if loop.rank else None)},
        wrapped_by_ddp,
        {("not-training", AT, "fault"), ("passes-differ", AT, "fault")},
    ),
}


@pytest.mark.parametrize("name", BY_RANK)
def test_what_ranks_can_know_is_said(name: str, tmp_path: Path, run: Any) -> None:
    found = run(2, by_rank, tmp_path, name)[0]
    said = BY_RANK[name][2]
    assert said <= found
    faults = {id for id, _, severity in found if severity == "fault"}
    assert faults == {id for id, _, severity in said if severity == "fault"}


def by_rank(rank: int, world: int, folder: Path, name: str) -> Said:
    """One rank of a training in `BY_RANK`."""
    points, wrap, _ = BY_RANK[name]
    return alone(rank, world, folder, points, wrap)


class Watched(nn.Module):
    """One of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


def in_stages(rank: int, world: int, folder: Path, limit: float) -> Said:
    """A pipeline whose stages clip by their own norms."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    from bridge.trace import attach

    torch.manual_seed(rank)
    stage = PipelineStage(Watched(), rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(stage.submod.parameters(), 0.1)
    tracer = attach(schedule, None, folder, optimizer=optimizer)
    for step in range(2):
        torch.manual_seed(step)
        data = torch.randn(4, 8)
        optimizer.zero_grad()
        schedule.step(*([] if rank else [data]), **({"target": data} if rank else {}))
        nn.utils.clip_grad_norm_(stage.submod.parameters(), limit)
        optimizer.step()
    tracer.remove()
    return {(one.id, one.step, one.severity) for one in tracer.findings}


@pytest.mark.parametrize("limit", [1e-3, float("inf")])
def test_stages_that_clip_by_their_own_norms_are_named(
    limit: float, tmp_path: Path, run: Any
) -> None:
    found = run(2, in_stages, tmp_path, limit)[0]
    assert (("clip-norms-differ", 1, "fault") in found) == (limit < 1)
