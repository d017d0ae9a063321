"""Files that a command is given: by name, by pattern, or by folder."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch

from bridge.errors import SourceError
from bridge.report.sarif import place_of

SUFFIXES = (".json", ".hjson", ".yaml", ".yml", ".sh", ".args")
"""Suffixes of files in a folder that may be configs."""
BESIDE = (".carry.json", ".code.json", ".model.json")
"""Suffixes of files that accompany a config and are read with it."""


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
