"""Checkpoints written: beside their place and renamed at the end; what is done stays done if the process is killed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bridge.errors import SourceError
from bridge.state import digests
from bridge.state.files import File, Late, size_of
from bridge.state.folder import remove, sync, write_text
from bridge.state.formats import Written
from bridge.state.lazy import Run, raw, strips

MARK, DONE, PART = ".mark", ".done", ".part"
SPARE = 2**20
"""Bytes beside the files themselves: names and digests."""
Moved = Callable[[int], None]
"""Told of every piece that is written: how many bytes."""


def write(written: Written, target: Path, sources: Iterable[Path], moved: Moved) -> None:
    """Put the files into the new folder `target`. Raises `SourceError`; what was finished before is found again."""
    if os.path.lexists(target):
        raise SourceError(f"{target}: is there already; name a folder that is not, or remove it")
    if not target.parent.is_dir():
        raise SourceError(f"{target}: there is no directory {target.parent}; create it first")
    staging = target.parent / f".{target.name}.partial"
    try:
        with _alone(staging):
            done = _resumed(staging, _mark(written, sources))
            _room(staging, written, done)
            for file in written.files:
                if file.name in done:
                    moved(file.size)
                else:
                    done[file.name] = _finished(staging, file, moved)
            _close(staging, written, done)
            staging.rename(target)
            sync(target.parent)
    except OSError as error:
        raise SourceError(f"{error.filename or target}: {error.strerror}; make room, or name another folder") from None


@contextmanager
def _alone(staging: Path) -> Iterator[None]:
    """While no other process writes there."""
    staging.mkdir(exist_ok=True)
    descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SourceError(f"{staging}: another process writes there; wait for it, or name another folder") from None
        yield
    finally:
        os.close(descriptor)


def _mark(written: Written, sources: Iterable[Path]) -> str:
    """What must be the same for finished files to be of use: the sources, and what each file consists of."""
    found = hashlib.sha256()
    for path in sources:
        about = path.stat()
        found.update(f"{path.resolve()}\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
    for file in written.files:
        found.update(f"{file.name}\0{file.size}\n".encode())
        for part in file.parts:
            if isinstance(part, bytes):
                found.update(part)
            elif isinstance(part, Run):
                found.update(f"{part.start} {part.stop} {part.source.dtype} {part.source.shape}\n".encode())
    return found.hexdigest()


def _resumed(staging: Path, mark: str) -> dict[str, str]:
    """Digests of the files that a process finished which was killed; if it wrote anything else, all is begun anew."""
    path = staging / MARK
    if path.is_file() and path.read_text() == mark:
        lines = (staging / DONE).read_text().splitlines() if (staging / DONE).is_file() else []
        rows = [line.split("  ", 1) for line in lines]
        return {row[1]: row[0] for row in rows if len(row) == 2 and len(row[0]) == 64 and (staging / row[1]).is_file()}
    for entry in staging.iterdir():
        remove(entry) if entry.is_dir() else entry.unlink()
    write_text(path, mark)
    return {}


def _room(staging: Path, written: Written, done: Iterable[str]) -> None:
    """Raises `SourceError` unless the disk holds what is still to be written."""
    needed = sum(file.size for file in written.files if file.name not in done) + SPARE
    free = shutil.disk_usage(staging).free
    if free < needed:
        raise SourceError(f"{staging}: {free:,} bytes are free, {needed:,} are needed; make room, or name another folder")


def _finished(staging: Path, file: File, moved: Moved) -> str:
    """Write one file down to the disk, note that it is there, and return its digest."""
    path = staging / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + PART)
    with beside.open("wb") as stream:
        digest = hashlib.sha256()
        for piece in pieces(file):
            stream.write(piece)
            digest.update(piece)
            moved(len(piece))
        stream.flush()
        os.fsync(stream.fileno())
    beside.rename(path)
    sync(path.parent)
    with (staging / DONE).open("a") as journal:
        journal.write(f"{digest.hexdigest()}  {file.name}\n")
        journal.flush()
        os.fsync(journal.fileno())
    return digest.hexdigest()


def pieces(file: File) -> Iterator[bytes | memoryview]:
    """The bytes of a file, a few at a time."""
    sums: dict[int, int] = {}
    for part in file.parts:
        if isinstance(part, bytes):
            yield part
        elif isinstance(part, Late):
            yield _late(part, sums)
        else:
            yield from _run(part, sums, file.sums)


def _late(part: Late, sums: dict[int, int]) -> bytes:
    found = part.make([sums[id(run)] for run in part.runs])
    if len(found) != size_of(part):
        raise SourceError(f"{len(found)} bytes of checksums, expected {size_of(part)}")
    return found


def _run(part: Run, sums: dict[int, int], counted: bool) -> Iterator[memoryview]:
    sum_ = 0
    for strip in strips(part.source, part.start, part.stop):
        content = raw(strip)
        sum_ = zlib.crc32(content, sum_) if counted else 0
        yield content
    sums[id(part)] = sum_


def _close(staging: Path, written: Written, done: dict[str, str]) -> None:
    """Put the digests beside the files, and bring every name to the disk."""
    top = written.sums.rpartition("/")[0]
    prefix = f"{top}/" if top else ""
    found = {name.removeprefix(prefix): digest for name, digest in done.items() if name.startswith(prefix)}
    write_text(staging / written.sums, digests.text_of(found))
    for name in (MARK, DONE):
        (staging / name).unlink(missing_ok=True)
    for folder in {staging, *(path.parent for path in _paths(staging, written.files))}:
        sync(folder)


def _paths(staging: Path, files: Sequence[File]) -> Iterator[Path]:
    return (staging / file.name for file in files)
