"""Traces of different layouts tell of the same tensors, and the same of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bridge.engine import initialize
from bridge.engine.models.gpt import mean_cross_entropy
from bridge.engine.runner import Engine
from bridge.errors import SourceError
from bridge.plan.plan import Plan
from bridge.trace.run import LoggedPart, TracedRun
from bridge.trace.run_comparison import compare_runs
from tests.engine.runs import Case, microbatches, model_of
from tests.trace.faults import Batches, Strike
from tests.trace.traces import traced

Ranks = Callable[..., list[Any]]
Alone = Callable[..., TracedRun]

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
    "pp2 dp2": (
        4,
        {
            "parallel.pipeline": 2,
            "parallel.data": 2,
            "batch.micro": 1,
            "batch.accumulation": 4,
            "zero.stage": 1,
        },
    ),
    "pp2 tp2 sp interleaved": (
        4,
        {
            "parallel.pipeline": 2,
            "parallel.tensor": 2,
            "parallel.sequence": True,
            "schedule.name": "interleaved_1f1b",
            "schedule.virtual": 2,
            "batch.micro": 2,
            "batch.accumulation": 4,
        },
    ),
    "pp2 halves of backward": (
        2,
        {
            "parallel.pipeline": 2,
            "schedule.name": "zero_bubble_v",
            "recompute.granularity": "full",
            "batch.micro": 2,
            "batch.accumulation": 4,
        },
    ),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Runs on one rank, each once."""
    runs: dict[str, TracedRun] = {}

    def found(case: Case, full: bool = False) -> TracedRun:
        key = f"{case} {full}"
        if key not in runs:
            folder = tmp_path_factory.mktemp("alone")
            traced(0, 1, case, folder, full)
            runs[key] = TracedRun.read(folder)
        return runs[key]

    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("full", [False, True], ids=["samples", "full"])
def test_runs_of_any_layout_log_the_same(
    layout: str, full: bool, run: Ranks, alone: Alone, tmp_path: Path
) -> None:
    world, plan = LAYOUTS[layout]
    run(world, traced, Case({**PLAIN, **plan}, steps=2), tmp_path, full)
    one, split = alone(ALONE, full), TracedRun.read(tmp_path)
    assert one.steps == split.steps == (0, 1, 2)
    for step in one.steps:
        expected, found = (
            {entry.name: entry for entry in log.entries(step)} for log in (one, split)
        )
        assert list(found) == list(expected)
        for name, entry in found.items():
            reference = expected[name]
            assert entry.missing == reference.missing == 0, name
            assert entry.shape == reference.shape
            assert entry.samples is not None and reference.samples is not None
            torch.testing.assert_close(
                entry.samples, reference.samples, rtol=1e-9, atol=1e-12, msg=str(name)
            )
            assert entry.summary is not None and reference.summary is not None
            assert entry.summary.norm == pytest.approx(reference.summary.norm, rel=1e-9)
            assert (entry.whole is not None) is full
    assert logged_twice(split) == []


def logged_twice(run: TracedRun) -> list[str]:
    """What some rank logged of one tensor more than once, also where a forward runs again or backward in halves."""
    records = (
        (folder, record)
        for folder, steps in run.lines.items()
        for step in steps.values()
        for record in step.records
    )
    found = Counter(
        f"{folder.name} {record['name']} {record['placement']}" for folder, record in records
    )
    return [key for key, count in found.items() if count > 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_of_any_layout_are_equal_up_to_rounding(
    layout: str, run: Ranks, alone: Alone, tmp_path: Path
) -> None:
    world, plan = LAYOUTS[layout]
    single = {**PLAIN, "precision.compute": "fp32"}
    run(world, traced, Case({**single, **plan}, steps=3, dtype=torch.float32), tmp_path)
    found = compare_runs(
        TracedRun.read(tmp_path),
        alone(Case({**single, "batch.micro": 8}, steps=3, dtype=torch.float32)),
    )
    assert [str(line.name) for line in found.faults] == []
    assert {line.verdict for line in found.lines} <= {"equal", "rounding"}
    assert found.worst is not None
    assert found.worst.distance < found.worst.bound / 3, found.worst


ADAMW = {
    **PLAIN,
    "precision.compute": "fp32",
    "optimizer.name": "adamw",
    "optimizer.lr": 1e-4,
    "optimizer.eps": 1e-8,
}
APART = {"batch.micro": 2, "batch.accumulation": 4}


def adamw(folder: Path, strike: Strike | None = None, **more: Any) -> TracedRun:
    """Five steps of AdamW on one rank in four microbatches, with a fault in the third."""
    torch.manual_seed(5)
    case = Case(
        {**ADAMW, **APART, **{name.replace("_", ".", 1): value for name, value in more.items()}},
        dtype=torch.float32,
    )
    engine = initialize(
        model_of(case), Plan.of(case.plan), mean_cross_entropy, seed=11, trace=folder
    )
    for step in range(5):
        batches = list(microbatches(case, engine, step))
        if step == 2 and strike:
            strike(engine, batches)
        engine.train_batch(batches)
    return TracedRun.read(folder)


@pytest.mark.parametrize("rate", [1e-2, 1e-4])
def test_adaptive_updates_are_equal_up_to_rounding(
    rate: float, alone: Alone, tmp_path: Path
) -> None:
    other = alone(
        Case({**ADAMW, "optimizer.lr": rate, "batch.micro": 8}, steps=5, dtype=torch.float32)
    )
    found = compare_runs(adamw(tmp_path, optimizer_lr=rate), other)
    assert found.faults == ()
    assert found.worst is not None and found.worst.distance < found.worst.bound / 2, found.worst


def scaled(engine: Engine, batches: Batches) -> None:
    engine.model.get_submodule("block1").register_forward_hook(
        lambda module, inputs, output: output * 1.0001, prepend=True
    )


def faster(engine: Engine, batches: Batches) -> None:
    """A rate that is 1 % too high."""
    step = engine.optimizer.step
    engine.optimizer.step = lambda gradients, lr, *rest: step(gradients, lr * 1.01, *rest)  # type: ignore[method-assign,misc]


@pytest.mark.parametrize(
    ("strike", "named"),
    [(scaled, "3/forward/block1/output"), (faster, "3/update/embedding/weight/tokens.weight")],
)
def test_small_faults_are_found_beside_adaptive_updates(
    strike: Strike, named: str, alone: Alone, tmp_path: Path
) -> None:
    found = compare_runs(
        adamw(tmp_path, strike),
        alone(Case({**ADAMW, "batch.micro": 8}, steps=5, dtype=torch.float32)),
    )
    assert found.divergence is not None
    assert str(found.divergence.name) == named, found.divergence


def test_a_name_that_no_file_can_have_is_damage(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "0" / "00000001.safetensors")
    record: Any = SimpleNamespace(name=SimpleNamespace(step=1))
    part = LoggedPart(record, tmp_path / "0")
    assert part.tensor("a", 2) is not None
    for name in ("b", "\udc80"):
        with pytest.raises(SourceError, match=r"00000001.safetensors: .*; the file is damaged"):
            part.tensor(name)
