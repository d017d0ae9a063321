"""Ranks that do not keep together, and runs that go on with a part of what they had: each is a finding, and none a hang."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from planting import FAULTS, LOGS, STACKS, Loop, late, tried
from torch import nn

from bridge.trace import attach


@pytest.mark.parametrize("name", ["S1", "R1", "R2"])
def test_it_is_found_without_a_twin_and_located_with_one(name: str, run: Any, tmp_path: Path) -> None:
    found = tried(run, name, tmp_path)
    assert found.caught and found.located and found.right is not False, found
    assert not [one for one in found.alarms if one[0] in FAULTS[name].findings]


def waits(rank: int, world: int, slow: bool, folder: Path) -> list[tuple[str, tuple[int, ...], str]]:
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


def with_moments(steps: int, filled: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its AdamW, which counts `steps` steps; its moments are ones if `filled`, else zeros."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for weight in model.parameters():
        moments = {name: torch.full_like(weight, float(filled)) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": torch.tensor(float(steps)), **moments}
    return model, optimizer


MOMENTS = (500, False, "all second moments are zero"), (0, True, "moments are there")


@pytest.mark.parametrize(("steps", "filled", "said"), MOMENTS)
def test_moments_that_do_not_belong_to_their_steps(steps: int, filled: bool, said: str, tmp_path: Path) -> None:
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
    tracer = attach(model, optimizer=torch.optim.AdamW(model.parameters(), weight_decay=0.0), done=30)
    assert [one.id for one in tracer.findings.found] == ["moments-not-resumed"]
    tracer.remove()
