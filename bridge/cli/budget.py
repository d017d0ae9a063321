"""Budget: a command that reads a config stays within limits of processor time and memory, whatever the config asks for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from bridge import limits
from bridge.errors import BridgeError


class _TimeIsUpError(BaseException):
    """Raised when the time is up.

    It is not an `Exception`, so that no `except Exception` clause catches it and continues.
    """


@contextmanager
def stay_within_limits() -> Iterator[None]:
    """Give up, with one `BridgeError`, after `limits.SECONDS` of processor time or beyond `limits.MEMORY` bytes."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        # Signals reach the main thread alone, and Windows has neither this one nor limits of a process.
        yield
        return
    import resource
    import signal

    before, memory = signal.signal(signal.SIGPROF, _ring), resource.getrlimit(resource.RLIMIT_DATA)

    def disarm() -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_DATA, memory)

    # Processor time, so that a busy machine refuses nothing that an idle one takes. It rings again each second:
    # an exception that lands in a destructor is printed by Python, and lost.
    signal.setitimer(signal.ITIMER_PROF, limits.SECONDS, 1.0)
    _limit_memory(*memory)
    try:
        try:
            yield
        finally:  # the alarm may ring once more on the way here
            disarm()
    except _TimeIsUpError as error:
        disarm()
        raise BridgeError(
            f"found more work than can be done in {limits.SECONDS:g} s of processor time; {error}"
        ) from None
    except MemoryError:
        raise BridgeError(
            f"found more data than fits into {limits.MEMORY >> 30} GiB of memory; {TOO_LARGE}"
        ) from None


TOO_LARGE = (
    "the config asks for sizes that no run has, or the file is not a config: reduce the sizes, or "
    "name another file"
)
TOO_BUSY = "following the commands of the script takes too long: replace commands by their results"
SCRIPTS = "bridge.shell"


def _ring(number: int, frame: FrameType | None) -> None:
    """Raise the error that ends the work, with advice on the script if its commands took the time,
    else on the config.
    """
    while frame is not None and not str(frame.f_globals.get("__name__", "")).startswith(SCRIPTS):
        frame = frame.f_back
    raise _TimeIsUpError(TOO_LARGE if frame is None else TOO_BUSY)


def _limit_memory(soft: int, hard: int) -> None:
    import resource

    used = _used()
    if used is None:
        return
    # A process that is large before it reads anything still gets half of the limit.
    most = max(limits.MEMORY, used + limits.MEMORY // 2)
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
