"""The separate process that runs a release. Questions are sent to it, and its answers are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import bridge
from bridge.errors import BridgeError
from bridge.stack.dialect import Config
from tests.harvesting import JUDGES

HERE = (str(Path(bridge.__file__).parents[1]), str(Path(__file__).parents[2]))


@dataclass(frozen=True)
class Verdict:
    """A release's result for a config: its values by path (`held`), or why it refuses the config.

    `expected` are the values of our reader.
    """

    held: dict[str, Any]
    refused: str
    expected: dict[str, Any]

    @property
    def differing(self) -> dict[str, tuple[Any, Any]]:
        """The pairs of our value and the release's value, for paths at which they differ."""
        both = self.expected.keys() & self.held.keys()
        return {
            path: (self.expected[path], self.held[path])
            for path in both
            if self.expected[path] != self.held[path]
        }

    @property
    def value_count(self) -> int:
        """Number of values that both our reader and the release have."""
        return len(self.expected.keys() & self.held.keys())


def environment(root: Path | None = None) -> dict[str, str]:
    """Return the variables of a process that finds these modules and, in the folder `root`, a release."""
    # The release comes first: this environment may have another one installed.
    paths = [*([str(root)] if root else []), *HERE, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Process:
    """A separate process that runs the release of `stack` in the folder `root`, or the installed release."""

    def __init__(self, stack: str, release: str, root: Path | None = None) -> None:
        command = [
            sys.executable,
            "-P",
            # No compiled files: they would stay in the user's tree, and hide an edit of the same second.
            "-B",
            "-m",
            "tests.harvesting.worker",
            stack,
            release,
            str(root or ""),
        ]
        self.stack, self.errors = stack, tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            command,
            env=environment(root),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def ask(self, question: Any) -> dict[str, Any]:
        """Return the answer to one question.

        Raises `BridgeError` with the last output line if the process died.
        """
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise BridgeError(self._last_words()) from None
        line = self.process.stdout.readline()
        if not line:
            raise BridgeError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self.errors.seek(0)
        words = [line for line in self.errors.read().splitlines() if line.strip()]
        last = words[-1] if words else "none"
        return f"{self.stack}: the process that runs this stack ended without an answer; last line of errors: {last}"

    def __call__(self, config: Config) -> Verdict:
        """Return the release's verdict on a config."""
        question, expectation = import_module(f"{JUDGES}.{self.stack}").pose_config(config)
        answer = self.ask(question)
        return Verdict(
            answer.get("held", {}),
            answer.get("refused", ""),
            json.loads(json.dumps(expectation, default=str)),
        )

    def close(self) -> None:
        """Kill the process. A regular end would take long, because some stacks are slow to unload."""
        self.process.kill()
        self.process.wait()
        self.errors.close()
