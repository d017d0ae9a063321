"""Writing of checkpoints with several processes. The files go into a temporary folder next to the
target, which is renamed at the end. If the command is killed, finished files stay, and the same
command continues after them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bridge import __version__
from bridge.checkpoint import digests, worker_pool
from bridge.checkpoint.files import File, Late, size_of
from bridge.checkpoint.folder_lock import remove_path, sync_folder, write_text
from bridge.checkpoint.interface import PlannedFiles
from bridge.checkpoint.lazy import STRIP, WIDTH, ElementRun, raw_bytes, read_strips
from bridge.checkpoint.worker_pool import UnwrittenError
from bridge.errors import SourceError
from bridge.files.contained import Stamp, refuse_changes, stamps_of

MARK, DONE, PART, KEPT = ".mark", ".done", ".part", ".kept"
"""Names in the temporary folder: a file with the digest of the task, a file that lists the
finished files, the suffix of an unfinished file, and the suffix of a note that says how many bytes
of an unfinished file are certainly on the disk.
"""
SPARE, BLOCK = 2**16, 2**12
"""Numbers of bytes that must stay free on the disk: for names and digests, and for the last block of each file."""
STAGE = 2**29
"""Number of bytes after which a file is flushed to the disk, so that a killed command loses no
more than these.
"""
PATIENCE = 10.0
"""Number of seconds to wait until the processes of a killed command have ended."""
Moved = Callable[[int, bool], None]
"""Function that is told of progress: a number of bytes, and whether they were written now (true)
or by an earlier run of the command.
"""


def write_checkpoint(
    plan: PlannedFiles, target: Path, sources: Iterable[Path], report: Moved, processes: int = 1
) -> None:
    """Write the files into the new folder `target`. Raises `SourceError` if that fails.

    If the disk is full or the command is killed, the files written so far stay in a folder next to
    `target`, and the same call continues after them. If the source checkpoint turns out to be
    damaged, or if one of its files changed since it was first read, no file stays.
    """
    if os.path.lexists(target):
        raise SourceError(f"{target}: this path exists already; name a new folder, or remove it")
    if not target.parent.is_dir():
        raise SourceError(f"{target}: found no folder {target.parent}; create this folder first")
    staging = target.parent / f".{target.name}.partial"
    try:
        stamps = stamps_of(sources)
        with _lock_staging(staging):
            _write_into(plan, staging, stamps, report, processes)
            staging.rename(target)
            sync_folder(target.parent)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        keeps_part = full or os.path.isdir(staging)
        advice = _advice_after_failure(staging) if keeps_part else "name another folder"
        if os.path.islink(staging):
            advice = (
                f"{staging} is a link, and nothing was written; remove it, or name another folder"
            )
        raise SourceError(f"{error.filename or target}: {error.strerror}; {advice}") from None
    except UnwrittenError as error:
        raise SourceError(
            *(f"{problem}; {_advice_after_failure(staging)}" for problem in error.problems)
        ) from None
    except KeyboardInterrupt as error:
        error.add_note(_advice_after_failure(staging))
        raise


def _write_into(
    plan: PlannedFiles, staging: Path, stamps: Mapping[Path, Stamp], report: Moved, processes: int
) -> None:
    """Write all files into the folder `staging`. If the source checkpoint turns out to be damaged,
    or differs from its `stamps`, the folder is removed.
    """
    sums_by_name = _read_finished_digests(staging, _task_digest(plan, stamps))
    rest = [file for file in plan.files if file.name not in sums_by_name]
    continues = bool(sums_by_name) or any(_partial_file(staging, file).size for file in rest)
    try:
        # Too little room must not remove what an earlier try has written; a source that is refused
        # later does.
        _check_room(staging, rest)
        continues = False
        report(sum(file.size for file in plan.files) - sum(file.size for file in rest), False)
        sums_by_name |= _write_all(staging, rest, report, processes)
        _close_staging(staging, plan, sums_by_name)
        refuse_changes(stamps)
    except UnwrittenError:
        raise
    except SourceError as error:
        if continues:
            raise UnwrittenError(*error.problems) from None
        remove_path(staging)
        raise


def _advice_after_failure(staging: Path) -> str:
    """Return what the user can do after a failure, as the end of a message."""
    advice = (
        f"{staging} keeps the finished part: make room and repeat the command to continue, or "
        "remove this folder"
    )
    return advice if os.path.isdir(staging) else "make room on the disk, or name another folder"


def _write_all(
    staging: Path, files: Sequence[File], report: Moved, processes: int
) -> dict[str, str]:
    """Write these files, in several processes if there are several files. Returns the digests of
    all finished files by name.
    """
    if min(processes, len(files)) < 2:
        return {file.name: _finish_file(staging, file, report) for file in files}
    # The largest first: one that began last would keep one process busy while all others have
    # ended.
    largest = sorted(files, key=lambda file: -file.size)
    worker_pool.share_work(
        min(processes, len(files)),
        len(files),
        lambda number, tell: _finish_file(staging, largest[number], tell),
        report,
    )
    sums = _read_journal(staging)
    SourceError.raise_if(
        f"{staging / file.name}: the process that writes this file ended too early"
        for file in files
        if file.name not in sums
    )
    return sums


@contextmanager
def _lock_staging(staging: Path) -> Iterator[None]:
    """Hold the lock of the folder `staging` during a `with` statement. Raises `SourceError` if
    another process holds it.
    """
    staging.mkdir(exist_ok=True)
    descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        until = time.monotonic() + PATIENCE
        while not _try_lock(descriptor):
            if time.monotonic() > until:
                raise SourceError(
                    f"{staging}: another process writes into this folder; wait until it ends, or name another folder"
                )
            time.sleep(0.05)
        if not staging.exists() or os.stat(staging).st_ino != os.fstat(descriptor).st_ino:
            raise SourceError(
                f"{staging}: another command finished this folder meanwhile; name another folder"
            )
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _task_digest(plan: PlannedFiles, stamps: Mapping[Path, Stamp]) -> str:
    """Return a digest of the task: the source files and the parts of each file to write. Finished
    files are reused only if this digest is the same.
    """
    digest = hashlib.sha256(__version__.encode())
    for path, stamp in sorted(stamps.items()):
        digest.update(f"{path.resolve()}\0{stamp}\n".encode(errors="surrogateescape"))
    for file in plan.files:
        digest.update(f"{file.name}\0{file.size}\n".encode())
        for part in file.parts:
            if isinstance(part, bytes):
                digest.update(part)
            elif isinstance(part, ElementRun):
                digest.update(
                    f"{part.start} {part.stop} {part.source.dtype} {part.source.shape}\n".encode()
                )
    return digest.hexdigest()


def _read_finished_digests(staging: Path, mark: str) -> dict[str, str]:
    """Return the digests of the files that an earlier run of the command finished, by name. Files
    of another task are removed. Raises `SourceError` if the folder is not of this command.
    """
    path = staging / MARK
    note = path.read_bytes()[: len(mark) + 1].decode(errors="replace") if path.is_file() else None
    if note == mark:
        return _read_journal(staging)
    # A killed command leaves the mark of its task, or a part of one.
    if any(staging.iterdir()) and (note is None or not re.fullmatch(r"[0-9a-f]{0,64}", note)):
        raise SourceError(
            f"{staging}: found files that no command of stagebridge left here; move this folder away"
        )
    for entry in staging.iterdir():
        remove_path(entry) if entry.is_dir() else entry.unlink()
    write_text(path, mark)
    return {}


def _read_journal(staging: Path) -> dict[str, str]:
    """Return the digests of the finished files by name, from the list in the temporary folder."""
    # The last line may be half written. Lines that are not a digest and the name of a file are
    # passed over, and the file is written again.
    lines = (staging / DONE).read_text().splitlines() if (staging / DONE).is_file() else []
    rows = [line.split("  ", 1) for line in lines]
    return {
        row[1]: row[0]
        for row in rows
        if len(row) == 2 and len(row[0]) == 64 and (staging / row[1]).is_file()
    }


def _check_room(staging: Path, rest: Iterable[File]) -> None:
    """Raise `SourceError` unless the disk has space for all that is left to write."""
    sizes = [file.size - _partial_file(staging, file).size for file in rest]
    spare = SPARE + BLOCK * len(sizes)
    free = shutil.disk_usage(staging).free
    if free < sum(sizes) + spare:
        raise SourceError(
            f"{staging.parent}: {free:,} bytes are free, but {sum(sizes):,} are to be written, with {spare:,} more for "
            "names and digests; make room on the disk, or name another folder"
        )


@dataclass(frozen=True)
class Kept:
    """The bytes of an unfinished file that are certainly on the disk: their number, counted from
    the beginning of the file, and their digest.
    """

    size: int = 0
    digest: str = ""


def _partial_file(staging: Path, file: File) -> Kept:
    beside = staging / f"{file.name}{PART}"
    note = staging / f"{file.name}{KEPT}"
    if not beside.is_file() or not note.is_file():
        return Kept()
    digest, _, size = note.read_text().partition(" ")
    part = Kept(int(size), digest) if size.isdigit() and len(digest) == 64 else Kept()
    return part if beside.stat().st_size >= part.size <= file.size else Kept()


def _finish_file(staging: Path, file: File, report: Moved) -> str:
    """Write one file, add it to the list of finished files, and return its digest."""
    path = staging / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _partial_file(staging, file)
    # If the bytes that were kept are not those that were noted, the file is written again from its
    # beginning.
    digest = _fill_file(path, file, part, report) or _fill_file(path, file, Kept(), report)
    path.with_name(path.name + PART).rename(path)
    path.with_name(path.name + KEPT).unlink(missing_ok=True)
    sync_folder(path.parent)
    line = f"{digest}  {file.name}\n".encode()
    descriptor = os.open(staging / DONE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(descriptor, line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digest


def _fill_file(path: Path, file: File, part: Kept, report: Moved) -> str:
    """Write the rest of a file. Its first bytes, which `part` describes, are on the disk already.
    Returns the digest of the file, or an empty text if these bytes have changed.
    """
    beside, digest = path.with_name(path.name + PART), hashlib.sha256()
    with beside.open("r+b" if part.size else "wb") as stream:
        stream.truncate(part.size)
        at, last_note = 0, part.size
        for piece in content_pieces(file, stream, part.size):
            digest.update(piece)
            if at >= part.size:
                stream.write(piece)
            at += len(piece)
            if at == part.size and digest.hexdigest() != part.digest:
                return ""
            report(len(piece), at > part.size)
            if at - last_note >= STAGE:
                last_note = _write_note(stream, path, at, digest.hexdigest())
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


def _write_note(stream: IO[bytes], path: Path, at: int, digest: str) -> int:
    """Flush the bytes written so far to the disk, and then write the note with their number and
    digest. Returns their number.
    """
    stream.flush()
    os.fsync(stream.fileno())
    note = path.with_name(path.name + KEPT)
    write_text(note.with_name(f"{note.name}~"), f"{digest} {at}")
    note.with_name(f"{note.name}~").rename(note)
    return at


def content_pieces(
    file: File, before: IO[bytes] | None = None, size_on_disk: int = 0
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file to write, in pieces of at most one strip. An earlier run of the
    command has written the first `size_on_disk` bytes, which are read from the stream `before`.
    """
    sums: dict[int, int] = {}
    at = 0
    for part in file.parts:
        for piece in _part_bytes(
            part, sums, file.sums, before if at < size_on_disk else None, size_on_disk - at
        ):
            at += len(piece)
            yield piece


def _part_bytes(
    part: bytes | ElementRun | Late,
    sums: dict[int, int],
    with_sum: bool,
    before: IO[bytes] | None,
    size_on_disk: int,
) -> Iterator[bytes | memoryview]:
    if isinstance(part, ElementRun):
        yield from _run_bytes(part, sums, with_sum, before, size_on_disk)
        return
    content = part if isinstance(part, bytes) else _late_bytes(part, sums)
    if before is not None:
        content = before.read(len(content))
    yield content


def _late_bytes(part: Late, sums: dict[int, int]) -> bytes:
    found = part.make([sums[id(run)] for run in part.runs])
    if len(found) != size_of(part):
        raise SourceError(f"expected {size_of(part)} bytes of checksums, found {len(found)}")
    return found


def _run_bytes(
    part: ElementRun,
    sums: dict[int, int],
    with_sum: bool,
    before: IO[bytes] | None,
    size_on_disk: int,
) -> Iterator[bytes | memoryview]:
    sum_, width = 0, WIDTH[part.source.dtype]
    start = part.start
    while before is not None and size_on_disk > 0 and start < part.stop:
        count = min(part.stop - start, max(1, STRIP // width))
        content: bytes | memoryview = before.read(count * width)
        sum_ = zlib.crc32(content, sum_) if with_sum else 0
        start, size_on_disk = start + count, size_on_disk - len(content)
        yield content
    for strip in read_strips(part.source, start, part.stop):
        content = raw_bytes(strip)
        sum_ = zlib.crc32(content, sum_) if with_sum else 0
        yield content
    sums[id(part)] = sum_  # a `Late` behind it asks for it; without one it stays 0


def _close_staging(staging: Path, plan: PlannedFiles, sums_by_name: dict[str, str]) -> None:
    """Write SHA256SUMS with the digests of all files, remove the notes, and wait until every name
    is on the disk.
    """
    top = plan.sums.rpartition("/")[0]
    prefix = f"{top}/" if top else ""
    own_sums = {
        name.removeprefix(prefix): digest
        for name, digest in sums_by_name.items()
        if name.startswith(prefix)
    }
    write_text(staging / plan.sums, digests.text_of(own_sums))
    for name in (MARK, DONE):
        (staging / name).unlink(missing_ok=True)
    for folder in {staging, *((staging / file.name).parent for file in plan.files)}:
        sync_folder(folder)


def find_output_inside(output: Path, folder: Path) -> Iterator[str]:
    """Yield a message if an output lies inside `folder`, the source checkpoint."""
    if output.resolve().is_relative_to(folder.resolve()):
        yield f"-o: {output} lies inside {folder}, the checkpoint that is read; name a folder outside it"
