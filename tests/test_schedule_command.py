"""The command `stagebridge schedule`: text, JSON, picture, table, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge.cli import run

LAUNCH = (
    "--num-layers 16 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --vocab-size 100"
    " --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-4 --bf16"
)


@pytest.fixture
def launch(tmp_path: Path) -> str:
    """A launch with four pipeline ranks."""
    path = tmp_path / "launch.args"
    path.write_text(LAUNCH)
    return str(path)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    code = run(["schedule", *arguments])
    streams = capsys.readouterr()
    return code, streams.out, streams.err


def test_text(capsys: pytest.CaptureFixture[str], launch: str) -> None:
    code, out, _ = said(capsys, launch, "--world-size", "4")
    assert code == 0
    assert "1f1b: 4 ranks, 4 stages, 8 microbatches; bubble 27.3% of the time, at most 4 activations in flight" in out
    assert "rank 3  .  .  .  F0 B0 -- F1 B1 -- " in out


def test_json(capsys: pytest.CaptureFixture[str], launch: str) -> None:
    code, out, _ = said(capsys, launch, "--world-size", "4", "--json", "--microbatches", "4")
    found: dict[str, Any] = json.loads(out)
    assert (code, found["rows"][3]) == (0, ["3F0", "3B0", "3F1", "3B1", "3F2", "3B2", "3F3", "3B3"])
    assert found["bubble"] == pytest.approx(3 / 7) and found["in_flight"] == [4, 3, 2, 1]


def test_picture_and_table(capsys: pytest.CaptureFixture[str], launch: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, csv = tmp_path / "out.png", tmp_path / "out.csv"
    code, out, _ = said(capsys, launch, "--world-size", "4", "--png", str(png), "--csv", str(csv))
    assert code == 0 and f"wrote {png}" in out
    assert png.read_bytes().startswith(b"\x89PNG")
    assert csv.read_text().splitlines()[3].startswith("3F0,3B0,3F1")


def test_what_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str], launch: str) -> None:
    code, _, error = said(capsys, launch, "--world-size", "4", "--microbatches", "2")
    assert code == 1
    assert error == "error: batch.accumulation: 2 microbatches for 4 pipeline ranks; use at least 4, or fewer ranks\n"
