"""Files of a folder that may come from somebody else.

They are opened by plain names, and no link may lead out of the folder.
"""

from __future__ import annotations

import stat
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


def inside(path: Path, root: Path) -> Path:
    """Return `path`, which lies below `root`.

    Raises `SourceError` if a link in `path` leads out of `root`.
    """
    try:
        real, home = path.resolve(), root.resolve()
    except (OSError, RuntimeError) as error:
        raise SourceError(f"{path}: {error}; the link leads nowhere") from None
    if not real.is_relative_to(home):
        raise SourceError(
            f"{path}: a link that leads to {real}, outside of {home}; replace the link by the file"
        )
    return path


def regular(path: Path, root: Path) -> Path:
    """Return `path`, a regular file below `root`.

    Raises `SourceError` for a link out of `root`, and for any other kind of file.
    """
    try:
        mode = inside(path, root).stat().st_mode
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; expected a file") from None
    if not stat.S_ISREG(mode):
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
