"""The demo as a user runs it: it converts, trains on two ranks, saves, and resumes with the same losses."""

from __future__ import annotations

import re
import subprocess
import sys
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest

from bridge.cli.demo import training
from bridge.errors import BridgeError
from bridge.verify import local


def test_the_demo_trains_and_resumes(planted: Path) -> None:
    command = [sys.executable, "-P", "-m", "stagebridge", "demo", "-o", "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=planted, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "Training the plan on 2 local ranks (data 1 x tensor 2)" in done.stdout
    assert sum(line.startswith("  step ") for line in lines) == training.STEPS + 2 * training.MORE
    assert "gave the same losses" in done.stdout
    steps = [
        [float(word) for word in re.findall(r"(?:loss|grad norm) ([\d.]+) ", line)]
        for line in lines
        if "grad norm" in line
    ]
    losses, norms = zip(*steps[: training.STEPS + training.MORE], strict=True)
    assert all(later < 1.03 * loss for loss, later in pairwise(losses)), "the loss falls steadily"
    assert max(norms[1:]) <= norms[0], "no gradient jumps"
    assert lines[-1].startswith("Train yourself: stagebridge train")
    assert (planted / "out" / "run" / "latest").read_text() == f"step{training.STEPS}"


def test_a_rank_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(
        BridgeError, match=r"rank [01] ended with code 1: .*ValueError: invalid literal for int"
    ):
        list(
            local.run_ranks(
                2, "bridge.cli.demo.rank", "{}", str(tmp_path), "x", "1", "[null, null]"
            )
        )


def test_the_last_words_of_a_rank_are_its_own() -> None:
    said = 'ValueError: its own\nnanobind: leaked 2 functions!\n - leaked function "f"\n'
    assert local._last_line(StringIO(said)) == "ValueError: its own"
