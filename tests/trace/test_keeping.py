"""Logs that are thinned say so, and compare without a false alarm: every N steps, some ranks, one copy, so many bytes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.cli import run as command
from bridge.errors import BridgeError
from bridge.plan.plan import Debug
from bridge.trace import attach
from bridge.trace.log import Log
from bridge.trace.placement import Placement
from bridge.trace.record import Name
from bridge.trace.retention import Keep
from bridge.trace.run import TracedRun
from bridge.trace.run_comparison import compare_runs

DEBUG = Debug(
    layer_outputs=6, layer_gradients=6, param_init=6, all_param_gradients=6, param_update=6
)


def trained(folder: Path, keep: Keep, steps: int = 12, scale: float = 1.0) -> TracedRun:
    """Plain torch with Adam, whose logs are thinned."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tracer = attach(model, DEBUG, folder, optimizer=optimizer, keep=keep)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 6)).square().mean()
        torch.autograd.backward(loss * (scale if step == 7 else 1.0))
        optimizer.step()
    tracer.remove()
    return TracedRun.read(folder)


def test_every_third_step(tmp_path: Path) -> None:
    one, other = (trained(tmp_path / name, Keep(every=3)) for name in "ab")
    assert [step for step in one.steps if one.entries(step)] == [0, 3, 6, 9, 12]
    assert one.notes == ("the log has only one of every 3 steps",)
    found = compare_runs(one, other)
    assert found.divergence is None and {line.name.step for line in found.lines} == {0, 3, 6, 9, 12}


def test_updates_between_logged_steps_are_no_fault(tmp_path: Path) -> None:
    """One run logs all steps, the other a part of them; Adam cannot be followed over the gaps."""
    dense, thin = trained(tmp_path / "a", Keep()), trained(tmp_path / "b", Keep(every=4))
    for found in (compare_runs(dense, thin), compare_runs(thin, dense)):
        assert found.divergence is None and len(found.lines) > 20
        assert (
            {line.name.step for line in found.lines}
            == set(thin.steps_with_all_tensors)
            == {0, 4, 8, 12}
        )
    bad = trained(tmp_path / "c", Keep(every=4), scale=1.5)
    parted = compare_runs(bad, thin).divergence
    assert parted is not None and str(parted.name).startswith("8/backward/")


def test_a_budget_is_kept_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained(tmp_path / "whole", Keep(), 40)
    size = sum(path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.is_file())
    with caplog.at_level(logging.WARNING, "bridge.trace"):
        thin = trained(tmp_path / "thin", Keep(budget=size // 4), 40)
    spent = sum(path.stat().st_size for path in (tmp_path / "thin").rglob("*") if path.is_file())
    assert size // 8 < spent <= size // 4 + 2000, "all but the head"
    assert any("one of every 2 steps is logged" in said for said in caplog.messages)
    assert len(thin.steps_with_all_tensors) < len(thin.steps) and len(thin.notes) == 1
    found = compare_runs(thin, whole)
    assert found.divergence is None and {line.name.step for line in found.lines} == set(
        thin.steps_with_all_tensors
    )
    assert command(["trace", "diff", str(tmp_path / "thin"), str(tmp_path / "whole")]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"A: {thin.notes[0]}" and "because of its budget of" in first


def test_a_step_that_does_not_fit_ends_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trained(tmp_path, Keep(budget=9000), 6)
    assert "does not fit into the 9000 bytes that rank 0 may write" in caplog.text
    assert run.steps[-1] < 6 and run.steps[-1] not in run.steps_with_all_tensors
    assert "because of its budget of 9000 bytes" in run.notes[0]


def sharded(folder: Path, world: int, keep: Keep, odd: bool = False) -> TracedRun:
    """Each rank has rows of an output, and a weight that all have."""
    about = {
        "layers": ["a"],
        "mesh": {"data": world},
        "formats": ["float32"],
        "settings": {"optimizer": "SGD"},
        **keep.about(),
    }
    for rank in range(world):
        log = Log(folder, rank, {**about, "ranks": world})
        for step in range(1, 4):
            whole = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
            whole = whole * 1.5 if odd and step == 2 else whole
            size = 8 // world
            if keep.takes(step, rank):
                rows = Placement.box((8, 3), (size * rank, 0), (size, 3))
                log.add(
                    Name(step, "forward", "a", None, "output"),
                    whole[size * rank : size * (rank + 1)],
                    rows,
                    9,
                    rank,
                )
                log.add(
                    Name(step, "update", "a", None, "weight", "w"),
                    whole,
                    Placement.full((8, 3), ("data",)),
                    9,
                )
            log.write(step)
    return TracedRun.read(folder)


def test_ranks_that_do_not_log_are_unseen(tmp_path: Path) -> None:
    some, alone = (
        sharded(tmp_path / "some", 4, Keep(ranks=(1, 2))),
        sharded(tmp_path / "one", 1, Keep()),
    )
    assert some.notes == ("the log has only rank 1, 2",)
    assert (
        compare_runs(some, alone).divergence is None
        and compare_runs(alone, some).divergence is None
    )
    parted = compare_runs(
        sharded(tmp_path / "bad", 4, Keep(ranks=(1, 2)), odd=True), alone
    ).divergence
    assert parted is not None and str(parted.name) == "2/forward/a/output"


@pytest.mark.parametrize("keep", [{"every": 0}, {"budget": 0}, {"ranks": (-1,)}])
def test_what_cannot_be_kept(keep: dict[str, Any]) -> None:
    with pytest.raises(BridgeError, match="keep: found"):
        replace(Keep(), **keep)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget", "much"), "--budget: found much, expected a number of bytes with its unit"),
        (("--budget", "0GB"), "--budget: found 0GB"),
        (("--ranks", "3-1"), "--ranks: found 3-1, expected ranks and ranges"),
        (("--ranks", "a"), "--ranks: found a"),
    ],
)
def test_what_cannot_be_read(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["trace", "run", "--run", str(tmp_path / "run"), *words, "--", "true"]) == 1
    assert message in capsys.readouterr().err
