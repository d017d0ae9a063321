"""Ranks that have the same error to say: one says it, whoever launched them; each that has another one says that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

RANK = """
import sys
from bridge.cli import under_launcher as launched
launched.LINGER, launched.PATIENCE = 1.5, 0.2
with launched.once([sys.argv[1]]) as mine:
    print("said" if mine else "quiet", flush=True)
sys.exit(launched.code(mine))
"""


def ranks(
    *problems: str, folder: Path, world: str = "", first: int = 0, **more: str
) -> list[tuple[str, int]]:
    """What a rank for each of the problems does, all of one parent: whether it speaks, and its exit code."""
    started = []
    for rank, problem in enumerate(problems, first):
        said = {
            "RANK": str(rank),
            "WORLD_SIZE": world or str(len(problems)),
            "TMPDIR": str(folder),
            **more,
        }
        if more:
            place = folder / "attempt_0" / str(rank) / "error.json"
            place.parent.mkdir(parents=True)
            said["TORCHELASTIC_ERROR_FILE"] = str(place)
        words = [sys.executable, "-c", RANK, problem]
        started.append(
            subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, **said})
        )
    return [(process.communicate(timeout=60)[0].strip(), process.returncode) for process in started]


def test_one_speaks_for_all_and_all_end_alike(tmp_path: Path) -> None:
    assert sorted(ranks("x: wrong", "x: wrong", "x: wrong", folder=tmp_path)) == [
        ("quiet", 1),
        ("quiet", 1),
        ("said", 1),
    ]


def test_a_rank_that_is_late_is_quiet_too(tmp_path: Path) -> None:
    assert ranks("x: wrong", folder=tmp_path, world="2") == [("said", 1)]
    assert ranks("x: wrong", folder=tmp_path, world="2", first=1) == [("quiet", 1)]


def test_a_rank_that_is_started_again_says_it_again(tmp_path: Path) -> None:
    for _ in range(2):
        assert ranks("x: wrong", folder=tmp_path, world="2") == [("said", 1)]


def test_who_has_another_error_says_that(tmp_path: Path) -> None:
    found = ranks("x: wrong", "y: wrong", "x: wrong", folder=tmp_path)
    assert sorted(word for word, _ in found) == ["quiet", "said", "said"] and found[1] == (
        "said",
        1,
    )


def test_torchrun_hears_of_one_failure_and_of_its_words(tmp_path: Path) -> None:
    found = ranks("x: wrong", "x: wrong", folder=tmp_path, TORCHELASTIC_RUN_ID="none")
    assert sorted(found) == [("quiet", 0), ("said", 1)]
    (file,) = tmp_path.rglob("error.json")
    assert json.loads(file.read_text())["message"]["message"] == "error: x: wrong"
    assert found[int(file.parent.name)] == ("said", 1)


def test_a_process_alone_waits_for_nobody(tmp_path: Path) -> None:
    words = [sys.executable, "-c", RANK, "x: wrong"]
    alone = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    }
    start = time.monotonic()
    done = subprocess.run(
        words, capture_output=True, text=True, env={**alone, "TMPDIR": str(tmp_path)}, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("said", 1)
    assert not list(tmp_path.iterdir()) and time.monotonic() - start < 60


def test_a_mark_that_a_killed_launch_left_silences_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bridge.cli import under_launcher

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setattr(under_launcher.tempfile, "gettempdir", lambda: str(tmp_path))
    mark = under_launcher._mark(["x: wrong"])
    mark.touch()
    os.utime(mark, (0, 0))
    with under_launcher.once(["x: wrong"]) as mine:
        assert mine
    assert time.time() - mark.stat().st_mtime < 60
