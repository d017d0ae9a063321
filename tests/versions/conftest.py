"""Fixtures for the releases: a process that has one of them, asked with plain data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import compat
from bridge.dialect import Config, Dialect

HERE = Path(__file__).parent
TABLE = tomllib.loads((HERE / "releases.toml").read_text("utf-8"))
FOLDER = Path(os.environ.get("STAGEBRIDGE_RELEASES", HERE / "installed"))


@dataclass(frozen=True)
class Release:
    """One release of a stack, and where it is installed."""

    dialect: Dialect
    version: str
    package: str

    @property
    def folder(self) -> Path:
        """What `install.py` made."""
        return FOLDER / f"{self.package}=={self.version}"


RELEASES = [Release(compat.load(name), version, row["package"]) for name, row in TABLE.items() for version in row["releases"]]


@dataclass(frozen=True)
class Verdict:
    """What a real release made of a config: values by path, or the reason of its refusal; and what we say it holds."""

    held: dict[str, Any]
    refused: str
    expected: dict[str, Any]

    @property
    def differing(self) -> dict[str, tuple[Any, Any]]:
        """Ours and theirs where they differ, of the values that both have."""
        both = self.expected.keys() & self.held.keys()
        return {path: (self.expected[path], self.held[path]) for path in both if self.expected[path] != self.held[path]}

    @property
    def compared(self) -> int:
        """How many values both have."""
        return len(self.expected.keys() & self.held.keys())


class Worker:
    """A process with one release: `tests/versions/worker.py`."""

    def __init__(self, release: Release) -> None:
        paths = [str(release.folder), str(Path(compat.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, str(HERE / "worker.py"), release.dialect.name, release.package, release.version]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.real = import_module(f"compat.{release.dialect.name}.runtime.real")

    def ask(self, question: Any) -> dict[str, Any]:
        """The answer to one question; fails if the process died."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"{self.process.args}: ended without an answer"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __call__(self, config: Config) -> Verdict:
        """What the release makes of a config."""
        question, expected = self.real.posed(config)
        answer = self.ask(question)
        return Verdict(answer.get("held", {}), answer.get("refused", ""), json.loads(json.dumps(expected, default=str)))

    def close(self) -> None:
        """End the process, which has answered all that it was asked; how long a stack takes to unload is no matter."""
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module", params=RELEASES, ids=lambda release: f"{release.package}-{release.version}")
def release(request: pytest.FixtureRequest) -> Release:
    """Each release in turn."""
    found: Release = request.param
    assert found.folder.is_dir(), f"{found.folder}: not installed; run `tox -e versions`, or tests/versions/install.py {FOLDER}"
    return found


@pytest.fixture(scope="module")
def real(release: Release) -> Iterator[Callable[[Config], Verdict]]:
    """Asks the release."""
    worker = Worker(release)
    yield worker
    worker.close()
