"""Timers: what a step spends its time on, said once every so many steps."""

from __future__ import annotations

import re
import time
from contextlib import redirect_stderr
from io import StringIO

import pytest
import torch
from torch import Tensor, nn

from bridge.engine import initialize
from bridge.plan.plan import Plan
from tests.engine.pool import Run

LINE = re.compile(r"rank (\d): step (\d): ([\d.]+) ms(?: \(mean of (\d) steps\))?: (.*)")
NAP = 0.03


class Slow(nn.Linear):
    """A layer whose forward pass takes at least `NAP` seconds."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Sleep, then multiply."""
        time.sleep(NAP)
        return super().forward(inputs)


def printed(rank: int, world: int, plan: dict[str, object]) -> list[str]:
    """The lines of four steps, with an evaluation after each."""
    torch.manual_seed(1)
    model = nn.Sequential(Slow(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    engine = initialize(model, Plan.of({"optimizer.lr": 0.1, **plan}), nn.functional.mse_loss)
    batch = torch.ones(2, 4), torch.zeros(2, 4)
    with redirect_stderr(StringIO()) as said:
        for _ in range(4):
            engine.train_batch([batch, batch])
            engine.eval()
            for _ in range(3):
                engine(*batch)
    return said.getvalue().splitlines()


TWO = {"batch.accumulation": 2, "run.timers": True}


@pytest.mark.parametrize("interval", [1, 2])
def test_parts_add_up_to_the_step(run: Run, interval: int) -> None:
    lines = run(1, printed, {**TWO, "run.log_interval": interval})[0]
    assert len(lines) == 4 // interval
    forward = []
    for number, line in enumerate(lines, 1):
        found = LINE.fullmatch(line)
        assert found and int(found[2]) == number * interval and int(found[4] or 1) == interval
        parts = {name: float(ms) for name, ms in (part.split() for part in found[5].split(", "))}
        assert sum(parts.values()) == pytest.approx(float(found[3]), abs=0.5)
        assert parts["backward"] > 0 and parts["update"] > 0
        forward.append(parts["forward"])
    # Of a machine that is busy, only the fastest step tells.
    assert 2000 * NAP <= min(forward) < 4000 * NAP, "two microbatches, without the evaluation"


def test_every_pipeline_rank_says_its_messages(run: Run) -> None:
    found = run(2, printed, {**TWO, "parallel.pipeline": 2})
    assert [LINE.fullmatch(lines[0])[1] for lines in found] == ["0", "1"]  # type: ignore[index]
    assert all("messages" in line for lines in found for line in lines)


def test_without_the_setting_nothing_is_said(run: Run) -> None:
    assert run(1, printed, {"batch.accumulation": 2})[0] == []
