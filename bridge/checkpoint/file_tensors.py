"""What files are made of: the tensors of a checkpoint that go into each file to write, and the
source files of these tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from bridge.checkpoint.files import File
from bridge.checkpoint.hub import Hub
from bridge.checkpoint.lazy import ElementRun, Lazy, Span


@dataclass(frozen=True)
class Made:
    """A tensor of the source checkpoint that goes into a file to write, wholly or in part: its
    name, kind, shape, number format and source files.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    files: tuple[str, ...]


def tensors_by_file(hub: Hub, files: Sequence[File]) -> Iterator[tuple[File, tuple[Made, ...]]]:
    """Yield each file to write with the tensors of the source checkpoint that go into it, in order.
    Bytes that come from no tensor are left out.
    """
    # By identity: two parameters may hold equal lazy tensors, and each has its own name.
    names = {id(tensor): (name, kind) for name, kind, tensor in hub.tensors()}
    for file in files:
        tensors: dict[int, Lazy] = {}
        for part in file.parts:
            if isinstance(part, ElementRun):
                tensors |= {id(tensor): tensor for tensor in _tensors_within(part, names)}
        rows = [
            (names[key], tensor, sorted({path.name for path in _paths_within(tensor)}))
            for key, tensor in tensors.items()
        ]
        yield (
            file,
            tuple(
                Made(*name_and_kind, tensor.shape, tensor.dtype, tuple(paths))
                for name_and_kind, tensor, paths in rows
            ),
        )


def offsets_by_file(files: Sequence[File]) -> dict[Path, list[int]]:
    """Return for each source file the offsets of the tensors that go into the files to write, in
    ascending order.
    """
    offsets: dict[Path, set[int]] = {}
    # Runs of one tensor stand in many files: each lazy value is walked once.
    visits: set[int] = set()
    for file in files:
        for part in file.parts:
            for span in _spans_within(part, visits) if isinstance(part, ElementRun) else ():
                offsets.setdefault(span.path, set()).add(span.begin)
    return {path: sorted(begins) for path, begins in offsets.items()}


def _spans_within(value: Any, visits: set[int]) -> Iterator[Span]:
    if isinstance(value, Span):
        yield value
    elif not isinstance(value, Lazy) or id(value) not in visits:
        visits.add(id(value))
        for inner in _values_within(value):
            yield from _spans_within(inner, visits)


def _tensors_within(value: Any, names: Mapping[int, tuple[str, str]]) -> Iterator[Lazy]:
    """Yield the checkpoint's tensors from which a lazy value is made. `names` maps Python's `id` of
    each tensor of the checkpoint to the tensor's name and kind.
    """
    if isinstance(value, Lazy) and id(value) in names:
        yield value
        return
    for inner in _values_within(value):
        yield from _tensors_within(inner, names)


def _paths_within(value: Any) -> Iterator[Path]:
    if isinstance(value, Path):
        yield value
    for inner in _values_within(value):
        yield from _paths_within(inner)


def _values_within(value: Any) -> Iterator[Any]:
    """Yield the values inside a lazy value, such as other lazy values, runs, boxes, and paths."""
    if isinstance(value, list | tuple):
        yield from value
    elif is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name) for field in fields(value))
