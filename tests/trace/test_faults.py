"""Every fault of the catalogue is caught by its detector, and located; over generated layouts there is no false alarm."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import bridge
from bridge.trace.run import TracedRun
from bridge.trace.run_comparison import compare_runs
from tests.engine.runs import Case
from tests.trace.faults import ADAMW, CLIPPED, FAULTS, LEVELS, SGD, struck, table, world_of
from tests.trace.traces import traced

Ranks = Callable[..., list[Any]]
DOCS = Path(bridge.__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], TracedRun]:
    """Runs without fault on one rank, by optimizer."""
    folder, runs = tmp_path_factory.mktemp("good"), dict[str, TracedRun]()

    def found(optimizer: Any) -> TracedRun:
        key = str(optimizer)
        if key not in runs:
            traced(0, 1, Case({**optimizer, **LEVELS, "batch.micro": 8}), folder / str(len(runs)))
            runs[key] = TracedRun.read(folder / str(len(runs)))
        return runs[key]

    return found


@pytest.mark.parametrize(
    "name", [name for name, fault in FAULTS.items() if fault.detector != "diff"]
)
def test_checks_locate_faults(name: str, run: Ranks, tmp_path: Path) -> None:
    fault = FAULTS[name]
    where = fault.named if fault.detector == "refused" else f"desync: {fault.named}"
    for reports, steps in run(world_of(fault.layout), struck, name, fault.layout, tmp_path):
        assert steps == (0 if fault.detector == "refused" else 1), (
            "all ranks stop before the update"
        )
        assert any(
            report.startswith(f"{where}: ") and fault.words in report for report in reports
        ), reports


@pytest.mark.parametrize("piped", [False, True], ids=["", "pipeline"])
@pytest.mark.parametrize(
    "name", [name for name, fault in FAULTS.items() if fault.detector == "diff"]
)
def test_diff_locates_faults(
    name: str, piped: bool, run: Ranks, good: Callable[[Any], TracedRun], tmp_path: Path
) -> None:
    fault = FAULTS[name]
    layout = fault.layouts[piped]
    run(world_of(layout), struck, name, layout, tmp_path)
    found = compare_runs(TracedRun.read(tmp_path), good(fault.optimizer)).divergence
    assert found is not None
    assert (str(found.name), fault.words in found.cause) == (fault.named, True), found


LAYOUTS = int(os.environ.get("STAGEBRIDGE_LAYOUTS", "8"))
"""How many layouts are drawn: 50 show what the documentation says."""


MESHES = ((1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 1, 1), (1, 1, 2))
LARGE = ((2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4))
"""Tensor, data and pipeline ranks: two, and four."""
SCHEDULES = ("gpipe", "1f1b", "zero_bubble", "interleaved_1f1b", "zero_bubble_v")
"""The last two have several stages on a rank, for which the model is too short on four."""


def layout(seed: int) -> tuple[int, dict[str, Any]]:
    """Ranks and plan values of a layout drawn with `seed`."""
    draw = Random(seed)
    tensor, data, pipeline = draw.choice(LARGE if seed % 4 == 0 else MESHES)
    accumulation = 4 if pipeline > 1 else draw.choice([1, 2])
    schedule = draw.choice(SCHEDULES if pipeline == 2 else SCHEDULES[:3])
    stages = (
        {"schedule.name": schedule}
        if pipeline > 1
        else {"stages.layers_per_stage": draw.choice([1.0, 2.0])}
    )
    virtual = {"schedule.virtual": 2} if schedule == "interleaved_1f1b" and pipeline > 1 else {}
    return tensor * data * pipeline, {
        **draw.choice([SGD, ADAMW, CLIPPED]),
        **stages,
        **virtual,
        "precision.compute": draw.choice(["fp32", "bf16"]),
        "parallel.tensor": tensor,
        "parallel.data": data,
        "parallel.pipeline": pipeline,
        "parallel.sequence": tensor > 1 and draw.random() < 0.5,
        "zero.stage": draw.choice([0, 1, 2, 3]),
        "recompute.granularity": draw.choice(["none", "full", "selective"]),
        "batch.accumulation": accumulation,
        "batch.micro": 8 // accumulation // data,
        "debug.tensor_parallel": True,
        **dict.fromkeys(LEVELS, 8),
    }


@pytest.mark.parametrize("seed", range(LAYOUTS))
def test_no_false_alarm_on_generated_layouts(seed: int, run: Ranks, tmp_path: Path) -> None:
    """Neither a check (which would raise) nor a comparison with one rank."""
    world, plan = layout(seed)
    alone = {
        name: value
        for name, value in plan.items()
        if not name.startswith(("parallel.", "zero.", "batch.", "schedule."))
    }
    run(world, traced, Case(plan, seed=seed, dtype=torch.float32), tmp_path / "split", False, True)
    run(
        1,
        traced,
        Case({**alone, "batch.micro": 8}, seed=seed, dtype=torch.float32),
        tmp_path / "alone",
    )
    found = compare_runs(TracedRun.read(tmp_path / "split"), TracedRun.read(tmp_path / "alone"))
    assert [
        (str(line.name), line.distance, line.bound, line.cause) for line in found.faults[:3]
    ] == []
    assert {line.verdict for line in found.lines} <= {"equal", "rounding"}


def test_the_table_in_the_documentation_is_current() -> None:
    if not DOCS.is_dir():
        pytest.skip("the documentation is not beside the package")
    assert table() in (DOCS / "trace.md").read_text()
