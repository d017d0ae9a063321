"""Progress on stderr: how much of a command is done and the time left, once it has taken longer than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

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
