"""A sixth stack is one folder: a small one, in a temporary folder, for which every general promise is kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import compat

HERE = Path(__file__).parent
SOURCE = HERE / "sixth" / "kite"
FIVE = compat.names()
PROMISES = ("test_laws.py", "test_carry.py", "test_drift.py", "test_docs.py", "test_fuzz.py", "test_architecture.py")
"""Tests that are written for every dialect there is; each runs for this one too, and for its pairs with the others."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the sixth dialect and nothing else."""
    folder = tmp_path_factory.mktemp("stacks")
    shutil.copytree(SOURCE, folder / "kite", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def ran(place: Path, *words: str, folder: Path | None = None, code: int | None = 0) -> str:
    """What a fresh interpreter that is told of the folder prints, on both streams; it ends with `code`; None: 0 or 2."""
    environment = {**os.environ, compat.PATH: str(place), "PYTHONPATH": str(Path(compat.__path__[0]).parent)}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, cwd=folder, check=False)
    assert done.returncode in ((0, 2) if code is None else (code,)), done.stdout + done.stderr
    return done.stdout + done.stderr


def test_it_is_found_by_being_there(place: Path) -> None:
    assert "kite" not in FIVE
    said = ran(place, "-c", "import compat; print(*compat.names(), compat.load('kite').title)")
    assert said.split() == [*sorted((*FIVE, "kite")), "Kite"]


def test_a_folder_that_is_not_there_is_no_dialect(tmp_path: Path) -> None:
    assert ran(tmp_path / "nowhere", "-c", "import compat; print(*compat.names())").split() == list(FIVE)


@pytest.mark.parametrize("file", [name for name in PROMISES if (HERE / name).exists()])
def test_the_general_promises_are_kept(place: Path, file: str) -> None:
    """The very tests of the other stacks, with those of its ids that name it."""
    said = ran(
        place,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "kite and not on_its_page",
        str(HERE / file),
        folder=HERE.parent,
    )
    assert " passed" in said
    assert "skipped" not in said


def test_its_files_are_recognised_converted_and_carried_back(place: Path, tmp_path: Path) -> None:
    """To each of the five and back, by the command line, with what they cannot say in the sidecar."""
    config = {"ranks": {"tensor": 2, "pipeline": 2}, "feed": {"each": 2, "times": 4}, "update": {"rate": 0.25}, "tail": "red"}
    (tmp_path / "run.json").write_text(json.dumps(config))
    command, ranks = ("-m", "bridge.cli"), ("--world-size", "8")
    assert "Kite 2.0 (newest known)" in ran(place, *command, "check", "run.json", *ranks, folder=tmp_path)
    for name in FIVE:
        out, back = f"{name}.out", f"{name}.json"
        ran(place, *command, "convert", "run.json", "--to", name, *ranks, "-o", out, folder=tmp_path, code=2)
        words = ("convert", out, "--from", name, "--to", "kite", *ranks, "-o", back)
        ran(place, *command, *words, folder=tmp_path, code=None)
        assert json.loads((tmp_path / back).read_text()) == config


def test_its_releases_drift(place: Path, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(json.dumps({"update": {"lr": 0.25}, "ranks": {"pipeline": 2}, "spread": 2}))
    words = ("drift", "old.json", "--from-version", "1.0", "--world-size", "2", "-o", "new.json", "--json")
    said = json.loads(ran(place, "-m", "bridge.cli", *words, folder=tmp_path, code=2))
    assert {change["path"]: change["kind"] for change in said["changes"]} == {
        "update.lr": "renamed",
        "update.bound": "default moved",
        "spread": "refused",
    }
    assert [change["path"] for change in said["left"]] == ["spread"]
    new = json.loads((tmp_path / "new.json").read_text())
    assert new == {"update": {"rate": 0.25, "bound": 0.0}, "ranks": {"pipeline": 2}, "spread": 1}


def test_its_documentation_is_gathered(place: Path, tmp_path: Path) -> None:
    """A page of its own and its rows in the fidelity matrix, made by the generator of all the others."""
    docs = tmp_path / "docs"
    shutil.copytree(HERE.parent / "docs", docs, ignore=shutil.ignore_patterns("__pycache__"))
    ran(place, str(docs / "generate"))
    page = (docs / "dialects" / "kite.md").read_text()
    assert all(f"| `{path}`" in page for path in ("ranks.tensor", "update.rate", "spread", "wind"))
    assert (docs / "fidelity" / "kite.md").exists()
    assert "Kite" in (docs / "fidelity" / "README.md").read_text()
