"""Outlines: published sizes, every layer and byte in its place, and the command that shows them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from bridge.cli import run as cli
from bridge.layout import outline
from bridge.layout.architecture import PRESETS, Architecture, Share
from bridge.layout.outline import Outline
from bridge.layout.shard import BYTES
from bridge.plan.plan import Plan

SHAPE = Architecture(layers=3, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=29, sequence=8)

# Parameters as the authors' released weights have them.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_shapes_have_their_published_size(name: str) -> None:
    assert PRESETS[name].size() == PUBLISHED[name]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_tensor_ranks_hold_every_element(ranks: int, kv_heads: int) -> None:
    shape = replace(SHAPE, kv_heads=kv_heads)
    stages = dict.fromkeys(shape.indices, 0)
    held = [
        {it.name: it for it in shape.parameters(stages, Share(ranks, index))}
        for index in range(ranks)
    ]
    elements = 0
    for name, first in held[0].items():
        split = first.split is not None
        elements += sum(prod(rank[name].shape) for rank in held) if split else prod(first.shape)
        assert split or all(rank[name].shape == first.shape for rank in held)
    assert elements == shape.size()


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4),
    st.booleans(),
)
def test_pipeline_ranks_hold_every_layer_once(
    data: int, pipeline: int, tensor: int, layers: int, tied: bool
) -> None:
    sizes = {
        "parallel.tensor": tensor,
        "parallel.pipeline": pipeline,
        "batch.accumulation": pipeline,
        "batch.micro": 1,
    }
    shape = replace(SHAPE, layers=layers, tied=tied)
    outline = Outline.of(Plan.of(sizes), shape, data * pipeline * tensor)
    held = sorted(
        layer
        for rank in range(pipeline)
        for stage in outline.local_stages(rank)
        for layer in outline.stages[stage]
    )
    assert held == list(shape.indices)
    copies = shape.vocab * shape.hidden if pipeline > 1 and tied else 0
    if tensor == 1:
        parameters = [outline.place(rank * data).layout.parameters for rank in range(pipeline)]
        assert sum(parameters) == shape.size() + copies


def test_stages_lie_where_the_schedule_puts_them() -> None:
    values = {
        "parallel.pipeline": 2,
        "schedule.virtual": 2,
        "stages.rule": "even",
        "batch.micro": 1,
        "batch.accumulation": 2,
    }
    outline = Outline.of(Plan.of(values), replace(SHAPE, layers=4), 2)
    layers = [
        [layer for stage in outline.local_stages(rank) for layer in outline.stages[stage]]
        for rank in range(2)
    ]
    assert layers == [[0, 1, 3], [2, 4, 5]]


# The command


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """A DeepSpeed config on disk, with `values` above a few settings."""

    def make(**values: Any) -> str:
        path = tmp_path / "ds.json"
        base = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 3,
            "bf16": {"enabled": True},
        }
        path.write_text(json.dumps({**base, **values}))
        return str(path)

    return make


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What the command says, as JSON."""
    assert cli(["layout", *arguments, "--json"]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_bytes_are_those_of_buffers_and_slices(
    write: Any, capsys: pytest.CaptureFixture[str], level: int
) -> None:
    said = shown(
        capsys, write(zero_optimization={"stage": level}), "--ranks", "4", "--model", "tiny"
    )
    (entry,) = said["ranks"]
    assert entry["ranks"] == [0, 1, 2, 3]
    for kind in ("weights", "gradients", "master", "moments"):
        buffers: dict[tuple[str, int, bool], int] = {}
        for flat in entry["flats"]:
            if part := flat.get(kind):
                key = (part["format"], part["buffer"], flat["tied"])
                buffers[key] = max(buffers.get(key, 0), part["bytes"])
                assert (
                    part["bytes"] == (flat["parameters"] + flat["padding"]) * BYTES[part["format"]]
                )
        assert entry["bytes"][kind] == sum(buffers.values()) + sum(
            flat["slices"][kind] for flat in entry["flats"]
        )
    assert entry["bytes"]["total"] == sum(
        entry["bytes"][kind] for kind in ("weights", "gradients", "master", "moments")
    )
    assert (
        sum(flat["parameters"] for flat in entry["flats"])
        == entry["parameters"]
        == said["model"]["parameters"]
    )


def test_sizes_come_from_the_preset_and_from_options(
    write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    said = shown(capsys, write(), "--model", "gpt2", "--layers", "2", "--untied", "--vocab", "100")
    assert (
        said["model"]["parameters"]
        == replace(PRESETS["gpt2"], layers=2, tied=False, vocab=100).size()
    )
    assert said["batch"] == {"micro": 2, "accumulation": 3, "tokens": 2048}
    said = shown(capsys, write(), "--model", "tiny", "--micro-batch", "5", "--heads", "8")
    assert said["batch"]["tokens"] == 5 * 64 and said["model"]["kv_heads"] == 8


def test_the_tables_are_for_people(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(zero_optimization={"stage": 3})
    assert cli(["layout", config, "--ranks", "8", "--model", "gpt2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "8 ranks: data 8"
    assert lines[1].startswith("124.4 M parameters: 12 layers, hidden 768")
    assert any(line.split()[:4] == ["block0", "to", "block11", "12"] for line in lines)
    assert any(line.split()[:2] == ["gather", "weights"] for line in lines)
    assert max(map(len, lines)) <= 120


LAUNCH = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1e-3 "
LAUNCH += "--micro-batch-size 1 --global-batch-size 8 --train-iters 20 "


def test_what_the_engine_does_not_run_is_laid_out_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Context ranks share the weights as data ranks do, and words that nobody counted are unknown."""
    config = tmp_path / "launch.args"
    config.write_text(LAUNCH + "--context-parallel-size 2 --use-distributed-optimizer")
    assert cli(["layout", str(config), "--ranks", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["model"]["unknown"] == ["embedding.tokens", "head.logits"]
        and found["model"]["vocab"] is None
    )
    assert {axis["axis"]: axis["size"] for axis in found["mesh"]["axes"]}["context"] == 2
    assert {flat["data_ranks"] for rank in found["ranks"] for flat in rank["flats"]} == {4}
    assert [note["path"] for note in found["findings"]].count("parallel.context") == 2


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_microbatches_that_are_not_followed_send_what_they_would(
    name: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is worked out for many microbatches is what following each of them finds."""
    virtual = 1 if name == "1f1b" else 2
    values = {
        "parallel.pipeline": 2,
        "schedule.name": name,
        "schedule.virtual": virtual,
        "zero.stage": stage,
    }
    plan = Plan.of({**values, "batch.micro": 1, "batch.accumulation": 66, "parallel.data": 2})
    shape = replace(SHAPE, layers=8)
    quick = Outline.of(plan, shape, 4)
    assert quick.periods > 0
    monkeypatch.setattr(outline, "FOLLOWED", 1000)
    slow = Outline.of(plan, shape, 4)
    assert slow.periods == 0
    assert all(quick.traffic(rank) == slow.traffic(rank) for rank in range(4))


@pytest.mark.parametrize(
    ("flags", "arguments", "message"),
    [
        ("", ["--model", "tinny"], "--model: found tinny, expected file or tiny"),
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
            ["--vocab", "64", "--ranks", "6"],
            "parallel: tensor (2) x pipeline (2) does not divide world size (6); use 8 ranks, or tensor=1",
        ),
        (
            "--tensor-model-parallel-size 4",
            ["--vocab", "64", "--heads", "2"],
            "parallel.tensor: 4 ranks do not divide heads (2)",
        ),
        (
            "",
            ["--vocab", "64", "--heads", "5"],
            "model.heads: 5 does not divide hidden (64); use a divisor",
        ),
    ],
)
def test_what_cannot_be_laid_out_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    arguments: list[str],
    message: str,
) -> None:
    path = tmp_path / "launch.args"
    path.write_text(LAUNCH + flags)
    assert cli(["layout", str(path), *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert cli(["layout", str(path), *arguments, "--json"]) == 1
    streams = capsys.readouterr()
    assert message.startswith("--model") or json.loads(streams.out)["exit_code"] == 1


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_a_level_that_keeps_more_than_a_lower_one_is_named(
    ranks: int, level: int, layers: int, width: int, tied: bool
) -> None:
    shape = replace(SHAPE, layers=layers, hidden=8 * width, tied=tied)

    def laid(stage: int) -> Outline:
        values = {
            "zero.stage": stage,
            "batch.micro": 1,
            "precision.compute": "bf16",
            "precision.master": "fp32",
        }
        return Outline.of(Plan.of(values), shape, ranks)

    kept = {stage: sum(laid(stage).bytes(0).values()) for stage in range(1, level + 1)}
    dearer = [stage for stage in range(1, level) if kept[stage] < kept[level]]
    found = laid(level).costly
    assert bool(found) == bool(dearer)
    assert (
        not dearer or f"use level {min(dearer, key=lambda stage: kept[stage])}" in found[0].message
    )
