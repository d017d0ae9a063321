"""Checkpoints: saved on one layout, resumed on another with the same next losses; killed saves harm nothing."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.errors import BridgeError, SourceError
from tests.engine.runs import (
    SHAPE,
    Case,
    largest_tensor,
    resume,
    resume_without_optimizer,
    save,
    save_until_killed,
)

ADAMW = {
    "precision.compute": "fp64",
    "optimizer.name": "adamw",
    "optimizer.lr": 0.01,
    "optimizer.eps": 1e-4,
    "optimizer.weight_decay": 0.1,
    "optimizer.schedule.name": "linear",
    "optimizer.schedule.total_steps": 6,
    "batch.micro": 2,
    "batch.global_": 8,
}
TENSOR = {"parallel.tensor": 2, "parallel.sequence": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "replicated": (2, {"zero.stage": 0}),
    "sharded": (2, {"zero.stage": 3, "zero.weight_buffers": 1}),
    "split": (2, TENSOR),
    "split and sharded": (4, {**TENSOR, "zero.stage": 3, "stages.layers_per_stage": 2}),
}


def case(name: str, **more: Any) -> tuple[int, Case]:
    """World size and case of a layout; dropout makes random numbers count."""
    world, values = LAYOUTS[name]
    return world, Case({**ADAMW, **values}, replace(SHAPE, dropout=0.2), **more)


@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_resumes_every_other(run: Any, tmp_path: Path, source: str) -> None:
    world, saving = case(source)
    expected = run(world, save, saving, tmp_path)[0]
    for target in LAYOUTS:
        world, loading = case(target)
        for losses, client, samples, _ in run(world, resume, loading, tmp_path):
            assert losses == pytest.approx(expected, rel=1e-9), target
            assert client == {"epoch": 3} and samples == 16


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_masters_and_loss_scale_survive(run: Any, tmp_path: Path, compute: str) -> None:
    values = {
        **ADAMW,
        "precision.compute": compute,
        "precision.loss_scale.window": 2,
        "zero.stage": 2,
    }
    found = Case({**values, "precision.loss_scale.initial": 256.0}, dtype=torch.float32)
    expected = run(2, save, found, tmp_path)[0]
    for losses, *_ in run(2, resume, found, tmp_path):
        assert losses == expected


def test_frozen_parameters_are_part_of_it(run: Any, tmp_path: Path) -> None:
    world, saving = case("sharded", frozen=("block0", "embedding"))
    expected = run(world, save, saving, tmp_path)[0]
    world, loading = case("replicated", frozen=("block0", "embedding"))
    for losses, *_ in run(world, resume, loading, tmp_path):
        assert losses == pytest.approx(expected, rel=1e-9)


def test_masters_of_frozen_parameters_survive_whole(run: Any, tmp_path: Path) -> None:
    values = {**ADAMW, "precision.compute": "bf16", "precision.frozen": "master"}
    saving, loading = (
        Case({**values, "zero.stage": level}, dtype=torch.float32, frozen=("block0",))
        for level in (3, 0)
    )
    run(2, save, saving, tmp_path)
    assert max(run(2, resume_without_optimizer, loading, tmp_path)) < 1e-6, (
        "bf16 would be off by a thousandth"
    )


def test_weights_alone_can_be_loaded(run: Any, tmp_path: Path) -> None:
    world, saving = case("sharded")
    run(world, save, saving, tmp_path)
    sgd = Case({**saving.plan, "optimizer.name": "sgd"}, saving.shape)
    with pytest.raises(
        Exception,
        match=r"exp_avg/block0.* \(and 101 more tensors\) is extra, .*load_optimizer_states=False",
    ):
        run(1, resume, Case({**sgd.plan, "parallel.data": 1}, sgd.shape), tmp_path)
    assert max(run(world, resume_without_optimizer, saving, tmp_path)) < 1e-12


def test_another_model_is_told_apart(run: Any, tmp_path: Path) -> None:
    _, found = case("one")
    run(1, save, found, tmp_path)
    with pytest.raises(BridgeError) as caught:
        run(1, resume, replace(found, shape=replace(found.shape, layers=4, ffn=32)), tmp_path)
    problems = "\n".join(caught.value.problems)
    assert "weights/block3.mlp.up.weight is missing" in problems
    assert (
        "weights/block0.mlp.up.weight has shape (24, 16), expected (32, 16); build the model that was saved"
        in problems
    )
    with pytest.raises(
        BridgeError,
        match=r"weights/block2.mlp.up.weight is extra, because the model has no such tensor",
    ):
        run(1, resume, replace(found, shape=replace(found.shape, layers=2)), tmp_path)


def test_no_rank_hands_out_more_than_it_owns(run: Any, tmp_path: Path) -> None:
    for largest, owned in run(2, largest_tensor, case("sharded")[1], tmp_path):
        assert largest <= owned


def test_what_is_not_there_is_said(run: Any, tmp_path: Path) -> None:
    _, found = case("one")
    with pytest.raises(
        SourceError,
        match="found no file 'latest', which would name a checkpoint; give a tag, or save first",
    ):
        run(1, resume, found, tmp_path)
    run(1, save, found, tmp_path)
    (tmp_path / "latest").write_text("step3")
    with pytest.raises(
        SourceError, match="found no checkpoint; correct the tag; did you mean step2"
    ):
        run(1, resume, found, tmp_path)


@pytest.mark.parametrize(
    "part",
    [
        "safetensors.torch.save_file",
        "bridge.checkpoint.folder_lock.write_text",
        "bridge.checkpoint.folder_lock.sync_folder",
    ],
)
def test_a_save_that_fails_leaves_the_one_before_and_nothing_else(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    _, found = case("one")
    expected = run(1, save, found, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(part, _full)
        with pytest.raises(BridgeError, match=r"No space left on device.*make room"):
            run(1, save, found, tmp_path)
    assert run(1, resume, found, tmp_path)[0][0] == pytest.approx(expected[0], rel=1e-12)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "latest", "step2"}


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device", "disk")


def test_a_save_killed_at_any_moment_leaves_one_that_loads(run: Any, tmp_path: Path) -> None:
    _, found = case("one")
    context = multiprocessing.get_context("spawn")
    for delay in (0.0, 0.013, 0.031):
        process = context.Process(target=save_until_killed, args=(tmp_path, found))
        process.start()
        seen = time.time()
        while not _newer(tmp_path / "latest", seen) and process.is_alive():
            time.sleep(0.05)
        time.sleep(delay)
        process.kill()
        process.join()
        *_, name = run(1, resume, found, tmp_path)[0]
        assert name.strip(".").startswith("turn")
    shutil.rmtree(tmp_path)


def _newer(path: Path, moment: float) -> bool:
    return path.exists() and path.stat().st_mtime > moment


def test_a_kill_between_the_two_renames_of_one_tag_falls_back(run: Any, tmp_path: Path) -> None:
    _, found = case("one")
    expected = run(1, save, found, tmp_path)[0]
    (tmp_path / "step2").rename(tmp_path / ".step2.old")
    assert run(1, resume, found, tmp_path)[0][0] == pytest.approx(expected, rel=1e-12)


def test_the_rest_of_the_state_is_readable(run: Any, tmp_path: Path) -> None:
    run(1, save, case("one")[1], tmp_path)
    state = json.loads((tmp_path / "step2" / "state.json").read_text())
    assert state["progress"]["steps"] == 2 and state["client"] == {"epoch": 3}
