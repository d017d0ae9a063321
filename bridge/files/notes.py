"""Notes: lines on what was taken for granted while files were read, for whoever listens to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_LISTENERS: ContextVar[tuple[Callable[[str], None], ...]] = ContextVar("listeners", default=())


@contextmanager
def gather_notes(hear: Callable[[str], None] | None = None) -> Iterator[list[str]]:
    """Context with a list of the notes that are made in it. `hear` gets each of them at once."""
    lines = list[str]()
    before = _LISTENERS.set((*_LISTENERS.get(), lines.append, *([hear] if hear else ())))
    try:
        yield lines
    finally:
        _LISTENERS.reset(before)


def has_listeners() -> bool:
    """Whether somebody hears notes as they are made."""
    return bool(_LISTENERS.get())


def note(line: str) -> None:
    """Make a note."""
    for hear in _LISTENERS.get():
        hear(line)
