"""Plain torch, DistributedDataParallel and DeepSpeed, watched from outside, log what the engine logs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bridge.errors import BridgeError
from bridge.plan.plan import Debug
from bridge.trace import attach
from bridge.trace.retention import Keep
from bridge.trace.run import TracedRun
from bridge.trace.run_comparison import compare_runs
from tests.engine.runs import SHAPE, Case
from tests.trace.traces import traced, traced_deepspeed, traced_megatron, traced_module

pytestmark = pytest.mark.usefixtures("foreign")
Ranks = Callable[..., list[Any]]

LOGS = ("layer_outputs", "layer_gradients", "param_init", "all_param_gradients", "param_update")
SGD = {
    "precision.compute": "fp32",
    "optimizer.name": "sgd",
    "optimizer.lr": 0.1,
    "batch.micro": 4,
    "batch.accumulation": 2,
    **{f"debug.{name}": 9 for name in LOGS},
}
ADAMW = {
    **SGD,
    "optimizer.name": "adamw",
    "optimizer.lr": 1e-3,
    "optimizer.eps": 1e-3,
    "optimizer.weight_decay": 0.0,
}
TWO = {"batch.micro": 2, "debug.tensor_parallel": True}


def case(plan: dict[str, Any], **more: Any) -> Case:
    return Case({**plan, **more}, dtype=torch.float32)


@pytest.fixture(scope="module")
def natives(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, TracedRun]:
    """The engine's own logs on one rank, with SGD and with AdamW."""
    folder = tmp_path_factory.mktemp("native")
    for adam, plan in ((False, SGD), (True, ADAMW)):
        traced(0, 1, case(plan), folder / str(adam))
    return {adam: TracedRun.read(folder / str(adam)) for adam in (False, True)}


def assert_equal(found: TracedRun, native: TracedRun) -> None:
    """Every tensor that the engine logs is there, and equal up to rounding."""
    comparison = compare_runs(found, native)
    assert [(str(line.name), line.verdict, line.cause) for line in comparison.faults] == []
    assert found.steps == native.steps == (0, 1, 2, 3)
    seen = {
        line.name for line in comparison.lines if line.name.kind not in ("input", "state", "buffer")
    }
    logged = {entry.name for step in native.steps for entry in native.entries(step)}
    assert seen == {name for name in logged if name.kind not in ("input", "state", "buffer")}
    assert {line.verdict for line in comparison.lines} <= {"equal", "rounding", "unseen"}
    assert {line.name.kind for line in comparison.lines if line.verdict == "unseen"} <= {
        "input",
        "state",
        "buffer",
    }


@pytest.mark.parametrize("world", [1, 2])
def test_plain_torch(
    world: int, run: Ranks, natives: dict[bool, TracedRun], tmp_path: Path
) -> None:
    run(world, traced_module, case(SGD, **(TWO if world == 2 else {})), tmp_path)
    assert_equal(TracedRun.read(tmp_path), natives[False])


@pytest.mark.parametrize("odd", [None, 0, 1])
def test_one_copy_of_what_ranks_hold_alike(
    odd: int | None, run: Ranks, natives: dict[bool, TracedRun], tmp_path: Path
) -> None:
    """What they do not hold alike is logged by each, and located on the rank that has it."""
    run(2, traced_module, case(SGD, **TWO), tmp_path, Keep(once=True), odd)
    found = TracedRun.read(tmp_path)
    weights = [
        entry
        for step in found.steps
        for entry in found.entries(step)
        if entry.name.kind in ("weight", "gradient")
    ]
    twice = {str(entry.name) for entry in weights if entry.replicas}
    if odd is None:
        assert weights and not twice
        assert_equal(found, natives[False])
        return
    parted = compare_runs(found, natives[False], every=False).divergence
    assert parted is not None
    assert (str(parted.name), parted.ranks) == ("2/update/block1/weight/norm1.weight", (odd,))
    assert {name for name in twice if name.startswith("2/update/")} == {str(parted.name)}


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(
    ("level", "adam"), [(0, False), (1, False), (2, False), (3, False), (2, True)]
)
def test_deepspeed(
    level: int, adam: bool, run: Ranks, natives: dict[bool, TracedRun], tmp_path: Path
) -> None:
    run(2, traced_deepspeed, case(ADAMW if adam else SGD, **TWO), tmp_path, level, adam)
    assert_equal(TracedRun.read(tmp_path), natives[adam])
    assert TracedRun.read(tmp_path).about["engine"] == "DeepSpeedEngine"


SPLIT: dict[str, tuple[bool, dict[str, Any]]] = {
    "tensor": (False, {"parallel.tensor": 2}),
    "tensor and sequence": (True, {"parallel.tensor": 2, "parallel.sequence": True}),
    "distributed optimizer": (True, {"zero.stage": 1, "batch.micro": 2}),
}
"""Whether with AdamW, and what Megatron-Core is asked for on two ranks."""


@pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-Core is not installed")
@pytest.mark.parametrize("layout", SPLIT)
def test_megatron(layout: str, run: Ranks, natives: dict[bool, TracedRun], tmp_path: Path) -> None:
    adam, more = SPLIT[layout]
    run(
        2,
        traced_megatron,
        case(ADAMW if adam else SGD, **more, **{"debug.tensor_parallel": True}),
        tmp_path,
    )
    assert_equal(TracedRun.read(tmp_path), natives[adam])
    assert TracedRun.read(tmp_path).about["engine"] == "Megatron-Core"


@pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-Core is not installed")
def test_megatron_pipeline(run: Ranks, tmp_path: Path) -> None:
    deep = replace(case(SGD), shape=replace(SHAPE, layers=4))
    traced(0, 1, deep, tmp_path / "native")
    virtual = {"parallel.pipeline": 2, "schedule.name": "interleaved_1f1b", "schedule.virtual": 2}
    watched = {**deep.plan, **virtual, "debug.tensor_parallel": True}
    assert run(2, traced_megatron, replace(deep, plan=watched), tmp_path / "megatron") == [[], []]
    assert_equal(TracedRun.read(tmp_path / "megatron"), TracedRun.read(tmp_path / "native"))


@pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-Core is not installed")
def test_a_changed_copy_in_megatron_is_named(run: Ranks, tmp_path: Path) -> None:
    plan = {
        **{name: value for name, value in SGD.items() if "debug" not in name},
        "debug.tensor_parallel": True,
    }
    for problems in run(2, traced_megatron, case(plan, **{"parallel.tensor": 2}), tmp_path, 1):
        assert problems[0].startswith(
            "desync: 2/backward/head/microbatch 0/input gradient: ranks 0, 1 disagree"
        ), problems


def test_a_module_needs_its_optimizer() -> None:
    with pytest.raises(BridgeError, match="attach: found a module and no optimizer"):
        attach(nn.Linear(2, 2), Debug(layer_outputs=1))


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_the_loss_of_deepspeed_is_not_clipped(run: Ranks, tmp_path: Path) -> None:
    """Clipping multiplies gradients alone, and the native engine gives every rank the mean loss."""
    clipped = case(SGD, **TWO, **{"optimizer.clip": 0.01})
    run(2, traced_deepspeed, clipped, tmp_path / "deepspeed", 1, False)
    run(2, traced, clipped, tmp_path / "native")
    runs = [TracedRun.read(tmp_path / name) for name in ("deepspeed", "native")]
    assert compare_runs(*runs, every=True).divergence is None
