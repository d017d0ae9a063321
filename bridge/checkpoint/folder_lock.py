"""Folders of checkpoints. Each checkpoint is written into a temporary folder, which gets its name
when all is on the disk; a lock keeps jobs apart.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bridge.checkpoint.schema import STATE
from bridge.errors import BridgeError, SourceError, nearest
from bridge.files.contained import SMALL, path_inside, plain, read_text

LATEST = "latest"
LOCK = ".lock"
PATIENCE = 600.0
"""Number of seconds that a job waits while another job publishes or loads a checkpoint in the same
folder.
"""
TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp")


@contextmanager
def hold_lock(folder: Path, shared: bool = False, patience: float = PATIENCE) -> Iterator[None]:
    """Hold the folder's lock during a `with` statement. A shared lock can be held by several
    readers at once. Raises `BridgeError` if another job holds the lock for more than `patience`
    seconds.
    """
    path = folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        # A reader may have no lock file: on a read-only file system, or where no job ever wrote.
        # Then nobody is in its way.
        if not shared:
            raise
        yield
        return
    try:
        _take_lock(descriptor, path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, patience)
        yield
    finally:
        os.close(descriptor)


def _take_lock(descriptor: int, path: Path, kind: int, patience: float) -> None:
    until = time.monotonic() + patience
    while not _try_lock(descriptor, kind):
        if time.monotonic() > until:
            raise BridgeError(
                f"{path}: another job has held this lock for {patience:.0f} s; end that job, or "
                "choose another folder"
            )
        time.sleep(0.02)


def _try_lock(descriptor: int, kind: int) -> bool:
    """Try to lock a file, and return False if another job holds the lock. On a file system without
    locks, every job gets the lock.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@dataclass
class Saving:
    """A checkpoint that is being written into the folder `temporary`. This job holds a lock on the
    folder as long as it lives, so that other jobs do not remove it.
    """

    folder: Path
    tag: str
    temporary: Path
    _held: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def begin(cls, folder: Path, tag: str) -> Saving:
        """Remove temporary folders that killed jobs left behind, and make one for the checkpoint
        `tag`. Raises `SourceError` if `tag` cannot be the name of a folder.
        """
        path_inside(folder / plain(tag, "tag"), folder)
        if tag == LATEST:
            raise SourceError(
                f"tag: found {LATEST!r}, which is the name of the file that names the newest checkpoint; choose another tag"
            )
        folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder):
            # Killed jobs leave folders that nobody has locked; releases before the lock left a
            # folder named by the tag alone.
            for path in folder.glob(".*.tmp"):
                if path.name == f".{tag}.tmp" or (
                    TEMPORARY.fullmatch(path.name) and _is_abandoned(path)
                ):
                    remove_path(path)
            saving = cls(folder, tag, folder / f".{tag}.{secrets.token_hex(8)}.tmp")
            saving.temporary.mkdir()
            descriptor = os.open(saving.temporary, os.O_RDONLY)
            saving._held.callback(os.close, descriptor)
            _try_lock(descriptor, fcntl.LOCK_EX)
        return saving

    def publish(self, texts: Mapping[str, str], latest: bool) -> Path:
        """Add small files to the checkpoint, wait until all is on the disk, and give the folder
        the checkpoint's name. An earlier checkpoint of this name is removed. Returns the folder.
        """
        for name, text in texts.items():
            write_text(self.temporary / name, text)
        sync_folder(self.temporary)
        final, old = self.folder / self.tag, self.folder / f".{self.tag}.old"
        with hold_lock(self.folder):
            # A folder cannot be renamed over one that holds files. Between the two renames only
            # `old` is there: `find_folder` looks for it too, so a job that is killed here loses nothing.
            if os.path.lexists(final):
                remove_path(old)
                final.rename(old)
            self.temporary.rename(final)
            sync_folder(self.folder)
            if latest:
                # The checkpoint's name is on the disk before `latest` names it, so `latest` never
                # leads nowhere.
                pointer = self.folder / f".{LATEST}.tmp"
                write_text(pointer, self.tag)
                pointer.rename(self.folder / LATEST)
                sync_folder(self.folder)
            remove_path(old)
        self._held.close()
        return final

    def discard(self) -> None:
        """Remove the temporary folder. A checkpoint that was published already stays."""
        remove_path(self.temporary)
        self._held.close()
        if self.temporary.exists():
            warnings.warn(
                f"{self.temporary}: this incomplete checkpoint could not be removed; remove it by "
                "hand",
                stacklevel=2,
            )


def _is_abandoned(path: Path) -> bool:
    """Return whether a temporary folder was left behind, that is, no job holds its lock. Return
    False if this cannot be found out.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def remove_path(path: Path) -> None:
    """Remove a folder with its content, or a link without its target.

    Do nothing if there is neither.
    """
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a file, and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names of the files in a folder are on the disk, so that a power failure does
    not undo a rename.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_folder(folder: Path, tag: str | None) -> Path:
    """Return the folder of the checkpoint `tag`, or without a tag, of the checkpoint that the file
    `latest` names. If a job was killed while it replaced this checkpoint, return the folder of the
    earlier checkpoint of this name. Raises `SourceError` if there is none.
    """
    if tag is None:
        pointer = folder / LATEST
        if not os.path.lexists(pointer):
            raise SourceError(
                f"{folder}: found no file {LATEST!r}, which would name a checkpoint; give a tag, or save first"
            )
        tag = plain(read_text(pointer, folder, SMALL).strip(), pointer)
    else:
        plain(tag, "tag")
    for path in (folder / tag, folder / f".{tag}.old"):
        if os.path.lexists(path_inside(path, folder) / STATE):
            return path
    raise SourceError(
        f"{folder / tag}: found no checkpoint; correct the tag{nearest(tag, list_tags(folder))}"
    )


def list_tags(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder."""
    return [
        path.name
        for path in folder.glob("*")
        if (path / STATE).exists() and not path.name.startswith(".")
    ]
