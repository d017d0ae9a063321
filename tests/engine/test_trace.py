"""Traces of different layouts tell of the same tensors, and the same of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Case
from traces import traced

from bridge.trace.comparison import compare
from bridge.trace.run import Run, named

Ranks = Callable[..., list[Any]]

LOGS = ("layer_outputs", "layer_gradients", "param_init", "all_param_gradients", "param_update")
LEVELS = {f"debug.{name}": 5 for name in LOGS}
PLAIN = {"precision.compute": "fp64", "optimizer.name": "sgd", "optimizer.lr": 0.1, **LEVELS}
ALONE = Case({**PLAIN, "batch.micro": 8}, steps=2)

LAYOUTS = {
    "dp2": (2, {"parallel.data": 2, "batch.micro": 2, "batch.accumulation": 2, "zero.stage": 2}),
    "tp2": (2, {"parallel.tensor": 2, "batch.micro": 4, "batch.accumulation": 2}),
    "tp2 sp dp2 zero3 recompute": (
        4,
        {
            "parallel.tensor": 2,
            "parallel.sequence": True,
            "parallel.data": 2,
            "batch.micro": 2,
            "batch.accumulation": 2,
            "zero.stage": 3,
            "recompute.granularity": "full",
            "stages.layers_per_stage": 1.0,
        },
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("full", [False, True], ids=["samples", "full"])
def test_runs_of_any_layout_log_the_same(layout: str, full: bool, run: Ranks, tmp_path: Path) -> None:
    world, plan = LAYOUTS[layout]
    run(1, traced, ALONE, tmp_path / "alone", full)
    run(world, traced, Case({**PLAIN, **plan}, steps=2), tmp_path / "split", full)
    alone, split = Run.read(tmp_path / "alone"), Run.read(tmp_path / "split")
    assert alone.steps == split.steps == (0, 1, 2)
    for step in alone.steps:
        expected, found = named(alone.entries(step)), named(split.entries(step))
        assert list(found) == list(expected)
        for name, entry in found.items():
            reference = expected[name]
            assert entry.missing == reference.missing == 0, name
            assert entry.shape == reference.shape
            assert entry.samples is not None and reference.samples is not None
            torch.testing.assert_close(entry.samples, reference.samples, rtol=1e-9, atol=1e-12, msg=str(name))
            assert entry.summary is not None and reference.summary is not None
            assert entry.summary.norm == pytest.approx(reference.summary.norm, rel=1e-9)
            assert (entry.whole is not None) is full


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_of_any_layout_are_equal_up_to_rounding(layout: str, run: Ranks, tmp_path: Path) -> None:
    world, plan = LAYOUTS[layout]
    single = {**PLAIN, "precision.compute": "fp32"}
    run(1, traced, Case({**single, "batch.micro": 8}, steps=3, dtype=torch.float32), tmp_path / "alone")
    run(world, traced, Case({**single, **plan}, steps=3, dtype=torch.float32), tmp_path / "split")
    found = compare(Run.read(tmp_path / "split"), Run.read(tmp_path / "alone"))
    assert [str(line.name) for line in found.faults] == []
    assert {line.verdict for line in found.lines} <= {"equal", "rounding"}
    assert found.worst is not None
    assert found.worst.distance < found.worst.bound / 3, found.worst
