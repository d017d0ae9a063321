"""Runs that move between stacks, under other names, in another layout and on other ranks: the next losses go on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from bridge.checkpoint import formats
from bridge.cli import run as command
from bridge.errors import SourceError
from tests.checkpoint import checkpoints
from tests.checkpoint.checkpoints import Task
from tests.engine.pool import Run

if find_spec("megatron") is None:
    pytest.skip("Megatron-Core is not installed", allow_module_level=True)

from tests.checkpoint import megatron_checkpoints
from tests.checkpoint.megatron_checkpoints import Launch

pytestmark = pytest.mark.usefixtures("foreign")
RISING: Mapping[str, Any] = {
    "warmup_num_steps": 8,
    "warmup_max_lr": 1e-2,
    "warmup_min_lr": 2e-3,
    "warmup_type": "linear",
}
"""As Megatron's scheduler of `megatron_checkpoints` has it, from the second step on."""


def converted(source: Path, to: str, output: Path, *more: str) -> str:
    """What `checkpoint convert` says; it may lose what its findings name."""
    with redirect_stdout(StringIO()) as out:
        code = command(["checkpoint", "convert", str(source), "--to", to, "-o", str(output), *more])
    assert code in (0, 2), out.getvalue()
    return out.getvalue()


def config_of(kind: str, folder: Path) -> Path:
    """The config.json of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints.config_for(kind).save_pretrained(folder)
    return folder / "config.json"


SIDES: Mapping[str, tuple[int, Any, tuple[str, ...], int, Mapping[str, int]]] = {
    "deepspeed": (2, checkpoints.deepspeed, ("--level", "2", "--ranks", "2"), 1, {"pipeline": 2}),
    "native": (1, checkpoints.native, (), 0, {}),
    "dcp": (2, checkpoints.fsdp, (), 1, {"tensor": 2}),
}
"""For each format the ranks and the stack that go on from it, how it is written, and on what Megatron-Core goes on again."""
MOVES = [(kind, to) for kind in ("llama", "gpt2") for to in SIDES]
ALL = bool(os.environ.get("STAGEBRIDGE_ALL_LAYOUTS"))
TRIED = MOVES if ALL else [("gpt2", "deepspeed")]


@pytest.mark.parametrize(("kind", "to"), TRIED)
def test_a_run_moves_from_megatron_and_back(run: Run, tmp_path: Path, kind: str, to: str) -> None:
    """Five steps on Megatron-Core on two tensor ranks, five on another stack, five on Megatron again; beside fifteen."""
    config = str(config_of(kind, tmp_path / "model"))
    launch = Launch(kind, {"tensor": 2}, last=5, save=tmp_path / "one")
    unbroken = run(2, megatron_checkpoints.megatron, replace(launch, last=15, save=None))[0]
    assert run(2, megatron_checkpoints.megatron, launch)[0].tolist() == unbroken[:5].tolist()
    ranks, trained, options, zero, parallel = SIDES[to]
    converted(tmp_path / "one", to, tmp_path / "two", "--names", "huggingface", *options)
    task = Task(
        kind,
        level=2,
        first=5,
        last=10,
        matrices=True,
        warmup=RISING,
        load=tmp_path / "two",
        save=tmp_path / "three",
    )
    assert run(ranks, trained, task)[0] == pytest.approx(unbroken[5:10], abs=1e-6)
    again = ("--config", config, "--level", str(zero), "--samples", "40")
    converted(tmp_path / "three", "megatron", tmp_path / "four", *again)
    last = replace(
        launch, parallel=parallel, zero=zero, first=10, last=15, load=tmp_path / "four", save=None
    )
    assert run(2, megatron_checkpoints.megatron, last)[0] == pytest.approx(unbroken[10:], abs=1e-6)


PROVED = {
    "native": Launch("gpt2", {"tensor": 2}, precision="fp16"),
    "deepspeed": Launch("llama", precision="fp16"),
    "megatron": Launch("llama", {"pipeline": 2}, precision="bf16"),
}


@pytest.mark.parametrize("to", list(PROVED) if ALL else ["native"])
def test_a_run_that_megatron_saved_goes_on_elsewhere_with_its_loss_scale(
    run: Run, tmp_path: Path, to: str
) -> None:
    """Losses, norms, rates and scales of both sides, over steps in which the scale doubles and overflows."""
    launch = replace(PROVED[to], last=5, save=tmp_path / "run")
    run(2, megatron_checkpoints.megatron, launch)
    config_of(launch.kind, tmp_path / "model")
    (tmp_path / "launch.args").write_text(megatron_checkpoints.flags_of(launch, 2))
    words = [
        "move",
        str(tmp_path / "launch.args"),
        "--checkpoint",
        str(tmp_path / "run"),
        "--to",
        to,
        "--world-size",
        "2",
    ]
    more = ["-o", str(tmp_path / "out"), "--model", str(tmp_path / "model"), "--prove", "4"]
    with redirect_stdout(StringIO()) as out:
        command(words + more)
    proof = json.loads((tmp_path / "out" / "proof.json").read_text())
    scales = [row["loss_scale"] for row in proof["runs"]]
    assert proof["verdict"] == "same" and [row["first"] for row in proof["runs"]] == [5, 5], (
        out.getvalue()
    )
    assert scales[0] == scales[1] and (len(set(scales[0])) > 1) == (launch.precision == "fp16")


@pytest.mark.parametrize("kind", ["llama", "gpt2"] if ALL else ["gpt2"])
def test_buckets_of_the_distributed_optimizer_hold_what_tensors_do(
    run: Run, tmp_path: Path, kind: str
) -> None:
    """Saved as its own buckets, and put together by Megatron itself: the same masters and moments."""
    launch = Launch(kind, {"tensor": 2}, last=2)
    for sharding in ("dp_reshardable", "fully_reshardable"):
        run(
            2,
            megatron_checkpoints.megatron,
            replace(launch, sharding=sharding, save=tmp_path / sharding),
        )
    with redirect_stdout(StringIO()) as out:
        assert (
            command(
                [
                    "checkpoint",
                    "diff",
                    *(str(tmp_path / name) for name in ("dp_reshardable", "fully_reshardable")),
                ]
            )
            == 0
        )
    assert "equal" in out.getvalue()


def test_masters_that_megatron_lost_are_told(run: Run, tmp_path: Path) -> None:
    """Where stages share words, Megatron-Core 0.16.1 writes zeros as fully reshardable; its own buckets are whole."""
    launch = Launch("tied", {"pipeline": 2}, last=1, precision="bf16")
    run(2, megatron_checkpoints.megatron, replace(launch, save=tmp_path / "full"))
    run(
        2,
        megatron_checkpoints.megatron,
        replace(launch, save=tmp_path / "own", sharding="dp_reshardable"),
    )
    lost = [
        finding.message
        for finding in formats.read_checkpoint(tmp_path / "full").findings
        if finding.path == "masters"
    ]
    assert lost and "decoder.final_layernorm.weight" in lost[-1]
    assert not [
        finding
        for finding in formats.read_checkpoint(tmp_path / "own").findings
        if finding.path == "masters"
    ]


BY_RANK = {
    "stages that share words": Launch("tied", {"pipeline": 2}, zero=0, last=2, precision="bf16"),
    "tensor ranks": Launch("llama", {"tensor": 2}, zero=0, last=2),
}


@pytest.mark.parametrize("launch", list(BY_RANK.values())[: 2 if ALL else 1])
def test_files_by_rank_hold_what_one_checkpoint_does(
    run: Run, tmp_path: Path, launch: Launch
) -> None:
    """Saved by each rank for itself, and by all together."""
    for form in ("torch", "torch_dist"):
        run(2, megatron_checkpoints.megatron, replace(launch, form=form, save=tmp_path / form))
        converted(tmp_path / form, "native", tmp_path / f"{form} neutral", "--names", "neutral")
    with redirect_stdout(StringIO()) as out:
        code = command(
            [
                "checkpoint",
                "diff",
                *(str(tmp_path / f"{form} neutral") for form in ("torch", "torch_dist")),
            ]
        )
    assert code == 0, out.getvalue()
    (path, *_) = sorted((tmp_path / "torch" / "iter_0000002").glob("*/model_optim_rng.pt"))
    path.unlink()
    with pytest.raises(
        SourceError, match=r"no file of tensor rank 0 of stage 0|model_optim_rng.pt"
    ):
        formats.read_checkpoint(tmp_path / "torch")
