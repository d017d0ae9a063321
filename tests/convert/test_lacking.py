"""A file that was copied without the part beside it: wherever its sizes then fail, that is named, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.cli import run
from bridge.cli.demo import launch_text

pytestmark = pytest.mark.once

NAMED = "ds.code.json: not found; if ds.json was copied, copy ds.code.json too"
Said = Callable[[str], str]


@pytest.fixture
def said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Said:
    """The errors of a command in a folder with a converted file that lies there alone."""
    monkeypatch.chdir(tmp_path)
    Path("launch.args").write_text(launch_text())
    Path("there").mkdir()
    assert (
        run(
            [
                "convert",
                "launch.args",
                "--to",
                "deepspeed",
                "--world-size",
                "8",
                "-o",
                "there/ds.json",
            ]
        )
        == 0
    )
    Path("ds.json").write_bytes(Path("there/ds.json").read_bytes())
    capsys.readouterr()

    def call(command: str) -> str:
        run(command.split())
        return capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    "command",
    [
        "check ds.json --world-size 3",
        "convert ds.json --to megatron --world-size 3",
        "layout ds.json --ranks 8 --model gpt2",
        "schedule ds.json --world-size 3",
        "check . --world-size 3",
    ],
)
def test_it_is_named_where_sizes_do_not_divide(command: str, said: Said) -> None:
    assert NAMED in said(command)


def test_where_sizes_divide_the_problem_itself_names_it(said: Said) -> None:
    errors = said("check ds.json --world-size 8")
    assert "put the missing .code.json" in errors and NAMED not in errors


@pytest.mark.parametrize(
    "command",
    [
        "check there/ds.json --world-size 3",
        "check ds.json --world-size 3 --code pipeline_stages=2",
        "check other.json",
        "check more.json --world-size 3",
        "check uneven.json --world-size 8",
        "check launch.args --world-size 3",
    ],
)
def test_it_is_not_named_where_it_lies_there_or_is_no_cause(
    command: str, said: Said, tmp_path: Path
) -> None:
    Path("other.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 9}})
    )
    keys = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    Path("more.json").write_text(json.dumps({**keys, "train_batch_size": 32}))  # of 8 ranks
    Path("uneven.json").write_text(json.dumps({**keys, "train_batch_size": 30}))
    errors = said(command)
    assert "error: " in errors and ".code.json: not found" not in errors
