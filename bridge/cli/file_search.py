"""Files that a command is given: by name, by pattern, by folder, or from a commit."""

from __future__ import annotations

import glob
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from bridge import limits
from bridge.cli import missing_sizes
from bridge.cli.job import Job
from bridge.errors import BridgeError, SourceError
from bridge.files import as_private_as, reaching
from bridge.report.sarif import place_of

SUFFIXES = (".json", ".hjson", ".yaml", ".yml", ".sh", ".args")
"""Suffixes of files in a folder that may be configs."""
BESIDE = (".carry.json", ".code.json", ".model.json")
"""Suffixes of files that accompany a config and are read with it."""
GIT = "git:"
STDIN = "-"
MANY = 200
"""Largest number of files that are read from one folder of a commit, in addition to the named file."""


def expand_names(names: Sequence[str], exclude: Sequence[str] = ()) -> Iterator[tuple[str, bool]]:
    """Yield each file once, under the first of its names, with true if the user named it.

    Files that come from a folder or pattern have false, as they may belong to no stack. Raises
    `SourceError` for a pattern that matches no file.
    """
    places = set[str]()
    for name in names:
        matches = (
            [(name, True)] if _is_single(name) else [(path, False) for path in _files_inside(name)]
        )
        if not matches and glob.has_magic(name):
            raise SourceError(f"{name}: no file matches the pattern; check the pattern")
        for path, is_named in matches:
            place = place_of(path)
            if place not in places and (
                is_named or not any(fnmatch(path, pattern) for pattern in exclude)
            ):
                places.add(place)
                yield path, is_named


def may_be_several(names: Sequence[str]) -> bool:
    """Whether the names may stand for more than one file."""
    return len(names) > 1 or any(not _is_single(name) for name in names)


def _is_single(name: str) -> bool:
    # A file that is there is meant itself, even if its name has brackets as a pattern has.
    return not os.path.isdir(name) and (os.path.exists(name) or not glob.has_magic(name))


def _files_inside(name: str) -> Iterator[str]:
    """Yield the files of a folder, or the files that match a pattern, sorted.

    Hidden files of a folder are left out.
    """
    if not os.path.isdir(name):
        yield from (
            path for path in sorted(glob.glob(name, recursive=True)) if os.path.isfile(path)
        )
        return
    for folder, folders, files in os.walk(name):
        folders[:] = sorted(inner for inner in folders if not inner.startswith("."))
        for file in sorted(files):
            if file.endswith(SUFFIXES) and not file.endswith(BESIDE) and not file.startswith("."):
                yield os.path.normpath(os.path.join(folder, file))


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
            problems = (
                problem.replace(str(place), name).replace(folder, name.rpartition("/")[0])
                for problem in error.problems
            )
            raise type(error)(*problems) from None


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


@contextmanager
def limit_access(job: Job) -> Iterator[None]:
    """Return a context that limits access to files.

    Files named in the job's file are opened only in its folder, in the folder where the command was
    started, or below a path of --allow-path. Files that are written get no wider permissions than
    the job's file has.
    """
    standard = job.file == STDIN
    folder, source = (Path(), None) if standard else (Path(job.file).parent, job.file)
    # What lies below the folder where a person starts the command is that person's own; below the root lies everything.
    here = (Path(),) if Path().resolve() != Path(Path().resolve().anchor) else ()
    lent = [Path(name).parent for name in job.launchers]
    with (
        reaching(folder, (*here, *job.allow, *lent)),
        as_private_as(source),
        missing_sizes.name_missing_code(),
    ):
        yield
