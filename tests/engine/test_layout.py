"""What `stagebridge layout` says of a run is what a live engine holds and sends, to the byte."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bridge.cli import run as cli
from bridge.layout.architecture import Architecture
from bridge.layout.outline import Outline
from bridge.plan.plan import Plan
from tests.engine.counts import live
from tests.engine.runs import SHAPE

PLAIN = {"batch.micro": 2, "optimizer.lr": 0.01}
SHAPES = {
    "tied, grouped": replace(SHAPE, vocab=257, sequence=8),
    "one key head, gated, rms, learned positions": replace(
        SHAPE,
        vocab=256,
        sequence=8,
        kv_heads=1,
        gated=True,
        norm="rms",
        rotary=False,
        bias=False,
        tied=False,
    ),
}
BF16 = {"precision.compute": "bf16"}
NARROW = {"precision.communicate": "bf16"}
SPLIT = {"parallel.pipeline": 2, "parallel.tensor": 2, "batch.accumulation": 2}
CASES: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"zero.stage": 3, "batch.accumulation": 2}),
    (2, {**BF16, "zero.stage": 0}),
    (2, {**BF16, "zero.stage": 3, "batch.accumulation": 6, "recompute.granularity": "full"}),
    (2, {"zero.stage": 2, "stages.layers_per_stage": 1.5}),
    (
        2,
        {
            "zero.stage": 1,
            "zero.grad_buffers": 1,
            "stages.rule": "parameters",
            "stages.layers_per_stage": 2,
        },
    ),
    (2, {"parallel.tensor": 2, "stages.rule": "parameters", "stages.layers_per_stage": 2}),
    (
        4,
        {
            **BF16,
            "parallel.tensor": 2,
            "parallel.sequence": True,
            "zero.stage": 3,
            "batch.accumulation": 2,
        },
    ),
    (
        4,
        {
            "parallel.tensor": 2,
            "parallel.sequence": True,
            "parallel.order": "data-tensor",
            "recompute.ratio": 0.5,
        },
    ),
    (
        4,
        {
            "parallel.tensor": 4,
            "zero.stage": 2,
            "recompute.granularity": "full",
            "recompute.method": "block",
        },
    ),
    (4, {"parallel.tensor": 4, "parallel.sequence": True, "optimizer.name": "sgd"}),
    (1, {"batch.accumulation": 3, "schedule.breadth_first": 3, "recompute.ratio": 0.5}),
    (2, {"parallel.pipeline": 2, "batch.accumulation": 3}),
    (
        2,
        {
            **BF16,
            "parallel.pipeline": 2,
            "batch.accumulation": 2,
            "schedule.name": "interleaved_1f1b",
            "zero.stage": 3,
        },
    ),
    (
        2,
        {
            "parallel.pipeline": 2,
            "batch.accumulation": 4,
            "schedule.name": "zero_bubble_v",
            "stages.rule": "parameters",
        },
    ),
    (
        4,
        {
            **BF16,
            "parallel.pipeline": 2,
            "batch.accumulation": 4,
            "zero.stage": 3,
            "stages.layers_per_stage": 3,
        },
    ),
    (
        4,
        {
            **BF16,
            "parallel.pipeline": 2,
            "batch.accumulation": 3,
            "zero.stage": 2,
            "schedule.name": "gpipe",
        },
    ),
    (
        4,
        {
            **SPLIT,
            "parallel.sequence": True,
            "schedule.name": "pre_recompute_1f1b",
            "recompute.granularity": "full",
        },
    ),
    (4, {**SPLIT, "schedule.name": "last_no_recompute_1f1b", "recompute.granularity": "full"}),
    (
        4,
        {
            "parallel.pipeline": 4,
            "batch.accumulation": 5,
            "schedule.name": "shifted_critical_path",
            "recompute.ratio": 0.7,
        },
    ),
    (2, {**BF16, **NARROW, "zero.stage": 3, "batch.accumulation": 3}),
    (2, {**BF16, **NARROW, "zero.stage": 0}),
    (4, {**NARROW, "parallel.pipeline": 2, "batch.accumulation": 2, "zero.stage": 2}),
    (4, {"precision.communicate": "fp64", "parallel.tensor": 2, "zero.stage": 1}),
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("world", "values"), CASES)
def test_an_outline_is_what_every_rank_holds_and_sends(
    run: Any, shape: str, world: int, values: dict[str, Any]
) -> None:
    plan = {**PLAIN, **values}
    outline = Outline.of(Plan.of(plan), SHAPES[shape], world)
    for rank, found in enumerate(run(world, live, plan, SHAPES[shape])):
        place = outline.place(rank)
        assert found.layout == place.layout
        assert sorted(found.sites, key=str) == sorted(place.sites, key=str)
        assert found.bytes == outline.bytes(rank)
        assert found.traffic == outline.traffic(rank)


FLAGS = "--num-layers 3 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 24 --seq-length 8 --max-position-embeddings 8 "
FLAGS += "--micro-batch-size 2 --lr 1e-2 --train-iters 20 "
LAUNCHES = {
    "data": (2, "--global-batch-size 8 --bf16 --use-distributed-optimizer"),
    "tensor": (2, "--global-batch-size 4 --tensor-model-parallel-size 2 --sequence-parallel"),
    "both": (
        4,
        "--global-batch-size 16 --bf16 --tensor-model-parallel-size 2 --use-distributed-optimizer",
    ),
    "pipeline": (2, "--global-batch-size 4 --bf16 --pipeline-model-parallel-size 2 --num-layers 4"),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_command_prints_what_a_live_engine_counts(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    import compat
    from bridge.translation.lift import lift

    world, flags = LAUNCHES[name]
    path = tmp_path / "launch.args"
    path.write_text(FLAGS + flags)
    assert cli(["layout", str(path), "--ranks", str(world), "--vocab", "257", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    plan = lift(compat.load("megatron").read(path, world_size=world))
    shape = Architecture.of(plan.model.model_copy(update={"vocab": 257}))
    for rank, found in enumerate(run(world, live, dict(plan.values()), shape)):
        (entry,) = (entry for entry in said["ranks"] if rank in entry["ranks"])
        assert entry["bytes"] == {**found.bytes, "total": sum(found.bytes.values())}
        calls = {call["name"]: (call["count"], call["bytes"]) for call in entry["collectives"]}
        assert calls == {name: (total.count, total.bytes) for name, total in found.traffic.items()}
        assert entry["parameters"] == found.layout.parameters
