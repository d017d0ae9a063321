"""Locks on a folder, so that files that belong together are read and written as one set."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PATIENCE, PAUSE = 10.0, 0.005
"""Seconds to wait for a lock at most, and between two attempts."""


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Return a context in which no other process that uses these locks reads or writes files in `folder`."""
    with _hold_folder(folder, alone=True):
        yield


@contextmanager
def shared(folder: Path) -> Iterator[None]:
    """Return a context in which no other process that uses these locks writes files in `folder`."""
    with _hold_folder(folder, alone=False):
        yield


@contextmanager
def _hold_folder(folder: Path, alone: bool) -> Iterator[None]:
    """Lock the folder itself, so that no lock file is left. Systems without such locks rely on digests alone."""
    try:
        import fcntl

        place = os.open(folder, os.O_RDONLY)  # closing it ends the lock, also when the process dies
    except (ImportError, OSError):
        yield
        return
    try:
        _wait(
            lambda: fcntl.flock(place, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        )
        yield
    finally:
        os.close(place)


def _wait(lock: Callable[[], None]) -> None:
    """Wait for the lock, at most `PATIENCE` seconds.

    If the lock is not free by then, continue without the lock: digests still detect a mixed set of
    files.
    """
    end = time.monotonic() + PATIENCE
    with suppress(OSError):
        while True:
            try:
                return lock()
            except BlockingIOError:
                if time.monotonic() > end:
                    return None
                time.sleep(PAUSE)
