"""Fixtures for the releases: a process that has one of them, asked with plain data."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import compat
from bridge.stack.dialect import Config, Dialect
from tests.harvesting.process import Process, Verdict

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


RELEASES = [
    Release(compat.load(name), version, row["package"])
    for name, row in TABLE.items()
    for version in row["releases"]
]


@pytest.fixture(
    scope="module", params=RELEASES, ids=lambda release: f"{release.package}-{release.version}"
)
def release(request: pytest.FixtureRequest) -> Release:
    """Each release in turn."""
    found: Release = request.param
    assert found.folder.is_dir(), (
        f"{found.folder}: not installed; run `tox -e versions`, or tests/versions/install.py {FOLDER}"
    )
    return found


@pytest.fixture(scope="module")
def real(release: Release) -> Iterator[Callable[[Config], Verdict]]:
    """Asks the release."""
    process = Process(release.dialect.name, release.version, release.folder)
    answer = process.ask("installed")
    assert answer == {"installed": release.version}, f"{release.folder}: found {answer}"
    yield process
    process.close()
