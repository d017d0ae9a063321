"""Progress on stderr: how much of a command is done and the time left, once it has taken longer than two seconds."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from bridge.cli.terminal import note
from bridge.files.progress import listening

FIRST = 2.0
"""Seconds before progress is first printed: most commands are done by then."""
OFTEN, DRAWN = 5.0, 0.2
"""Seconds between two progress lines in a pipe, and between two updates of the progress line on a terminal."""
CLEAR = "\r\x1b[K"


@contextmanager
def show_progress(what: str, quiet: bool = False) -> Iterator[None]:
    """Return a context that prints the progress reported by `bridge.files.progress`, as a percentage of `what`.

    With `quiet`, nothing is printed.
    """
    meter = Meter(what)
    with listening((lambda count, total: None) if quiet else meter):
        try:
            yield
        finally:
            meter.end()


class Pace:
    """Estimates the time left from the pace after the first part. The first part does not count: it
    takes longer, as it loads what all parts need.
    """

    def __init__(self) -> None:
        self.first: tuple[float, float] | None = None

    def rest(self, count: float, total: float) -> str:
        """Return the time left as text, such as `8 s left`; empty until more than the first part is done."""
        now = time.monotonic()
        since, behind = self.first = self.first or (now, count)
        if count <= behind:
            return ""
        return f"{time_to_go(now - since, count - behind, total - behind)} left"


class Meter:
    """Prints the progress of a loop: on a terminal in one line that is removed at the end, in a
    pipe as a new line every few seconds.
    """

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self.what, self.stream = what, stream or sys.stderr
        self.began = time.monotonic()
        self.said, self.pace = 0.0, Pace()
        self.drawn = self.stream.isatty()

    def __call__(self, count: float, total: float) -> None:
        """Print that `count` of `total` are done, unless the last print is too recent."""
        now, rest = time.monotonic(), self.pace.rest(count, total)
        if (
            now - self.began < FIRST
            or now - self.said < (DRAWN if self.drawn else OFTEN)
            or not 0 < count < total
        ):
            return
        self.said = now
        line = f"{count / total:4.0%} of {self.what}{rest and f', {rest}'}"
        print(
            f"{CLEAR}{line}" if self.drawn else line,
            end="" if self.drawn else "\n",
            file=self.stream,
            flush=True,
        )

    def clear(self) -> None:
        """Erase the progress line on a terminal."""
        if self.drawn and self.said:
            print(CLEAR, end="", file=self.stream, flush=True)

    end = clear


def time_to_go(seconds: float, count: float, total: float) -> str:
    """Return as text how long the rest takes, if `count` of `total` took `seconds`."""
    rest = round(seconds * (total - count) / count)
    if rest < 60:
        return f"{rest} s"
    return (
        f"{rest // 60} min {rest % 60:02} s"
        if rest < 3600
        else f"{rest // 3600} h {rest % 3600 // 60:02} min"
    )


class ProgressPrinter:
    """Prints the notes and the progress of ranks on stderr."""

    def __init__(self, what: str = "the runs") -> None:
        self.what = what
        self.meter: Meter | None = None

    def hear(self, message: Mapping[str, Any]) -> None:
        """Print a message of the first rank: a note, or its progress."""
        if "at" in message:
            self.meter = self.meter or Meter(self.what)
            self.meter(*message["at"])
        elif self.meter:
            self.meter.clear()
        if "note" in message:
            note(f"  {message['note']}")


@contextmanager
def end_orderly() -> Iterator[None]:
    """Context in which SIGTERM raises `SystemExit`, so that the ranks are ended and temporary files
    removed.
    """

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = None
    with suppress(ValueError):  # only the main thread may say what signals do
        before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


class Progress:
    """Prints the progress of writing on stderr."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.before = total, 0, 0
        self.began = self.told = time.monotonic()
        self.pace = Pace()

    @property
    def seconds(self) -> float:
        """Seconds since the writing began."""
        return time.monotonic() - self.began

    def add_bytes(self, count: int, fresh: bool = True) -> None:
        """Add `count` bytes to the progress. This conversion wrote them if `fresh`, else an earlier one."""
        self.done += count
        self.before += 0 if fresh else count
        # What an earlier, killed conversion wrote is found at once: it is no measure of the speed.
        new = self.done - self.before
        rest = self.pace.rest(new, new + self.total - self.done) if new else ""
        pause = OFTEN if self.told > self.began else FIRST
        if rest and time.monotonic() - self.told > pause:
            self.told = time.monotonic()
            note(f"{self.done / self.total:4.0%}  {new / self.seconds / 2**20:,.0f} MB/s  {rest}")
