"""Budget: a command that reads a config or a checkpoint stays within limits of processor time and memory, whatever its
input asks for.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from bridge import limits
from bridge.errors import BridgeError
from bridge.files.contained import ReadFiles, note_files


class _TimeIsUpError(BaseException):
    """Raised when the time is up.

    It is not an `Exception`, so that no `except Exception` clause catches it and continues.
    """


@contextmanager
def stay_within_limits() -> Iterator[None]:
    """Give up, with one `BridgeError`, after `limits.SECONDS` of processor time or beyond `limits.MEMORY` bytes.

    Within `read_within_limits` its limits hold.
    """
    with nullcontext() if _OUTER else _limit(ReadFiles(), limits.MEMORY):
        yield


@contextmanager
def read_within_limits() -> Iterator[None]:
    """Note the files that are read, and stay within limits that grow with their number and bytes.

    An `OSError` of a file becomes a `BridgeError` too.
    """
    # Its threads' stacks and what it loads count as data.
    torch = (os.cpu_count() or 1) * 2**24 + (0 if "torch" in sys.modules else 2**30)
    files = ReadFiles()
    _OUTER.append(files)
    try:
        with note_files(files), _limit(files, limits.MEMORY + torch):
            yield
    except OSError as error:
        if error.filename is None:  # nobody reads our output any more
            raise
        raise BridgeError(
            f"{error.filename}: {error.strerror}; expected a file or folder that can be read"
        ) from None
    finally:
        _OUTER.remove(files)


_OUTER: list[ReadFiles] = []
"""The files of a checkpoint that is being read."""


@contextmanager
def _limit(read: ReadFiles, most: int) -> Iterator[None]:
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        # Signals reach the main thread alone, and Windows has neither this one nor limits of a process.
        yield
        return
    import resource
    import signal

    began = time.process_time()

    def seconds() -> float:
        return limits.SECONDS + read.size / limits.BYTES_A_SECOND + len(read.stamps) / limits.FILES

    def ring(number: int, frame: FrameType | None) -> None:
        if time.process_time() - began >= seconds():
            _ring(frame, bool(_OUTER))

    before, memory = signal.signal(signal.SIGPROF, ring), resource.getrlimit(resource.RLIMIT_DATA)

    def disarm() -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_DATA, memory)

    # Processor time, so that a busy machine refuses nothing that an idle one takes. It rings again each second:
    # an exception that lands in a destructor is printed by Python, and lost.
    signal.setitimer(signal.ITIMER_PROF, limits.SECONDS, 1.0)
    used = _used()
    if used is not None:
        # A process that is large before it reads anything still gets half of the limit.
        room = max(most, used + most // 2)
        read.told = lambda size: _limit_memory(room + limits.COPIES * read.size, memory[1])
        read.told(0)
    try:
        try:
            yield
        finally:  # the alarm may ring once more on the way here
            disarm()
    except _TimeIsUpError as error:
        disarm()
        raise BridgeError(
            f"found more work than can be done in {seconds():g} s of processor time; {error}"
        ) from None
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):  # torch's
            raise
        size = f"{(most + limits.COPIES * read.size) / 2**30:.3g}"
        raise BridgeError(
            f"found more data than fits into {size} GiB of memory; {NO_CHECKPOINT if _OUTER else TOO_LARGE}"
        ) from None


TOO_LARGE = (
    "the config asks for sizes that no run has, or the file is not a config: reduce the sizes, or "
    "name another file"
)
TOO_BUSY = "following the commands of the script takes too long: replace commands by their results"
NO_CHECKPOINT = "no checkpoint of these files needs as much: name another folder"
SCRIPTS = "bridge.shell"


def _ring(frame: FrameType | None, checkpoint: bool) -> None:
    """Raise the error that ends the work, with advice on the script if its commands took the time,
    else on the config or the checkpoint.
    """
    if checkpoint:
        raise _TimeIsUpError(NO_CHECKPOINT)
    while frame is not None and not str(frame.f_globals.get("__name__", "")).startswith(SCRIPTS):
        frame = frame.f_back
    raise _TimeIsUpError(TOO_LARGE if frame is None else TOO_BUSY)


def _limit_memory(most: int, hard: int) -> None:
    import resource

    # Data rather than address space: libraries map far more than they touch.
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _used() -> int | None:
    """Return the size of this process's data in bytes; None if the system does not report it."""
    import resource

    try:
        # The sixth figure is data and stack, in pages.
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    except OSError:
        return None
