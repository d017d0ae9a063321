"""torch.distributed.pipelining and the engine run each other's tables to the same gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pipelines import alone
from runs import distance
from torch_pipelines import CASE, pipelining

PLAN = {"parallel.pipeline": 2, "batch.accumulation": 4, "schedule.virtual": 2, "stages.layers_per_stage": 2}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("ScheduleInterleaved1F1B", "interleaved_1f1b"),
        ("ScheduleLoopedBFS", "looped_bfs"),
        ("ScheduleInterleavedZeroBubble", "zero_bubble"),
        ("ScheduleZBVZeroBubble", "zero_bubble_v"),
    ],
)
def test_each_runs_the_others_table(run: Any, tmp_path: Path, theirs: str, ours: str) -> None:
    expected = alone(CASE).gradients[0]
    ranks = run(2, pipelining, theirs, {**PLAN, "schedule.name": ours}, tmp_path)
    for found in (_joined([rank[0] for rank in ranks]), _joined([rank[1] for rank in ranks]), ranks[0][2]):
        assert distance(found, expected) < 1e-9


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: gradient for part in parts for name, gradient in part.items()}
