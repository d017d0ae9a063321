"""`stagebridge fuzz`: the stacks hold, a broken one does not, and what is printed can be pasted and fails again."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import compat
from bridge.cli import run
from bridge.testing.fuzz import CONVERTING, LIFTING, READING, Task, fuzz

pytestmark = pytest.mark.once

KITE = Path(__file__).parent / "stacks" / "sixth" / "kite"
NAMES = compat.names()


@pytest.mark.parametrize("name", NAMES)
def test_a_stack_holds(name: str) -> None:
    dialect = compat.load(name)
    to = compat.load(NAMES[NAMES.index(name) - 1])
    seen = list[int]()
    covered, failure = fuzz(
        Task(dialect, to, to_version=to.versions[-1], examples=12),
        lambda so_far: seen.append(so_far.examples),
    )
    assert failure is None, failure
    assert covered.examples == 12 and seen == list(range(1, 13))
    assert set(covered.releases) <= set(dialect.versions) and len(covered.releases) > 1
    assert covered.accepted[READING] == covered.accepted[LIFTING] == 12
    assert covered.accepted[CONVERTING] + covered.refused[CONVERTING] == 12
    assert covered.accepted[CONVERTING] > 0


def test_another_seed_tries_other_configs() -> None:
    dialect = compat.load("merak")
    fields = [fuzz(Task(dialect, examples=5, seed=seed))[0].fields for seed in (1, 1, 2)]
    assert fields[0] == fields[1] != fields[2]


# Broken copies of a small stack

SWAPPED = (
    "rules.py",
    'return {\n        "spread": stage\n',
    'stage = {1: 2, 2: 1}.get(stage, stage)\n    return {\n        "spread": stage\n',
)
"""Levels 1 and 2 are written for one another, and read as they are: no longer symmetrical."""
FORGOTTEN = (
    "__init__.py",
    "config.given.as_nested()",
    'Values({**config.given, "tail": ""}).as_nested()',
)
"""The writer forgets what the user said."""


def broken(folder: Path, file: str, old: str, new: str) -> Path:
    """A folder with a copy of the stack in which one place reads otherwise."""
    shutil.copytree(KITE, folder / "kite", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "kite" / file
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    return folder


def stagebridge(place: Path, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        compat.PATH: str(place),
        "PYTHONPATH": str(Path(compat.__path__[0]).parent),
    }
    command = [sys.executable, "-P", "-m", "bridge.cli", *words]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, check=False
    )


@pytest.mark.parametrize(
    "where, stage, smallest",
    [(SWAPPED, LIFTING, [{"spread": 1}, {"spread": 2}]), (FORGOTTEN, READING, [{"tail": ""}, {}])],
    ids=["swapped", "forgotten"],
)
def test_a_broken_rule_is_found_and_shown_by_the_smallest_config(
    where: tuple[str, str, str], stage: str, smallest: list[dict[str, object]], tmp_path: Path
) -> None:
    place = broken(tmp_path / "stacks", *where)
    done = stagebridge(place, "fuzz", "kite", "--examples", "100", folder=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"FAILED {stage}" in done.stdout
    text = re.search(r"Save as fuzz.json:\n\n(\{.*?\n\})\n", done.stdout, re.DOTALL)
    assert text and json.loads(text[1]) in smallest, done.stdout

    (tmp_path / "fuzz.json").write_text(text[1])
    shown = re.search(r"To see the failure:\n  stagebridge (.*)\n", done.stdout)
    assert shown and stagebridge(place, *shown[1].split(), folder=tmp_path).returncode in (0, 2)
    again = re.search(r"To find it again by fuzzing:\n  stagebridge (.*)\n", done.stdout)
    assert again
    repeated = stagebridge(place, *again[1].split(), "--json", folder=tmp_path)
    said = json.loads(repeated.stdout)
    assert repeated.returncode == said["exit_code"] == 2
    assert (
        json.loads(said["failure"]["text"]) == json.loads(text[1])
        and said["failure"]["stage"] == stage
    )


# The command line


def test_what_was_covered_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "fuzz",
        "merak",
        "--to",
        "deepspeed",
        "--examples",
        "10",
        "--from-version",
        "2.2.2",
        "--to-version",
        "0.19.7",
    ]
    assert run(words) == 0
    out, progress = capsys.readouterr()
    assert "Merak -> DeepSpeed 0.19.7: 10 configs of 1 of 9 releases" in out and out.endswith(
        "no failure\n"
    )
    assert "10 of 10 configs" in progress
    assert run([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["releases"] == {"2.2.2": 10} and said["failure"] is None and said["exit_code"] == 0


@pytest.mark.parametrize(
    "words, problem",
    [
        (["nothing"], "unknown dialect"),
        (["merak", "--from-version", "2.2.3"], "the nearest known is 2.2.2+main"),
        (["merak", "--to", "deepspeed", "--to-version", "1.0"], "the nearest known is 0.19.8"),
    ],
)
def test_wrong_usage(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fuzz", *words]) == 1
    assert problem in capsys.readouterr().err


def test_without_hypothesis_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bridge.cli.fuzz.find_spec", lambda name: None)
    assert run(["fuzz", "merak"]) == 1
    assert "pip install -c constraints.txt '.[test]'" in capsys.readouterr().err
