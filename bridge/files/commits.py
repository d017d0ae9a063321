"""Files of a commit: `git:REV:PATH` names one, which is copied with the files beside it while it is read."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from bridge import limits
from bridge.errors import BridgeError, SourceError

GIT = "git:"
MANY = 200
"""Largest number of files that are read from one folder of a commit, in addition to the named file."""


@contextmanager
def at_hand(name: str) -> Iterator[str]:
    """Return a context with the path of a file.

    For a file of a commit (`git:REV:PATH`), this file and the files that accompany it are copied
    into a temporary folder.
    """
    if not name.startswith(GIT):
        yield name
        return
    revision, colon, path = name.removeprefix(GIT).partition(":")
    # git takes a revision that begins with a dash for an option.
    if not (revision and colon and path) or revision.startswith("-"):
        raise SourceError(f"{name}: expected git:REV:PATH, such as git:HEAD~1:configs/ds.json")
    if path.startswith(("./", "../")):
        path = _path_below_top(path, name)
    with TemporaryDirectory(prefix="stagebridge-") as folder:
        place = Path(folder) / PurePosixPath(path).name
        for file in _list_commit_files(revision, path, name):
            content = _run_git(
                ["cat-file", "blob", f"{revision}:{PurePosixPath(path).with_name(file)}"], name
            )
            (Path(folder) / file).write_bytes(content)
        if not place.exists():
            raise SourceError(f"{name}: no such file in that commit; check the path")
        try:
            yield str(place)
        except BridgeError as error:
            # Errors name the file as the user did, not the copy in a folder that is about to go.
            error.reword(
                problem.replace(str(place), name).replace(folder, name.rpartition("/")[0])
                for problem in error.problems
            )
            raise


def _path_below_top(path: str, name: str) -> str:
    """Return a path of the current folder relative to the top of the repository, as git expects."""
    prefix = (
        _run_git(["rev-parse", "--show-prefix"], name).decode(errors="replace").removesuffix("\n")
    )
    below = os.path.normpath(os.path.join(prefix, path))
    if below.startswith(".."):
        raise SourceError(f"{name}: lies outside of the repository; check the path")
    return below


def _list_commit_files(revision: str, path: str, name: str) -> Iterator[str]:
    """Yield the names of the files that a commit has in the folder of `path`, the file `path` itself first.

    Files larger than a config are left out.
    """
    folder = str(PurePosixPath(path).parent)
    within = [] if folder == "." else ["--", f"{folder}/"]
    rows = (
        _run_git(["ls-tree", "--full-tree", "-l", "-z", revision, *within], name)
        .decode(errors="replace")
        .split("\0")
    )
    own = PurePosixPath(path).name
    sizes = {}
    for row in filter(None, rows):
        about, _, file = row.partition("\t")
        mode, kind, _, size = about.split()
        # A link (mode 120000) is stored as the path that it leads to, which is no config.
        if kind == "blob" and mode != "120000" and int(size) <= limits.TEXT:
            sizes[PurePosixPath(file).name] = int(size)
    yield from (
        file for file in [own, *[file for file in sizes if file != own][:MANY]] if file in sizes
    )


def _run_git(words: Sequence[str], name: str) -> bytes:
    """Return the output of a git command.

    Programs that the repository's own config names, such as an fsmonitor, are not run.
    """
    # A repository's own config may name a program as its fsmonitor, which git runs; no lock, as others may work there;
    # English, so that `fatal: ` can be cut off.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        process = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *words],
            capture_output=True,
            env=environment,
            check=False,
        )
    except FileNotFoundError:
        raise SourceError(f"{name}: git is not installed; name a file") from None
    if process.returncode:
        reason = process.stderr.decode(errors="replace").strip().splitlines()
        raise SourceError(
            f"{name}: {reason[-1].removeprefix('fatal: ') if reason else 'git failed'}; check revision and path"
        )
    return process.stdout
