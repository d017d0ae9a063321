"""The command `stagebridge schedule`: text, JSON, picture, table, and refusals."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bridge.cli import run
from bridge.layout.schedule import ScheduleShape, generate_schedule, make_timeline
from bridge.report.pictures.schedule import BARE, NUMBERED, UNITS, draw_picture, picture_lines
from bridge.report.pictures.schedule_rows import find_repeats

pytestmark = pytest.mark.once

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
    assert (
        "1f1b: 4 ranks, 4 stages, 8 microbatches; bubble 27.3% of the time, at most 4 activations in flight"
        in out
    )
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


@pytest.mark.parametrize(
    ("option", "name"), [("--csv", "mine.csv"), ("--csv", "a.json"), ("--plot", "mine.svg")]
)
def test_a_file_of_another_kind_is_kept(
    capsys: pytest.CaptureFixture[str], launch: str, tmp_path: Path, option: str, name: str
) -> None:
    if option == "--plot":
        pytest.importorskip("matplotlib")
    path = tmp_path / name
    path.write_text("0F0,1\n")
    code, _, error = said(capsys, launch, "--world-size", "4", option, str(path))
    assert (
        code == 1
        and f"{path}: found a file that is not a" in error
        and path.read_text() == "0F0,1\n"
    )
    path.unlink()
    for _ in "again":
        assert said(capsys, launch, "--world-size", "4", option, str(path))[0] == 0


PICTURES = {".svg": b"<?xml", ".pdf": b"%PDF", ".html": b"<!doctype html>", ".PNG": b"\x89PNG"}


@pytest.mark.parametrize(("ending", "begins"), PICTURES.items())
def test_a_picture_is_what_its_ending_says(
    capsys: pytest.CaptureFixture[str], launch: str, tmp_path: Path, ending: str, begins: bytes
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"out{ending}"
    assert said(capsys, launch, "--world-size", "4", "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(begins)
    if ending != ".PNG":
        return
    wide = int.from_bytes(path.read_bytes()[16:20], "big")
    said(capsys, launch, "--world-size", "4", "--microbatches", "512", "--plot", str(path))
    assert wide == int.from_bytes(path.read_bytes()[16:20], "big") <= 1400, (
        "a page wide at any length"
    )


def test_another_ending_is_refused(
    capsys: pytest.CaptureFixture[str], launch: str, tmp_path: Path
) -> None:
    for name in ("out.jpg", "out"):
        code, _, error = said(capsys, launch, "--world-size", "4", "--plot", str(tmp_path / name))
        assert (
            code == 1
            and "expected a picture .png, .svg, .pdf, .html" in error
            and not (tmp_path / name).exists()
        )


SHAPES = [
    ScheduleShape(4, 4, 8),
    ScheduleShape(4, 8, 16),
    ScheduleShape(4, 8, 512),
    ScheduleShape(8, 16, 64),
    ScheduleShape(64, 64, 512),
    ScheduleShape(64, 128, 512),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_unit_of_time_is_in_a_picture_once(shape: ScheduleShape) -> None:
    """Or stands for as many as are said."""
    found = make_timeline(
        generate_schedule("interleaved_1f1b" if shape.stages > shape.ranks else "1f1b", shape)
    )
    drawn = picture_lines(found)
    assert max(line[-1].end for line in drawn) <= (UNITS if shape.ranks <= NUMBERED else BARE)
    assert len(drawn) < 10
    times, seen = 1, 0
    for piece in (piece for line in drawn for piece in line):
        if piece.said != "continued":
            times = int(piece.said.split()[0]) if piece.said else 1
        seen += times * (piece.stop - piece.start)
    assert seen == round(found.length)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pieces_of_a_line_lie_apart_where_time_jumps_and_their_texts_never_meet(
    shape: ScheduleShape,
) -> None:
    for line in picture_lines(
        make_timeline(
            generate_schedule("interleaved_1f1b" if shape.stages > shape.ranks else "1f1b", shape)
        )
    ):
        assert sum(bool(piece.said) for piece in line) <= 1
        for before, after in pairwise(line):
            assert (before.stop == after.start) == (
                before.end == after.at
            ) and before.end <= after.at


@pytest.mark.parametrize("count", [18, 25, 40])
def test_lines_of_a_picture_are_of_one_length(count: int) -> None:
    """A last line of a few units would leave most of its row empty."""
    drawn = picture_lines(make_timeline(generate_schedule("1f1b", ScheduleShape(8, 8, count))))
    lengths = [line[-1].end for line in drawn]
    assert len(drawn) > 1 and max(lengths) - min(lengths) < len(drawn)


def test_a_picture_of_many_ranks_has_no_object_for_each_action_and_is_no_taller_than_a_few_pages(
    tmp_path: Path,
) -> None:
    """An object for each took eight seconds at 64 ranks and 512 microbatches, and three metres of paper."""
    pytest.importorskip("matplotlib")
    draw_picture(
        make_timeline(generate_schedule("1f1b", ScheduleShape(64, 64, 512))), tmp_path / "many.svg"
    )
    text = (tmp_path / "many.svg").read_text()
    assert text.count("<path") < 500
    assert float(re.search(r'height="([\d.]+)pt"', text)[1]) < 72 * 15  # type: ignore[index]


def test_what_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str], launch: str) -> None:
    code, _, error = said(capsys, launch, "--world-size", "4", "--microbatches", "1000000000")
    assert code == 1
    assert error.startswith(
        "error: batch.accumulation: found 1,000,000,000 microbatches through 4 stages, expected at most"
    )


def test_fewer_microbatches_than_ranks_are_shown(
    capsys: pytest.CaptureFixture[str], launch: str
) -> None:
    """Megatron runs 1F1B on them as well (schedules.py, forward_backward_pipelining_without_interleaving)."""
    code, out, _ = said(capsys, launch, "--world-size", "4", "--json", "--microbatches", "2")
    assert code == 0 and json.loads(out)["rows"][0] == ["0F0", "0F1", "0B0", "0B1"]


def test_text_shows_what_repeats_once(capsys: pytest.CaptureFixture[str], launch: str) -> None:
    """The warmup, one round of the steady state with its count, and the cooldown; every unit of time is in one of them."""
    code, out, _ = said(capsys, launch, "--world-size", "4", "--microbatches", "512")
    assert code == 0 and len(out.splitlines()) < 40 and max(map(len, out.splitlines())) < 700
    times = int(re.search(r"(\d+) times, each time with the next microbatch:", out)[1])  # type: ignore[index]
    assert 500 <= times <= 512
    found = make_timeline(generate_schedule("interleaved_1f1b", ScheduleShape(4, 8, 512)))
    parts = find_repeats(found)
    assert sum(part.times * (part.stop - part.start) for part in parts) == round(found.length)
    assert (
        max(part.times * part.further for part in parts) >= 480
        and sum(part.stop - part.start for part in parts) < 150
    )
