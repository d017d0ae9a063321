"""Ranks that do not keep together, and runs that go on with a part of what they had: each is a finding, and none a hang."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bridge.trace import attach, step_meeting
from tests.trace.planting import FAULTS, LOGS, STACKS, Loop, late, tried


@pytest.mark.parametrize("name", ["S1", "R1", "R2"])
def test_it_is_found_without_a_twin_and_located_with_one(
    name: str, run: Any, tmp_path: Path
) -> None:
    found = tried(run, name, tmp_path)
    assert found.caught and found.located and found.right is not False, found
    assert not [one for one in found.alarms if one[0] in FAULTS[name].findings]


def waits(
    rank: int, world: int, slow: bool, folder: Path
) -> list[tuple[str, tuple[int, ...], str]]:
    """A run in which one rank waits before each step, if it is slow."""
    logging.getLogger("bridge.trace").setLevel(logging.CRITICAL)
    loop = Loop(rank, world)
    if slow:
        late(loop)
    found = STACKS["DDP"](loop, folder, LOGS)
    return [(one.id, one.ranks, one.evidence) for one in found if one.id == "rank-late"]


def test_the_late_rank_is_named_with_its_phase(run: Any, tmp_path: Path) -> None:
    (found,) = run(2, waits, True, tmp_path / "slow")[0]
    assert found[:2] == ("rank-late", (1,)) and "before the forward pass" in found[2], found


def joins(rank: int, world: int, folder: Path) -> tuple[list[str], int]:
    """Torch's `Join`, with fewer samples on the second rank."""
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    logging.getLogger("bridge.trace").setLevel(logging.CRITICAL)
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tracer = attach(model, LOGS, folder, optimizer=optimizer)
    with Join([model]):
        for step in range(4 - 2 * rank):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(step + rank))).square().mean().backward()
            optimizer.step()
    tracer.remove()
    return [
        one.id for one in tracer.findings.found if one.severity == "fault"
    ], tracer.source.now().step


def test_ranks_with_other_numbers_of_steps_under_join_do_not_wait_for_each_other(
    run: Any, tmp_path: Path
) -> None:
    assert run(2, joins, tmp_path) == [([], 5), ([], 3)]


def compressed(rank: int, world: int, folder: Path) -> list[str]:
    """Gradients that PowerSGD makes coarse."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    logging.getLogger("bridge.trace").setLevel(logging.CRITICAL)
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(16, 16))
    model.register_comm_hook(
        powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tracer = attach(model, LOGS, folder, optimizer=optimizer)
    for step in range(4):
        optimizer.zero_grad()
        model(
            torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * step + rank))
        ).square().mean().backward()
        optimizer.step()
    tracer.remove()
    return [one.id for one in tracer.findings.found if one.severity == "fault"]


def test_gradients_that_torch_was_asked_to_compress_are_not_said_to_be_changed(
    run: Any, tmp_path: Path
) -> None:
    assert run(2, compressed, tmp_path) == [[], []]


def alone(rank: int, world: int, folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Replicas that are averaged now and then, as local SGD does: a rank takes its steps when it likes."""
    logging.getLogger("bridge.trace").setLevel(logging.CRITICAL)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tracer = attach(model, run=folder, optimizer=optimizer)
    for step in range(3):
        if step and rank == 1:
            torch.distributed.barrier()  # until the other one has taken all of its steps
        optimizer.zero_grad()
        model(torch.full((2, 4), float(step + rank))).square().mean().backward()
        optimizer.step()
        if step == 2 and rank == 0:
            torch.distributed.barrier()
            torch.distributed.barrier()
    tracer.remove()
    return [
        (one.id, one.ranks)
        for one in tracer.findings.found
        if one.id in ("rank-absent", "skipped-alone")
    ]


def test_a_rank_that_does_not_come_is_not_waited_for_without_end(run: Any, tmp_path: Path) -> None:
    assert run(2, patient, tmp_path) == [[("rank-absent", (0,))]] * 2


def patient(rank: int, world: int, folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    """`alone`, with ranks that wait for a short time."""
    step_meeting.PATIENCE = 0.05
    try:
        return alone(rank, world, folder)
    finally:
        step_meeting.PATIENCE = 10.0


def with_moments(steps: int, filled: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its AdamW, which counts `steps` steps; its moments are ones if `filled`, else zeros."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for weight in model.parameters():
        moments = {
            name: torch.full_like(weight, float(filled)) for name in ("exp_avg", "exp_avg_sq")
        }
        optimizer.state[weight] = {"step": torch.tensor(float(steps)), **moments}
    return model, optimizer


MOMENTS = (500, False, "all second moments are zero"), (0, True, "some second moments are not zero")


@pytest.mark.parametrize(("steps", "filled", "said"), MOMENTS)
def test_moments_that_do_not_belong_to_their_steps(
    steps: int, filled: bool, said: str, tmp_path: Path
) -> None:
    model, optimizer = with_moments(steps, filled)
    tracer = attach(model, optimizer=optimizer)
    (found,) = tracer.findings.found
    tracer.remove()
    assert found.id == "moments-missing" and said in found.evidence


@pytest.mark.parametrize(("steps", "filled"), [(1, True), (1, False), (500, True), (0, False)])
def test_moments_that_belong_to_their_steps_are_no_finding(steps: int, filled: bool) -> None:
    model, optimizer = with_moments(steps, filled)
    tracer = attach(model, optimizer=optimizer)
    assert not tracer.findings.found
    tracer.remove()


def test_a_run_that_says_it_goes_on_has_moments(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    tracer = attach(
        model, optimizer=torch.optim.AdamW(model.parameters(), weight_decay=0.0), done=30
    )
    assert [one.id for one in tracer.findings.found] == ["moments-not-resumed"]
    tracer.remove()
