"""Trainings that once raised a false fault, or ended the trace: nothing is wrong in them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bridge.trace import attach
from bridge.trace.run import TracedRun
from bridge.trace.tracer import Tracer
from tests.trace.planting import LOGS, VOCAB, Small

STEPS = 5
Training = Callable[[Path], Tracer]


def tokens(step: int) -> Tensor:
    return torch.randint(VOCAB, (4, 9), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> Tensor:
    data = tokens(step)
    output = model(data[:, :-1]).float()
    return F.cross_entropy(output.flatten(0, 1), data[:, 1:].flatten())


def two_in_one_optimizer(folder: Path) -> Tracer:
    """An actor is watched, whose optimizer holds a critic too; some steps train the critic alone."""
    actor, critic = Small(), nn.Linear(4, 1)
    optimizer = torch.optim.AdamW([*actor.parameters(), *critic.parameters()], 1e-3)
    tracer = attach(actor, LOGS, folder, optimizer=optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = critic(torch.randn(4, 4)).square().mean()
        (loss if step in (2, 3) else loss + loss_of(actor, step)).backward()
        optimizer.step()
    return tracer


def a_copy_is_trained(folder: Path) -> Tracer:
    """A copy of the watched model is trained for some steps, and its gradients are taken over."""
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tracer = attach(model, LOGS, folder, optimizer=optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        trained = copy.deepcopy(model) if step in (2, 3) else model
        loss_of(trained, step).backward()
        for one, other in zip(model.parameters(), trained.parameters(), strict=True):
            one.grad = other.grad
        optimizer.step()
    return tracer


def loads_fast_weights(folder: Path, dtype: torch.dtype, turned: bool) -> Tracer:
    """The optimizer holds an fp32 copy, which gets the model's gradients and is loaded into it."""
    model = Small(tied=False)
    shadow = copy.deepcopy(model).float()
    model = model.to(dtype)
    held = list(shadow.parameters())
    optimizer = torch.optim.AdamW(held[::-1] if turned else held, 1e-2)
    tracer = attach(model, LOGS, folder, optimizer=optimizer)
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, step).backward()
        for one, other in zip(held, model.parameters(), strict=True):
            one.grad = None if other.grad is None else other.grad.float()
        optimizer.step()
        model.load_state_dict(shadow.state_dict())
    return tracer


def gradients_of_samples(folder: Path) -> Tracer:
    """Each second step takes the mean over samples of clipped gradients, by vmap."""
    model = Small()
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    tracer = attach(model, LOGS, folder, optimizer=optimizer)

    def loss(weights: dict[str, Tensor], data: Tensor) -> Tensor:
        output = torch.func.functional_call(model, weights, (data[None, :-1],))
        return F.cross_entropy(output.flatten(0, 1), data[1:])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    for step in range(STEPS):
        optimizer.zero_grad()
        if step % 2:
            plain = {name: weight.detach() for name, weight in named.items()}
            for name, gradient in each(plain, tokens(step)).items():
                named[name].grad = gradient.mean(0)
        else:
            loss_of(model, step).backward()
        optimizer.step()
    return tracer


CLEAN: dict[str, Training] = {
    "two models in one optimizer": two_in_one_optimizer,
    "a copy is trained": a_copy_is_trained,
    "fp32 weights loaded into bf16": lambda folder: loads_fast_weights(
        folder, torch.bfloat16, False
    ),
    "fp32 weights loaded into bf16, in another order": lambda folder: loads_fast_weights(
        folder, torch.bfloat16, True
    ),
    "fp32 weights loaded into fp32": lambda folder: loads_fast_weights(
        folder, torch.float32, False
    ),
    "gradients of samples": gradients_of_samples,
}


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_wrong(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(7)
    with caplog.at_level(logging.WARNING, "bridge.trace"):
        tracer = CLEAN[name](tmp_path)
    tracer.remove()
    wrong = [str(one) for one in tracer.findings if one.severity == "fault"]
    assert not wrong, wrong
    assert not [text for text in caplog.messages if "not called any more" in text]
    # Every step is in the log, those too whose passes the trace does not see.
    assert TracedRun.read(tmp_path).steps[-1] == STEPS
