"""Digests: the file SHA256SUMS with the digest of each file of a checkpoint, in the format of
`sha256sum -c`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from bridge.errors import SourceError
from bridge.files.contained import is_own_blob, plain, read_text, regular
from bridge.files.progress import count_items
from bridge.files.shown import show_value

SUMS = "SHA256SUMS"
LINE = re.compile(
    r"(?P<escaped>\\?)(?:(?P<digest>[0-9a-fA-F]{64}) [ *](?:\./)*(?P<name>.+)|"
    r"SHA256 \((?:\./)*(?P<tagged>.+)\) = (?P<value>[0-9a-fA-F]{64}))"
)
"""A line as `sha256sum` writes it, or with its option --tag. A star stands for binary mode, a name may begin
with `./`, and a backslash before the line says that those in the name are escapes.
"""
ESCAPES = {r"\\": "\\", r"\n": "\n", r"\r": "\r"}
ESCAPE = re.compile(r"\\[\\nr]")
MOST = 2**26
GIT = 40
"""Digits of a SHA-1."""


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _git_digest_of(path: Path) -> str:
    """Return the SHA-1 by which git names a file's content."""
    begin = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, begin.copy).hexdigest()


def blob_digests(folder: Path) -> dict[str, str]:
    """Return the digests of the files in a folder that are links to blobs of the Hugging Face cache, whose names
    are their digests, by file name.
    """
    paths = folder.iterdir() if folder.is_dir() else ()
    blobs = {path.name: path.resolve() for path in paths if path.is_symlink() and path.is_file()}
    home = folder.resolve()
    return {name: blob.name for name, blob in blobs.items() if is_own_blob(blob, home)}


def digest_of_text(text: str) -> str:
    """Return the SHA-256 of a file that contains `text`, in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def text_of(digests: Mapping[str, str]) -> str:
    """Return the content of a file SHA256SUMS; `digests` has the digest of each file by its name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def read_digests(folder: Path, root: Path) -> dict[str, str]:
    """Return the digests in the folder's SHA256SUMS by file name; names may contain folders.
    Raises `SourceError` if a line is not as `sha256sum` writes it, or if two lines of one file differ.
    """
    path = folder / SUMS
    text = read_text(path, root, MOST)
    digests: dict[str, str] = {}
    own = {f"{os.path.abspath(folder)}/", f"{folder.resolve()}/"}
    # With --zero, `sha256sum` ends lines so, and escapes no names.
    for number, line in enumerate(text.split("\0" if "\0" in text else "\n"), 1):
        line = line.removesuffix("\r")
        if not line or line.startswith("#"):  # sha256sum -c skips these too
            continue
        match = LINE.fullmatch(line)
        if match is None:
            raise SourceError(
                f"{path}:{number}: found {show_value(line)}, expected a line of sha256sum; the file is damaged"
            )
        # A name must not lead out of the folder: "..", an absolute path and an empty part are
        # refused.
        name, digest = match["name"] or match["tagged"], match["digest"] or match["value"]
        name = next((name.removeprefix(start) for start in own if name.startswith(start)), name)
        if name.startswith("/"):
            raise SourceError(
                f"{path}:{number}: found {show_value(name)}, a file outside of {folder}; make the list inside this folder, "
                "with names that begin in it"
            )
        for part in name.split("/"):
            bare = ESCAPE.sub("", part) if match["escaped"] else part
            plain(bare.removeprefix("."), f"{path}:{number}: in {show_value(name)}")
        if match["escaped"]:
            name = ESCAPE.sub(lambda escape: ESCAPES[escape[0]], name)
        if digests.setdefault(name, digest.lower()) != digest.lower():
            raise SourceError(
                f"{path}:{number}: found a second digest of {show_value(name)}; the file is damaged"
            )
    return digests


def without_digest(folder: Path, files: Iterable[Path]) -> list[Path]:
    """Return those of the files in a folder, or beside it, for which its SHA256SUMS has no line, and that are
    no blobs with a digest for a name.
    """
    digests = {
        **blob_digests(folder),
        **(read_digests(folder, folder) if (folder / SUMS).is_file() else {}),
    }
    return [path for path in files if os.path.relpath(path, folder) not in digests]


def verify_digests(
    folder: Path, root: Path, names: Iterable[str], digests: Mapping[str, str]
) -> None:
    """Check that the files have these digests. Raises a `SourceError` with a line for each file
    that has changed, is missing, or has no digest.
    """
    SourceError.raise_if(
        problem
        for name in count_items(list(names))
        if (problem := _digest_problem(folder / name, root, digests.get(name)))
    )


def _digest_problem(path: Path, root: Path, expected: str | None) -> str:
    if expected is None:
        return f"{path}: {SUMS} has no line for this file; the checkpoint is damaged"
    try:
        digest = (_git_digest_of if len(expected) == GIT else digest_of)(regular(path, root))
    except SourceError as error:
        return str(error)
    except OSError as error:
        return f"{path}: {error.strerror}; expected a file that can be read"
    size, place = path.stat().st_size, SUMS
    if path.resolve().name == expected:
        place = "the name of its blob"
    message = f"{path}: the {size} bytes of this file have changed (digest {digest[:12]}, {place} has {expected[:12]})"
    return "" if digest == expected else f"{message}; the file is damaged: load another checkpoint"
