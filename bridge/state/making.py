"""What files to be are made of: the tensors of the hub that each holds, and the files that these come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from bridge.state.files import File
from bridge.state.hub import Hub
from bridge.state.lazy import Lazy, Run, Span


@dataclass(frozen=True)
class Made:
    """A tensor, or a part of it, that a file holds: its name, kind, shape and format in the source, and the files it lies in."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    files: tuple[str, ...]


def made_of(hub: Hub, files: Sequence[File]) -> Iterator[tuple[File, tuple[Made, ...]]]:
    """Each file with what it is made of, in its order; what stands for nothing of the source, such as padding, is left out."""
    known = {id(held): (name, kind) for name, kind, held in hub.tensors()}
    for file in files:
        found: dict[int, Lazy] = {}
        for part in file.parts:
            if isinstance(part, Run):
                found |= {id(held): held for held in _within(part, known)}
        yield file, tuple(Made(*known[key], held.shape, held.dtype, _files(held)) for key, held in found.items())


def used(files: Sequence[File]) -> dict[Path, list[int]]:
    """Where the tensors begin that these files are made of, by the file that they lie in."""
    found: dict[Path, set[int]] = {}
    seen: set[int] = set()
    for file in files:
        for part in file.parts:
            for span in _spans(part, seen) if isinstance(part, Run) else ():
                found.setdefault(span.path, set()).add(span.begin)
    return {path: sorted(begins) for path, begins in found.items()}


def _spans(value: Any, seen: set[int]) -> Iterator[Span]:
    if isinstance(value, Span):
        yield value
    elif not isinstance(value, Lazy) or id(value) not in seen:
        seen.add(id(value))
        for inner in _inside(value):
            yield from _spans(inner, seen)


def _within(value: Any, known: Mapping[int, tuple[str, str]]) -> Iterator[Lazy]:
    """The hub's own tensors in what a lazy value consists of."""
    if isinstance(value, Lazy) and id(value) in known:
        yield value
        return
    for inner in _inside(value):
        yield from _within(inner, known)


def _files(held: Lazy) -> tuple[str, ...]:
    return tuple(sorted({path.name for path in _paths(held)}))


def _paths(value: Any) -> Iterator[Path]:
    if isinstance(value, Path):
        yield value
    for inner in _inside(value):
        yield from _paths(inner)


def _inside(value: Any) -> Iterator[Any]:
    """What lies within a lazy value: other lazy values, runs and boxes of them, and paths."""
    if isinstance(value, list | tuple):
        yield from value
    elif is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name) for field in fields(value))
