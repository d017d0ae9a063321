"""What cannot be read is one line and exit code 1, whichever command was to read it."""

from __future__ import annotations

import errno
import io
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bridge.cli import run
from bridge.files import read

FLAGS = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2\n"
COMMANDS = {
    "check": ["check", "{}"],
    "convert": ["convert", "{}", "--to", "deepspeed"],
    "drift": ["drift", "{}"],
    "estimate": ["estimate", "{}"],
    "layout": ["layout", "{}"],
    "schedule": ["schedule", "{}"],
    "train": ["train", "{}"],
    "verify": ["verify", "{}", "--to", "deepspeed"],
}
FAULTS = {
    "no right to": "cannot be read (permission denied); check the path",
    "a directory": "found a directory, expected a config file; name a file in it",
    "gone": "no such file; check the path",
    "an error of the disk": "cannot be read (input/output error); check the program or file behind it",
}
"""What is wrong with the file, and what is said of it."""
FOLDERS = {
    "estimate": (
        "estimate: found 0 sources that start or configure a run (none), expected one; give its script"
        " or its config, and files of arguments beside it"  # a folder is a model's
    ),
    "check": "{}: no file that may be a config; name one",
    "convert": "{}: no file that may be a config; name one",
}
"""What commands that take a folder of configs say of an empty one."""


class Broken(io.BytesIO):
    """A file whose content a disk does not give."""

    def read(self, size: int | None = -1) -> bytes:
        """Fail as the system does."""
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fileno(self) -> int:
        """Of a regular file."""
        return FILE.fileno()


FILE = open(__file__, "rb")  # noqa: SIM115 - lives as long as the tests


def prepared(fault: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put that fault in the place of the file at `path`; root may read everything, so the system's answer is a stand-in."""
    opened = read._at_once

    def refused(name: str, flags: int) -> int:
        if Path(name) == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return opened(name, flags)

    if fault == "gone":
        path.unlink()
    elif fault == "a directory":
        path.unlink()
        path.mkdir()
    elif fault == "no right to":
        path.chmod(0)
        if os.geteuid() == 0:
            monkeypatch.setattr(read, "_at_once", refused)
    else:
        monkeypatch.setattr(read, "open", lambda *given, **named: Broken(), raising=False)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_config_that_cannot_be_read(
    command: str,
    fault: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if command in ("train", "verify") and find_spec("torch") is None:
        pytest.skip("needs torch")
    monkeypatch.chdir(
        tmp_path
    )  # so that no pyproject.toml is read, which the disk would not give either
    path = tmp_path / "launch.args"
    path.write_text(FLAGS)
    prepared(fault, path, monkeypatch)
    assert run([word.format(path) for word in COMMANDS[command]]) == 1
    out, err = capsys.readouterr()
    said = FOLDERS.get(command) if fault == "a directory" else None
    assert (out, err.splitlines()) == (
        "",
        [f"error: {said.format(path) if said else f'{path}: {FAULTS[fault]}'}"],
    )


@pytest.mark.parametrize("fault", ["no right to", "a directory"])
def test_a_sidecar_that_cannot_be_read(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written, sidecar = (
        tmp_path / name for name in ("launch.args", "ds.json", "ds.json.carry.json")
    )
    path.write_text(FLAGS)
    run(["convert", str(path), "--to", "deepspeed", "-o", str(written)])
    capsys.readouterr()
    prepared(fault, sidecar, monkeypatch)
    code = run(["convert", str(written), "--to", "megatron"])
    _, err = capsys.readouterr()
    assert (
        code == 1
        and str(sidecar) in err
        and len(err.splitlines()) == 1
        and err.startswith("error: ")
    )


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize("fault", ["no right to", "a directory", "gone"])
@pytest.mark.parametrize("words", [["show", "{}"], ["diff", "{}", "{}"]])
def test_a_traced_run_that_cannot_be_read(
    words: list[str],
    fault: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "run.json").write_text("{}")
    prepared(fault, tmp_path / "run.json", monkeypatch)
    given: Any = ["trace", *(word.format(tmp_path) for word in words)]
    assert run(given) == 1
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and err.startswith(f"error: {tmp_path}")
