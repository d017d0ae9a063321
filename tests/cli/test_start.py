"""How the command starts: no file of the current directory runs, and another package in the place of ours is one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.main import get_command

import bridge
from bridge.cli.app import app

COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]
FILE = "ds.json"
WORDS = {
    "convert": (FILE, "--to", "megatron", "--world-size", "2", "-o", "out.args"),
    "check": (FILE, "--world-size", "2"),
    "checkpoint": ("inspect", "weights"),
    "demo": ("--no-train", "-o", "out"),
    "drift": (FILE, "--from-version", "0.16.3"),
    "move": (FILE, "--checkpoint", "weights", "--to", "native", "--world-size", "1", "-o", "out"),
    "diff": (FILE, FILE),
    "match": ("launch.args", "launch.args"),
    "help": ("check",),
    "fuzz": ("merak", "--examples", "2"),
    "estimate": (FILE, "--ranks", "2", "--model", "gpt2"),
    "layout": (FILE, "--ranks", "2", "--model", "gpt2"),
    "schedule": ("launch.args", "--world-size", "2", "--microbatches", "4"),
    "schema": ("convert",),
    "show": ("megatron", "lr"),
    "trace": ("diff", "one", "two"),
    "train": (FILE, "--steps", "1"),
    "verify": (FILE, "--to", "megatron", "--steps", "1"),
}
"""What each command is given; one that is not here gets the file."""
HEAVY = {"train", "verify"}
"""Run on ranks, with torch: tests of the engine start them among planted files too."""
HEADER = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
LAUNCH = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --global-batch-size 4 --seq-length 64 "
LAUNCH += "--max-position-embeddings 64 --lr 1e-3 --train-iters 10 --pipeline-model-parallel-size 2"


def started(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter in `folder`."""
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        check=False,
    )


def test_planted_files_run_where_nothing_protects(planted: Path) -> None:
    for name in ("json", "bridge", "stagebridge"):
        assert started(planted, "-c", f"import {name}").stderr == "planted\n"
        ran = planted.parent / "ran"
        assert ran.read_text() == f"{planted / name}.py\n"
        ran.unlink()


def test_the_core_does_not_start_where_files_of_the_current_directory_are_imported(
    tmp_path: Path,
) -> None:
    """Its first module says so before it imports anything but `sys`."""
    home = str(Path(bridge.__file__).parents[1])
    (tmp_path / "typing.py").write_text("print('planted')\n")
    done = started(tmp_path, "-m", "bridge.cli", "show", "megatron", "lr", PYTHONPATH=home)
    assert (done.returncode, done.stdout) == (1, "") and "python -P -m stagebridge" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    safe = started(tmp_path, "-P", "-m", "bridge.cli", "show", "megatron", "lr", PYTHONPATH=home)
    assert safe.returncode == 0 and "planted" not in safe.stdout


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in HEAVY])
def test_no_file_of_the_current_directory_runs(planted: Path, command: str) -> None:
    (planted / FILE).write_text(json.dumps(CONFIG))
    (planted / "launch.args").write_text(LAUNCH)
    (planted / "weights").mkdir()
    (planted / "weights" / "model.safetensors").write_bytes(
        len(HEADER).to_bytes(8, "little") + HEADER + bytes(4)
    )
    done = started(planted, "-P", "-m", "stagebridge", command, *WORDS.get(command, (FILE,)))
    refused = command == "trace" or (
        command in ("checkpoint", "move") and find_spec("torch") is None
    )
    assert done.returncode in ((1,) if refused else (0, 2)), done.stderr
    assert "Traceback" not in done.stderr and done.stdout + done.stderr


@pytest.mark.parametrize("path", ["", os.pathsep, "."], ids=["-m", "empty entry", "dot"])
def test_the_current_directory_is_taken_off_the_path(planted: Path, path: str) -> None:
    """Without `-P`, or with PYTHONPATH entries that mean the current directory: after what Python itself imports for `-m`."""
    for name in ("contextlib", "functools", "types", "warnings", "collections", "stagebridge"):
        (planted / f"{name}.py").unlink()
    home = os.environ.get("PYTHONPATH", "")
    safe = () if not path else ("-P",)
    done = started(
        planted,
        *safe,
        "-m",
        "stagebridge",
        "check",
        "nothing.json",
        PYTHONPATH=os.pathsep.join((home, path)),
    )
    assert (done.returncode, done.stderr) == (
        1,
        "error: nothing.json: no such file; check the path\n",
    )


@pytest.mark.parametrize("name", ["bridge", "compat"])
@pytest.mark.parametrize("kind", ["module", "package"])
def test_another_package_in_the_place_of_ours_is_one_line(
    tmp_path: Path, name: str, kind: str
) -> None:
    file = tmp_path / (f"{name}.py" if kind == "module" else f"{name}/__init__.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text("raise RuntimeError('never run')")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    for words in (
        ("-P", "-m", "stagebridge", "check", FILE),
        ("-P", "-c", "import stagebridge; stagebridge.convert"),
    ):
        done = started(tmp_path.parent, *words, PYTHONPATH=path)
        assert done.returncode == 1
        *before, line = done.stderr.splitlines()
        assert (
            f"stagebridge needs its own package {name}, but {file} is another package named {name}"
            in line
        )
        assert words[1] == "-c" or not before


def test_another_distribution_that_wrote_over_ours_is_one_line(tmp_path: Path) -> None:
    """As PyPI's python-bridge does in the same environment: its `bridge/__init__.py` in our folder."""
    (tmp_path / "bridge").mkdir()
    for path in Path(bridge.__file__).parent.iterdir():
        if path.name != "__init__.py":
            (tmp_path / "bridge" / path.name).symlink_to(path)
    (tmp_path / "bridge" / "__init__.py").write_text("from bridge.console import log_info\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = started(tmp_path, "-P", "-m", "stagebridge", "check", FILE, PYTHONPATH=path)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    said = "error: stagebridge needs its own package bridge, but another package of that name raised ModuleNotFoundError"
    assert done.stderr.startswith(said)


def test_the_package_gives_the_use_cases() -> None:
    code = "import sys, stagebridge; assert 'bridge' not in sys.modules; import bridge; "
    code += "assert all(getattr(stagebridge, name).__module__ == f'bridge.api.{name}' for name in stagebridge.__all__); "
    code += (
        "assert len(stagebridge.__all__) == 8 and stagebridge.__version__ == bridge.__version__; "
    )
    code += (
        "from stagebridge import convert; assert 'torch' not in sys.modules; stagebridge.translate"
    )
    done = started(Path(), "-P", "-c", code)
    said = "AttributeError: module 'stagebridge' has no attribute 'translate'"
    assert done.stderr.splitlines()[-1] == said


def test_importing_the_package_imports_nothing() -> None:
    code = "import sys; before = set(sys.modules); import stagebridge; print(set(sys.modules) - before)"
    assert started(Path(), "-P", "-c", code).stdout == "{'stagebridge'}\n"


@pytest.mark.parametrize("name", ["files", "shell", "stack", "translation", "report", "layout"])
def test_each_package_can_be_imported_first(name: str) -> None:
    command = [sys.executable, "-c", f"import bridge.{name}"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(bridge.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        (
            ["--help"],
            {"pydantic", "compat", "bridge.shell", "bridge.files.yaml", "bridge.plan.plan"},
        ),
        (
            ["convert", "launch.args", "--to", "deepspeed", "--world-size", "2"],
            {
                "bridge.shell.interpreter",
                "bridge.report.json_types",
                "compat.merak.schema",
                "compat.automodel.schema",
                "compat.fast_llm.schema",
            },
        ),
    ],
    ids=["help", "convert"],
)
def test_a_start_loads_what_it_uses(tmp_path: Path, words: list[str], absent: set[str]) -> None:
    (tmp_path / "launch.args").write_text(LAUNCH)
    code = f"import sys; from bridge.cli import run; run({words!r}); print(*sys.modules, file=sys.stderr)"
    done = started(tmp_path, "-P", "-c", code)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.splitlines()[-1].split())
    assert "bridge.cli.app" in loaded and not loaded & absent


def test_models_are_built_when_they_are_used() -> None:
    code = "from bridge.plan.plan import Plan; from compat.deepspeed.schema import SCHEMA; "
    code += "print(Plan.__pydantic_complete__, SCHEMA.__pydantic_complete__, Plan.of({'batch.micro': 1}).batch.micro)"
    assert started(Path(), "-P", "-c", code).stdout == "False False 1\n"


def test_options_are_declared_for_the_command_that_was_asked() -> None:
    group = get_command(app)
    assert [one.params for one in group.commands.values() if one.name in ("convert", "check")] == [
        [],
        [],
    ]  # type: ignore[attr-defined]
    _, command, rest = group.resolve_command(
        group.make_context("stagebridge", ["convert"]), ["convert", "x"]
    )  # type: ignore[attr-defined]
    assert rest == ["x"] and {"file", "to", "world_size"} <= {one.name for one in command.params}
