"""Progress of work that may take long: loops report the finished share to a listener."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")
Listener = Callable[[float, float], None]
"""Function that is called with the finished amount of work and the total amount."""

_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Context in which the outermost loop reports its progress to `listener`."""
    before = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(before)


def count_items(
    items: Sequence[Item], size: Callable[[Item], float] = lambda item: 1
) -> Iterator[Item]:
    """Yield the items. After each item, report the finished share to the listener, weighted by the
    items' sizes. Loops inside this loop report nothing.
    """
    listener = _LISTENER.get()
    if listener is None:
        yield from items
        return
    sizes = [size(item) for item in items]
    total, progress = sum(sizes), 0.0
    for item, one in zip(items, sizes, strict=True):
        # The caller works on the item at the yield, with loops of its own: those must not report a
        # second, smaller total.
        inside = _LISTENER.set(None)
        try:
            yield item
        finally:
            _LISTENER.reset(inside)
        progress += one
        listener(progress, total)


class Course:
    """Progress of work that consists of several loops. The progress of each loop is reported as a
    share of the whole work.
    """

    def __init__(self, parts: int = 0) -> None:
        self.parts, self.done = parts, 0

    def further(self, parts: int) -> None:
        """Add `parts` to the number of loops that are still to come."""
        self.parts = max(self.parts, self.done) + parts

    @contextmanager
    def part(self) -> Iterator[None]:
        """Context in which the next loop runs. Meanwhile, the listener gets the progress of the
        whole work.
        """
        listener = _LISTENER.get()
        behind, whole = self.done, max(self.parts, self.done + 1)
        with (
            listening(lambda progress, total: listener(behind + progress / total, whole))
            if listener
            else nullcontext()
        ):
            try:
                yield
            finally:
                self.done += 1
