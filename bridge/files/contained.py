"""Files of a folder that may come from somebody else.

They are opened by plain names, and no link may lead out of the folder.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from bridge.errors import SourceError
from bridge.files.shown import show_value

LONGEST = 200
"""Largest length of a file name in bytes.

Temporary names add a few bytes and still fit every file system.
"""
SMALL = 2**12
"""Largest size in bytes of a file whose content is a file name."""


def plain(name: str, where: object) -> str:
    """Return `name`, which has to be a plain file name: no path, not hidden.

    Raises `SourceError` otherwise, with a message that starts with `where`.
    """
    if not name or name.startswith(".") or "/" in name or "\\" in name or not name.isprintable():
        raise SourceError(
            f"{where}: found {show_value(name)}, expected a plain name; a path could lead out of the folder"
        )
    size = len(name.encode(errors="surrogateescape"))
    if size > LONGEST:
        raise SourceError(
            f"{where}: found a name of {size} bytes, expected at most {LONGEST}; "
            "choose a shorter one"
        )
    return name


LONGEST_PART = 249
"""Largest length in bytes of a part of a path that is written: file systems take 255, and temporary
names add 6.
"""


def find_flaw_of_path(path: str) -> str:
    """Return why no file of this path, with `/` between its parts, can be written in a folder; empty
    if one can.
    """
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return f"found the part {part!r} of a path, which leads to no file in the folder"
        try:
            size = len(os.fsencode(part))
        except UnicodeEncodeError:
            return "found characters that no name of a file can have"
        if "\0" in part or size > LONGEST_PART:
            return f"found a NUL, or a part of {size} bytes, expected at most {LONGEST_PART}"
    return ""


Stamp = tuple[int, int, int, int]
"""What shows that a file was changed or replaced: its size, the times of its last change, its inode."""


@dataclass
class ReadFiles:
    """The files that a command reads, each with its stamp from before it was read, and the number of
    their bytes. `told` is called with the size of each.
    """

    told: Callable[[int], object] = lambda size: None
    stamps: dict[Path, Stamp] = field(default_factory=dict)
    size: int = 0

    def add(self, path: Path, about: os.stat_result) -> None:
        """Note a file, unless it is noted already."""
        if path not in self.stamps:
            self.stamps[path] = stamp_of(about)
            self.size += about.st_size
            self.told(about.st_size)


_READ: ContextVar[ReadFiles | None] = ContextVar("_READ", default=None)


@contextmanager
def note_files(files: ReadFiles) -> Iterator[ReadFiles]:
    """Note every file of a folder that is opened within a `with` statement."""
    token = _READ.set(files)
    try:
        yield files
    finally:
        _READ.reset(token)


def stamp_of(about: os.stat_result) -> Stamp:
    """Return the stamp of a file."""
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino


def stamps_of(paths: Iterable[Path]) -> dict[Path, Stamp]:
    """Return the stamp of each of these files and of every file that was noted, from before it was
    first read.
    """
    notes = _READ.get()
    early = notes.stamps if notes else {}
    return {**{path: early.get(path) or stamp_of(path.stat()) for path in paths}, **early}


def refuse_changes(stamps: Mapping[Path, Stamp]) -> None:
    """Raise a `SourceError` that names each file that was changed or replaced since it has its stamp."""
    changes = []
    for path, stamp in stamps.items():
        try:
            same = stamp_of(path.stat()) == stamp
        except OSError:
            same = False
        if not same:
            changes.append(
                f"{path}: this file changed while it was read; repeat the command once nothing writes it"
            )
    SourceError.raise_if(changes)


def path_inside(path: Path, root: Path) -> Path:
    """Return `path`, which lies below `root`.

    Raises `SourceError` if a link in `path` leads out of `root`. In the cache of huggingface_hub, the
    links of a snapshot may lead to the blobs of its own repository.
    """
    try:
        real, home = path.resolve(), root.resolve()
    except (OSError, RuntimeError) as error:
        raise SourceError(f"{path}: {error}; the link leads nowhere") from None
    if not real.is_relative_to(home) and not is_own_blob(real, home):
        raise SourceError(
            f"{path}: a link that leads to {real}, outside of {home}; replace the link by the file"
        )
    return path


BLOB = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
"""Names of blobs: the digest of their content, by SHA-1 as in git or by SHA-256."""


def is_own_blob(real: Path, home: Path) -> bool:
    """Return whether a file is a blob of the repository of which `home` is a snapshot or lies in one:
    `models--NAME/snapshots/REVISION`, with the content of its files in `models--NAME/blobs`.
    """
    for place in (home, *home.parents):
        repository = place.parent.parent
        if place.parent.name == "snapshots" and repository.name.startswith("models--"):
            return real.parent == repository / "blobs" and BLOB.fullmatch(real.name) is not None
    return False


NEVER_FOLDERS = r".+\.(?:json|jinja|txt|model|safetensors)|(?:optimizer|scheduler|scaler|rng_state)\w*\.\w+|SHA256SUMS"
FILES = {
    True: re.compile(NEVER_FOLDERS),
    False: re.compile(rf"{NEVER_FOLDERS}|.+\.(?:bin|pt|pth|pkl|distcp)|\.metadata|latest"),
}
"""Names that files of checkpoints have, and files beside them: those that no folder has, and all."""


def refuse_special_files(folder: Path) -> None:
    """Raise a `SourceError` that names each entry of a folder with the name of a file that is none, such as a
    pipe or a folder: a reader would wait for it, or take what it should hold for missing.
    """
    SourceError.raise_if(
        f"{entry.path}: found no regular file; put a regular file there"
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name)
        if FILES[entry.is_dir()].fullmatch(entry.name)
        and not entry.is_file()
        and os.path.exists(entry.path)
    )


def regular(path: Path, root: Path) -> Path:
    """Return `path`, a regular file below `root`.

    Raises `SourceError` for a link out of `root`, and for any other kind of file.
    """
    try:
        about = path_inside(path, root).stat()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; expected a file") from None
    if record := _READ.get():
        record.add(path, about)
    if not stat.S_ISREG(about.st_mode):
        raise SourceError(f"{path}: found no regular file; put a regular file there")
    return path


def read_bytes(path: Path, root: Path, most: int) -> bytes:
    """Return the content of a file below `root`.

    Raises `SourceError` if the file has more than `most` bytes.
    """
    try:
        with regular(path, root).open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; expected a file that can be read") from None
    if len(content) > most:
        raise SourceError(f"{path}: found more than {most} bytes; a file of this kind is smaller")
    return content


def read_text(path: Path, root: Path, most: int) -> str:
    """Return the text of a UTF-8 file below `root`.

    Raises `SourceError` for the same reasons as `read_bytes`, and for text that is not UTF-8.
    """
    try:
        return read_bytes(path, root, most).decode()
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: not UTF-8 at byte {error.start}; the file is damaged") from None
