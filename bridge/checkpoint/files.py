"""Files to write, as lists of parts that are made only when they are written, so that sizes and
progress are known in advance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bridge.checkpoint.lazy import WIDTH, ElementRun, Lazy


@dataclass(frozen=True)
class Late:
    """A part whose bytes contain checksums of other parts, the `runs`. Only its `size` is known in
    advance. `make` gets the CRC-32 of each run, in order, and returns the bytes.
    """

    size: int
    runs: tuple[ElementRun, ...]
    make: Callable[[Sequence[int]], bytes]


@dataclass(frozen=True)
class File:
    """A file to write: its name, which may contain folders, and its parts in order."""

    name: str
    parts: tuple[bytes | ElementRun | Late, ...]

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return sum(map(size_of, self.parts))

    @property
    def sums(self) -> bool:
        """Whether a part of the file contains checksums of other parts."""
        return any(isinstance(part, Late) for part in self.parts)


def size_of(part: bytes | ElementRun | Late) -> int:
    """Return the size of a part in bytes."""
    if isinstance(part, ElementRun):
        return len(part) * WIDTH[part.source.dtype]
    return part.size if isinstance(part, Late) else len(part)


def all_of(source: Lazy) -> ElementRun:
    """Return an `ElementRun` that covers all elements of a tensor."""
    return ElementRun(source, 0, source.count)
