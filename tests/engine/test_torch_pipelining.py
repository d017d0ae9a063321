"""torch.distributed.pipelining and the engine run each other's tables to the same gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.pipelines import alone
from tests.engine.runs import distance
from tests.engine.torch_pipelines import CASE, pipelining, split_backward

pytestmark = pytest.mark.usefixtures("foreign")
to_itself = pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="its V schedules send shapes from a rank to itself, which gloo cannot",
)
V = pytest.param("ScheduleZBVZeroBubble", "zero_bubble_v", marks=to_itself)
PLAN = {
    "parallel.pipeline": 2,
    "batch.accumulation": 4,
    "schedule.virtual": 2,
    "stages.layers_per_stage": 2,
}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("ScheduleInterleaved1F1B", "interleaved_1f1b"),
        ("ScheduleLoopedBFS", "looped_bfs"),
        ("ScheduleInterleavedZeroBubble", "zero_bubble"),
        V,
    ],
)
def test_each_runs_the_others_table(run: Any, tmp_path: Path, theirs: str, ours: str) -> None:
    expected = alone(CASE).gradients[0]
    ranks = run(2, pipelining, theirs, {**PLAN, "schedule.name": ours}, tmp_path)
    for found in (
        _joined([rank[0] for rank in ranks]),
        _joined([rank[1] for rank in ranks]),
        ranks[0][2],
    ):
        assert distance(found, expected) < 1e-9


SPLIT = [
    ("ScheduleInterleavedZeroBubble", "zero_bubble"),
    ("ScheduleZBVZeroBubble", "zero_bubble_v"),
]
"""Those with backward in two halves."""


@pytest.mark.parametrize("shards", [False, True], ids=["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("theirs", "ours"), [("ScheduleInterleaved1F1B", "interleaved_1f1b"), SPLIT[0], V]
)
def test_halves_of_backward_lose_gradients_in_torchs_data_parallel_and_none_in_ours(
    run: Any, theirs: str, ours: str, shards: bool
) -> None:
    """Torch 2.13 (pytorch#144530): silently wrong wherever backward is in two halves, right where it is whole."""
    expected = alone(CASE).gradients[0]
    ranks = run(4, split_backward, theirs, ours, shards)
    torchs = _joined([rank[0] for rank in ranks])
    off = distance(torchs, {name: expected[name] for name in torchs})
    lost = torchs.keys() != expected.keys() or off > 0.1
    assert lost if (theirs, ours) in SPLIT else not lost and off < 1e-9
    assert all(distance(rank[1], expected) < 1e-9 for rank in ranks)


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: gradient for part in parts for name, gradient in part.items()}
