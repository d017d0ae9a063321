"""A sixth stack is one folder: a small one, in a temporary folder, for which every general promise is kept."""

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

pytestmark = pytest.mark.once

HERE = Path(__file__).parents[1]
SOURCE = HERE / "stacks" / "sixth" / "kite"
FIVE = compat.names()
TRAINED = tuple(name for name in FIVE if not compat.load(name).about)
"""Stacks whose configs say how a run is trained."""
PROMISES = (
    "convert/test_laws.py",
    "convert/test_carry.py",
    "convert/test_drift.py",
    "docs/test_docs.py",
    "test_fuzz.py",
    "test_architecture.py",
)
"""Tests that are written for every dialect there is; each runs for this one too, and for its pairs with the others."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the sixth dialect and nothing else."""
    folder = tmp_path_factory.mktemp("stacks")
    shutil.copytree(SOURCE, folder / "kite", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def ran(place: Path, *words: str, folder: Path | None = None, code: int | None = 0) -> str:
    """What a fresh interpreter that is told of the folder prints, on both streams; it ends with `code`; None: 0 or 2."""
    environment = {
        **os.environ,
        compat.PATH: str(place),
        "PYTHONPATH": str(Path(compat.__path__[0]).parent),
    }
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        check=False,
    )
    assert done.returncode in ((0, 2) if code is None else (code,)), done.stdout + done.stderr
    return done.stdout + done.stderr


def test_it_is_found_by_being_there(place: Path) -> None:
    assert "kite" not in FIVE
    said = ran(place, "-c", "import compat; print(*compat.names(), compat.load('kite').title)")
    assert said.split() == [*sorted((*FIVE, "kite")), "Kite"]


def test_a_folder_that_is_not_there_is_no_dialect(tmp_path: Path) -> None:
    assert ran(tmp_path / "nowhere", "-c", "import compat; print(*compat.names())").split() == list(
        FIVE
    )


def test_the_general_promises_are_kept(place: Path) -> None:
    """The very tests of the other stacks, with those of its ids that name it."""
    files = [str(HERE / name) for name in PROMISES]
    said = ran(
        place,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "-k",
        "kite and not on_its_page",
        *files,
        folder=HERE.parent,
    )
    ended = {
        Path(file).name: set(re.findall(rf"{Path(file).name}::\S+ ([A-Z]+)", said))
        for file in files
    }
    assert ended == {Path(file).name: {"PASSED"} for file in files}


def test_its_files_are_recognised_converted_and_carried_back(place: Path, tmp_path: Path) -> None:
    """To each of the five and back, by the command line, with what they cannot say in the sidecar."""
    config = {
        "ranks": {"tensor": 2, "pipeline": 2},
        "feed": {"each": 2, "times": 4},
        "update": {"rate": 0.25},
        "tail": "red",
    }
    (tmp_path / "run.json").write_text(json.dumps(config))
    command, ranks = ("-P", "-m", "bridge.cli"), ("--world-size", "8")
    assert "Kite 2.0 (newest known)" in ran(
        place, *command, "check", "run.json", *ranks, folder=tmp_path
    )
    for name in TRAINED:
        out, back = f"{name}.out", f"{name}.json"
        ran(
            place,
            *command,
            "convert",
            "run.json",
            "--to",
            name,
            *ranks,
            "-o",
            out,
            folder=tmp_path,
            code=2,
        )
        words = ("convert", out, "--from", name, "--to", "kite", *ranks, "-o", back)
        ran(place, *command, *words, folder=tmp_path, code=None)
        assert json.loads((tmp_path / back).read_text()) == config


def test_its_releases_drift(place: Path, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(
        json.dumps({"update": {"lr": 0.25}, "ranks": {"pipeline": 2}, "spread": 2})
    )
    words = (
        "drift",
        "old.json",
        "--from-version",
        "1.0",
        "--world-size",
        "2",
        "-o",
        "new.json",
        "--json",
    )
    said = json.loads(ran(place, "-P", "-m", "bridge.cli", *words, folder=tmp_path, code=1))
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


TELLTALE = "\nfrom pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


def test_a_plugin_runs_only_if_it_is_named_or_its_signature_matches(
    place: Path, tmp_path: Path
) -> None:
    """Beside a missing folder, one without a dialect, one that cannot be parsed and one that cannot be imported."""
    stacks = tmp_path / "stacks"
    shutil.copytree(SOURCE, stacks / "kite", ignore=shutil.ignore_patterns("__pycache__"))
    files = {
        "empty": "",
        "broken": "DIALECT = (",
        "other": "SIGNATURE = ['--sail']\nDIALECT = None",
        "bad": "DIALECT = 1\nraise OSError",
        "worse": "SIGNATURE = ('--num-layers',)\nimport sys\nsys.exit(7)\nDIALECT = 1",
        "number": "SIGNATURE = ('--num-layers',)\nDIALECT = 5",
    }
    for name, text in files.items():
        (stacks / name).mkdir()
        (stacks / name / "__init__.py").write_text(TELLTALE + text)
    path = stacks / "kite" / "__init__.py"
    path.write_text(path.read_text() + TELLTALE)
    folders = Path(os.pathsep.join((str(tmp_path / "nowhere"), str(stacks))))
    theirs = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}
    mine = {"ranks": {"tensor": 2}, "feed": {"each": 2}, "update": {"rate": 0.25}}
    for name, content in (("ds.json", theirs), ("run.json", mine)):
        (tmp_path / name).write_text(json.dumps(content))
    command = ("-P", "-m", "bridge.cli")
    for words in (
        ("check", "ds.json"),
        ("convert", "ds.json", "--to", "megatron"),
        ("show", "deepspeed", "gradient_clipping"),
    ):
        said = ran(folders, *command, *words, folder=tmp_path, code=None)
        assert not list(stacks.glob("*/ran")), words
        if words[0] == "check":
            assert [
                said.count(text)
                for text in (
                    "nowhere: no such folder",
                    "empty: the file __init__.py does not",
                    "broken: the",
                )
            ] == [1] * 3
            assert "Traceback" not in said
    assert "Kite 2.0" in ran(folders, *command, "check", "run.json", folder=tmp_path, code=None)
    assert [path.parent.name for path in stacks.glob("*/ran")] == ["kite"]
    said = ran(folders, *command, "check", "run.json", "--from", "bad", folder=tmp_path, code=1)
    assert said.count("cannot be imported (OSError") == 1 and "Traceback" not in said
    (tmp_path / "launch.args").write_text(
        "--num-layers 2 --micro-batch-size 1 --hidden-size 8 --num-attention-heads 2 --bf16"
    )
    said = ran(folders, *command, "check", "launch.args", "--lenient", folder=tmp_path, code=None)
    found = (
        "worse cannot be imported (SystemExit: 7)",
        "number has a DIALECT that is not a Dialect",
    )
    assert [said.count(text) for text in found] == [1, 1]
    assert "Megatron-Core" in said and "Traceback" not in said
    said = ran(folders, *command, "show", "empty", folder=tmp_path, code=1)
    assert (
        "empty: unknown dialect" in said
        and "empty: the file __init__.py does not set DIALECT" in said
    )
