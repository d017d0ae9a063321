"""What the project of the working directory says: its gate, and how each of its files is read."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from bridge.api.source import STDIN
from bridge.cli.job import Job
from bridge.files import read_text
from bridge.files.commits import GIT
from bridge.files.project import Project, project_of

FILE = "pyproject.toml"
LAUNCHED = ("world-size",)
"""Options that a command which a launcher started does not take from the project: the launcher says them."""


def project() -> Project:
    """Return the settings of the nearest pyproject.toml, in the working directory or above it."""
    folder = nearest_with(FILE)
    if folder is None:
        return Project()
    # Once for all files of a command, and anew if a process runs another command after an edit.
    return _read(folder / FILE, (folder / FILE).stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _read(path: Path, modified_at: int) -> Project:
    return project_of(read_text(path), str(path))


def nearest_with(name: str) -> Path | None:
    """Return the working directory or the nearest folder above it in which a file or folder `name` lies."""
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / name).exists()), None)


def apply_project_settings(job: Job, file: str, launched: bool = False) -> Job:
    """Return the job of one file: what the command line does not say, the project does."""
    settings = project().reading_of(_path(file))
    return job.of(
        file,
        {name: value for name, value in settings.items() if not (launched and name in LAUNCHED)},
    )


def _path(file: str) -> str | None:
    """Return a file's path relative to the project's folder; None if it lies outside of it."""
    if file == STDIN:
        return None
    if file.startswith(GIT):
        path = file.removeprefix(GIT).partition(":")[2]
        # git takes a path that begins with ./ as relative to the working directory.
        top = Path() if path.startswith(("./", "../")) else nearest_with(".git") or Path()
        file = str(top / path)
    folder, name = os.path.split(os.path.abspath(file))
    path = os.path.relpath(
        os.path.join(os.path.realpath(folder), name), os.path.realpath(project().folder)
    )
    return None if path.startswith("..") else Path(path).as_posix()
