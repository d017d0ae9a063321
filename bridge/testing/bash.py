"""Compares bash with the shell reader.

Both give the words of every run that a script starts, in order.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import BridgeError
from bridge.shell.interpreter import ShellReader
from bridge.shell.programs import PROGRAMS
from bridge.shell.scope import Scope
from bridge.shell.word_pieces import Piece, Unknown, spell_pieces, text_if_known
from bridge.testing import processes

BASH = shutil.which("bash")
STARTER = "torchrun"
STARTING = ("bash", "sh", "env", "nohup", "xargs")
"""Names of programs that start other programs and that the reader models."""
SECONDS = 10
"""Time limit for a script in seconds."""
# Words are ended by null bytes, as they may contain anything else; their number comes first, as a
# word may be empty.
STAND_IN = """#!/bin/sh
printf '%s\\0' "$#" "$@" >> {target}
"""
STOPPED = re.compile(r"line (\d+): .*a shell stops", re.DOTALL)
"""Matches a reader's message about an error at which a shell would stop.

The group is the line number.
"""
ASSIGNING = re.compile(r"[A-Za-z_]\w*=")
"""Matches the beginning of a word that assigns to a variable."""
Runs = list[list[str]]


@dataclass(frozen=True)
class Said:
    """The reader's result: the words of each run, or the reason why the reader does not know them."""

    runs: Runs
    refused: str = ""
    stopped: int = 0
    """The line at which a shell stops with an error, as the reader expects; 0 if there is none."""


class Bash:
    """Runs scripts with bash in an empty folder.

    Scripts can start only a stand-in for the launcher, and programs that the reader models.
    """

    def __init__(self, folder: Path) -> None:
        """Write the launcher's stand-in into `folder`, which must be empty, and the file in which
        the stand-in notes its arguments.
        """
        self.work, self.programs, self.notes = (
            folder / "work",
            folder / "programs",
            folder / "notes",
        )
        self.programs.mkdir()
        starter = self.programs / STARTER
        starter.write_text(STAND_IN.format(target=self.notes), "utf-8")
        starter.chmod(0o755)
        for name in (*PROGRAMS, *STARTING):
            if path := shutil.which(name):
                (self.programs / name).symlink_to(path)

    def reads(self, text: str) -> bool:
        """Return whether a text is valid syntax for bash."""
        command = [str(BASH), "-nO", "extglob"]
        return (
            subprocess.run(
                command, input=text, text=True, capture_output=True, check=False
            ).returncode
            == 0
        )

    def runs(self, text: str) -> Runs:
        """Return the words of each run that bash starts. Raises `subprocess.TimeoutExpired`."""
        return self.run_bash(text)[0]

    def run_bash(self, text: str) -> tuple[Runs, set[int]]:
        """Return the words of each run that bash starts, and the lines on which bash reports errors."""
        # Each script gets an empty folder: files of the one before would change what it does.
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        self.notes.write_bytes(b"")
        script = self.programs.parent / "launch.sh"
        script.write_text(text, "utf-8")
        process = processes.run(
            [str(BASH), "--norc", str(script)], SECONDS, {"PATH": str(self.programs)}, self.work
        )
        error_lines = re.findall(rb"^[^\n]*launch\.sh: line (\d+): ", process.stderr, re.MULTILINE)
        return _parse_notes(self.notes.read_bytes()), {int(line) for line in error_lines}


def _parse_notes(notes: bytes) -> Runs:
    words = os.fsdecode(notes).split("\0")[:-1]
    runs: Runs = []
    while words:
        size = int(words[0])
        runs.append(words[1 : size + 1])
        words = words[size + 1 :]
    return runs


def read_runs(text: str) -> Said:
    """Return the runs that the reader finds in a script."""
    reader = ShellReader("launch.sh", Scope({}))
    reason = ""
    try:
        reader.read(text)
    except BridgeError as error:
        reason = str(error)
    stop = STOPPED.search(reason)
    if reason and not stop:
        return Said([], reason)
    runs: Runs = []
    for command in reader.commands:
        first = text_if_known(command.words[0])
        if first is not None and first not in (STARTER, *STARTING):
            continue
        at = next(
            (index for index, word in enumerate(command.words) if text_if_known(word) == STARTER), 0
        )
        launch: list[Piece] = []
        for index, word in enumerate(command.words):
            # A word before the launcher that sets a variable to an unknown value leaves the launch
            # itself known.
            assigns = (
                bool(word)
                and ASSIGNING.fullmatch(spell_pieces(word[:1])) is not None
                and len(word) > 1
            )
            if index >= at or not assigns:
                launch += word
        unknown = next((piece for piece in launch if isinstance(piece, Unknown)), None)
        if unknown is not None and "a shell stops" in unknown.why and not command.branch:
            return Said(runs, unknown.why, unknown.line)
        if unknown is not None or command.branch:
            return Said(
                [],
                f"line {command.line}: {unknown.why if unknown else 'the command depends on a branch'}",
            )
        words = ["".join(piece.key for piece in word) for word in command.words]
        if words[0] == "env" and STARTER in words:
            before = words[1 : words.index(STARTER)]
            # Options of env and their values, assignments and known starters may stand before it,
            # nothing else.
            plain = [
                word
                for last, word in zip(["", *before], before, strict=False)
                if not last.startswith("-")
            ]
            if any(
                not word.startswith("-") and "=" not in word and word not in STARTING
                for word in plain
            ):
                return Said(
                    [], f"line {command.line}: a program that is missing here may start the run"
                )
        if STARTER in words and "xargs" in words[: words.index(STARTER)]:
            return Said([], f"line {command.line}: xargs adds words to the command")
        if STARTER in words[:1] or (STARTER in words and words[0] in STARTING):
            runs.append(words[words.index(STARTER) + 1 :])
    return Said(runs, reason, int(stop[1]) if stop else 0)


def _places(text: str, line: int) -> set[int]:
    """Return the line numbers that bash may report for an error on `line`: also the first line of
    the command, and the line of a here-document's operator.
    """
    lines, first = text.split("\n"), line
    # Lines joined by a backslash are one command, which begins on the first of them.
    while first > 1 and lines[first - 2].endswith("\\"):
        first -= 1
    operators = (
        number for number in range(first, max(first - 10, 0), -1) if "<<" in lines[number - 1]
    )
    return {*range(first, line + 1), next(operators, first)}


def outcome(bash: Bash, text: str) -> tuple[str, str]:
    """Compare bash with the reader.

    Returns a verdict, and the reason if the reader refuses. The verdict is `equal` if both find the
    same runs, `stopped` if both find the same error after the same runs, `refused` if only the
    reader refuses, else `different`.
    """
    reading = read_runs(text)
    if reading.refused and not reading.stopped:
        return "refused", reading.refused
    try:
        runs, error_lines = bash.run_bash(text)
    except subprocess.TimeoutExpired:
        return (
            "refused" if reading.stopped else "different"
        ), reading.refused or "bash does not end"
    if not reading.stopped:
        return ("equal" if runs == reading.runs else "different"), ""
    # Bash may go on after an error that ends a shell inside it, so later runs are not compared.
    same = runs[: len(reading.runs)] == reading.runs and bool(
        _places(text, reading.stopped) & error_lines
    )
    return ("stopped" if same else "different"), reading.refused
