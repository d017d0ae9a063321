"""Locks on a folder: files that belong together are read and written as one set."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PATIENCE, PAUSE = 10.0, 0.005
"""Seconds."""


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """While this block runs no other process of ours reads or writes a set of files in `folder`."""
    with _held(folder, alone=True):
        yield


@contextmanager
def shared(folder: Path) -> Iterator[None]:
    """While this block runs no other process of ours writes a set of files in `folder`."""
    with _held(folder, alone=False):
        yield


@contextmanager
def _held(folder: Path, alone: bool) -> Iterator[None]:
    """The lock is on the folder itself, so that no file is left behind; where there are none, digests still tell."""
    try:
        import fcntl

        place = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        _wait(lambda: fcntl.flock(place, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB))
        yield
    finally:
        os.close(place)


def _wait(lock: Callable[[], None]) -> None:
    """Take the lock, within `PATIENCE`; who holds it for longer is stuck, and digests still tell a mixed set."""
    end = time.monotonic() + PATIENCE
    with suppress(OSError):
        while True:
            try:
                return lock()
            except BlockingIOError:
                if time.monotonic() > end:
                    return None
                time.sleep(PAUSE)
