"""States of a run, held against the tensors of real DeepSpeed on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bridge
import compat
from bridge.layout.architecture import Architecture, Share
from bridge.layout.memory.estimate import Estimator
from bridge.layout.memory.states import Rank, state_terms
from bridge.layout.memory.terms import sum_by_kind

pytest.importorskip("deepspeed")

PROGRAM = "tests.layout.count_deepspeed"
HOME = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["bf16", "fp32"])
def counted(request: Any, tmp_path_factory: Any) -> tuple[str, dict[str, Any]]:
    """Bytes of the first rank's tensors, by ZeRO stage."""
    meeting = tmp_path_factory.mktemp("meeting") / "file"
    environment = {
        **os.environ, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29755", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(rank), str(meeting), request.param],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=HOME,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), said[0][1]
    return request.param, json.loads(said[0][0].splitlines()[-1])


@pytest.mark.parametrize("stage", range(4))
def test_states_are_those_of_deepspeed(counted: tuple[str, dict[str, Any]], stage: int) -> None:
    dtype, rows = counted
    row = rows[str(stage)]
    dialect = compat.load("deepspeed")
    config = dialect.read(
        {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
            **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
        },
        None,
        2,
    )
    model = bridge.lift(compat.load("huggingface").read(rows["config"])).model
    shape, rules = Architecture.of(model), dialect.memory_rules(config)
    plan = Estimator.of(bridge.lift(config), shape, 2, rules).plan
    parameters = shape.parameters(dict.fromkeys(shape.indices, 0), Share())
    sizes = sum_by_kind(state_terms(plan, Rank(parameters, 1, 2), rules))
    kinds = ["weights", "master", "moments"]
    assert [sizes.get(kind, 0) for kind in kinds] == [row[kind] for kind in kinds]
    if stage in (0, 3):
        assert sizes["gradients"] == row["gradients"] + row["written"]
