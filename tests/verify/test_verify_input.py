"""A config that `verify` reads from standard input is kept once, where nobody else can read it, and not beyond the command."""

from __future__ import annotations

import io
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.api import verify as command
from bridge.cli import run as stagebridge
from tests.verify.test_verify_command import WORDS, ZERO3, ranks_that_say

PIPED = ["verify", "-", *WORDS[2:]]
Seen = list[tuple[Path, int, int, str]]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that others may look into, and a config on standard input."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    folder.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(ZERO3.read_bytes())))
    return folder


def looking(folder: Path, seen: Seen, end: Any) -> Any:
    """Stands for the ranks: notes what lies in the folder of temporary files, and ends as it is told."""

    def ranks(number: int, module: str, *arguments: str) -> Iterator[str]:
        for path in (path for path in folder.rglob("*") if path.is_file()):
            modes = stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)
            seen.append((path, *modes, path.read_text()))
        yield from end(number, module, *arguments)

    return ranks


def fails(error: BaseException) -> Any:
    """Stands for ranks that fail."""

    def ranks(number: int, module: str, *arguments: str) -> Iterator[str]:
        yield "begun"
        raise error

    return ranks


REPORT = {"found": {"verdict": "in part", "lacking": [], "ranks": 2, "changes": {}, "runs": []}}
ENDS: dict[str, tuple[Any, int | type[BaseException]]] = {
    "a verdict": (ranks_that_say(REPORT), 3),
    "ranks that refuse": (ranks_that_say({"found": {"problems": ["no such thing"]}}), 1),
    "an error of ours": (fails(command.BridgeError("the ranks are gone")), 1),
    "an error of Python": (fails(ZeroDivisionError("a defect")), ZeroDivisionError),
    "the user's interrupt": (fails(KeyboardInterrupt()), 130),
}


@pytest.mark.parametrize("name", ENDS)
def test_one_private_copy_is_kept_while_the_ranks_run(
    name: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, expected = ENDS[name]
    seen: Seen = []
    monkeypatch.setattr(command, "run_ranks", looking(scratch, seen, end))
    try:
        found: Any = stagebridge([*PIPED, "--from", "fast_llm", "--json"])
    except BaseException as error:
        found = type(error)
    assert found == expected
    ((path, mode, around, text),) = seen
    assert (mode, around) == (0o600, 0o700) and text == ZERO3.read_text()
    assert not path.exists() and not list(scratch.iterdir())


def test_a_command_that_is_ended_from_outside_takes_its_copy_away(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-P",
        "-m",
        "stagebridge",
        *PIPED,
        "--from",
        "fast_llm",
        "--steps",
        "1000",
    ]
    with ZERO3.open() as stream:
        process = subprocess.Popen(
            words,
            stdin=stream,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
    while not list(tmp_path.rglob("standard input")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM and not list(tmp_path.iterdir())
