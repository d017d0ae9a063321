"""Shells complete commands, options and their values; the script that is printed runs in a real bash."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bridge
import compat
from bridge.checkpoint import formats
from bridge.cli import shell_completion
from bridge.stack.checkpoint_side import side_of

pytestmark = pytest.mark.once
SHELL = shutil.which("bash")
ASK = """\
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); COMPREPLY=()
_stagebridge_completion stagebridge; printf '%s\\n' "${{COMPREPLY[@]}}"; echo --
"""
STACKS = set(compat.names())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config, and `stagebridge` on the path."""
    tool = tmp_path / "bin" / "stagebridge"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m stagebridge "$@"\n')
    tool.chmod(0o755)
    source = Path(bridge.__file__).parents[1]
    monkeypatch.setenv("PATH", os.pathsep.join((str(tool.parent), os.environ["PATH"])))
    front = source / "bridge" / "cli" / "front"
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join((str(source), str(front), os.environ.get("PYTHONPATH", "")))
    )
    monkeypatch.setenv("SHELL", "/bin/bash")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 1}})
    )
    (tmp_path / "broken.json").write_text("{")
    return tmp_path


def completed(*lines: str) -> list[set[str]]:
    """What bash offers at the end of each line; a blank at the end begins a new word."""
    words = [" ".join(map(shlex.quote, line.split(" "))) for line in lines]
    script = 'eval "$(_STAGEBRIDGE_COMPLETE=source_bash stagebridge)"\n' + "".join(
        ASK.format(words=one) for one in words
    )
    done = subprocess.run(
        [str(SHELL), "--norc", "-c", script], capture_output=True, text=True, check=False
    )
    assert not done.stderr, done.stderr
    return [set(part.split()) for part in done.stdout.split("--\n")[:-1]]


@pytest.mark.skipif(SHELL is None, reason="needs bash")
def test_a_real_bash_completes_values(folder: Path) -> None:
    found = completed(
        "stagebridge che",
        "stagebridge convert ds.json --to ",
        "stagebridge convert ds.json --to deepspeed --to-version 0.19",
        "stagebridge drift ds.json --from-version 0.19",
        "stagebridge drift broken.json --from-version 0.19",
        "stagebridge check ds.json --select gradient_cl",
        "stagebridge check ds.json --ignore gradient_clipping/",
        "stagebridge check --format s",
        "stagebridge show megatron lr_warmup_f",
        "stagebridge check d",
    )
    assert found[0] == {"check", "checkpoint"} and found[1] == STACKS
    assert (
        found[2]
        == found[3]
        == {one for one in compat.load("deepspeed").versions if one.startswith("0.19")}
    )
    assert found[4] == set(), "an unreadable file is no reason for an error amid the line"
    assert (
        found[5] == {"gradient_clipping"}
        and found[6]
        and all(one.startswith("gradient_clipping/") for one in found[6])
    )
    assert found[7:] == [{"sarif"}, {"lr_warmup_fraction"}, set()], (
        "the shell itself completes file names"
    )


def test_zsh_and_fish_get_values_too(folder: Path) -> None:
    line = "stagebridge convert ds.json --to mega"
    for shell, more in (("zsh", {}), ("fish", {"_TYPER_COMPLETE_FISH_ACTION": "get-args"})):
        asked = {"_STAGEBRIDGE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line, **more}
        done = subprocess.run(
            ["stagebridge"],
            env={**os.environ, **asked},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "megatron" in done.stdout and "merak" not in done.stdout and not done.stderr


def test_every_source_of_values_gives_what_its_option_takes() -> None:
    """None fails without anything on the line."""
    for (_, label), source in shell_completion.VALUES.items():
        found = list(source({"commands": ("convert",)}, "to", ""))
        assert found or label in ("V", "FIELD"), label
    kinds = set(shell_completion.VALUES["checkpoint", "FORMAT"]({}, "to", ""))
    assert (
        kinds < set(formats.all_formats())
        and "megatron-ranks" not in kinds
        and "universal" in kinds
    )
    moved = set(shell_completion.VALUES["move", "STACK"]({}, "to", ""))
    refused = {one for one in STACKS if not side_of(compat.load(one)).loads}
    assert (
        moved == (STACKS - refused) | {"native"} and {"deepspeed", "megatron"} <= moved and refused
    )
    newest = iter(
        shell_completion.VALUES["*", "V"]({"to": "megatron", "from_": "merak"}, "from_version", "")
    )
    assert next(newest) == compat.load("merak").versions[-1]
