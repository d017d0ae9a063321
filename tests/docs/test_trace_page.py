"""The page docs/trace.md is what happens: its files are written, its commands are run, and they print what stands there.

Trainings take a while: `STAGEBRIDGE_WALKS=1`, as `tox -e long` sets it, runs them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

import bridge

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "trace.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LONG = pytest.mark.skipif(
    not os.environ.get("STAGEBRIDGE_WALKS"), reason="takes longer: tox -e long"
)
CODE = re.compile(r"\s+# exit code (\d+)$")


@dataclass(frozen=True)
class Block:
    """A block of the page."""

    language: str
    text: str

    @property
    def lines(self) -> list[str]:
        return self.text.rstrip("\n").split("\n")

    @property
    def file(self) -> str:
        """The file that it is, as its first line says."""
        return self.lines[0].removeprefix("# ")


def blocks() -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(PAGE)]


def test_every_block_is_a_file_a_command_or_what_a_command_prints() -> None:
    kinds = [block.language for block in blocks()]
    assert len(kinds) == PAGE.count("```") / 2 and set(kinds) == {"python", "sh", "text"}
    assert all(
        re.fullmatch(r"# \w+\.py", block.lines[0])
        for block in blocks()
        if block.language == "python"
    )
    assert all(before == "sh" for before, kind in pairwise(kinds) if kind == "text")


def test_every_reference_within_the_page_leads_somewhere() -> None:
    heads = {
        re.sub(r"[^\w -]", "", head).lower().replace(" ", "-")
        for head in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE)) <= heads


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty one, with `stagebridge` and `python` on the path of a shell."""
    source, tools = Path(bridge.__file__).parents[1], tmp_path / "bin"
    tools.mkdir()
    for name, words in (
        ("stagebridge", f'{sys.executable} -P -m stagebridge "$@"'),
        ("python", f'{sys.executable} "$@"'),
    ):
        (tools / name).write_text(f"#!/bin/sh\nexec {words}\n")
        (tools / name).chmod(0o755)
    front = (
        [str(source / "bridge" / "cli" / "front")]
        if (source / "bridge" / "cli" / "front").is_dir()
        else []
    )
    monkeypatch.setenv(
        "PATH", os.pathsep.join((str(tools), str(Path(sys.executable).parent), os.environ["PATH"]))
    )
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join((str(source), *front, os.environ.get("PYTHONPATH", "")))
    )
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("COLUMNS", "160")  # a table as wide as the page shows it
    if "stagebridge" not in {entry.name for entry in entry_points(group="pytest11")}:
        monkeypatch.setenv("PYTEST_ADDOPTS", "-p bridge.trace.plugin")
    (tmp_path / "here").mkdir()
    yield tmp_path / "here"


def shell(line: str, folder: Path) -> str:
    """What a command prints, on both streams; its exit code is the one that the page gives, or 0."""
    expected = CODE.search(line)
    done = subprocess.run(
        ["bash", "-c", CODE.sub("", line)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == int(expected[1] if expected else 0), (
        f"{line}\n{done.stdout}\n{done.stderr}"
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def assert_holds(printed: str, expected: Block) -> None:
    """All lines of the page were printed; `...` stands for anything, and columns are as wide as they need to be."""
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    for line in expected.lines:
        pattern = re.compile(
            ".*".join(re.escape(" ".join(part.split())) for part in line.split("..."))
        )
        assert any(pattern.search(one) for one in lines), f"not printed: {line}\n\n{printed}"


@LONG
def test_the_walk_does_and_prints_what_stands_there(folder: Path) -> None:
    if find_spec("torch") is None:
        pytest.skip("needs torch")
    printed = ""
    for block in blocks():
        if block.language == "python":
            (folder / block.file).write_text(block.text)
        elif block.language == "sh":
            printed = "".join(shell(line, folder) for line in block.lines)
        else:
            assert_holds(printed, block)
