"""Parts: boxes that together cover a whole tensor once, as ranks hold them, and the safetensors
files in which they are stored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeError, SourceError
from bridge.files.contained import regular
from bridge.files.shown import show_value
from bridge.layout.boxes import Box

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
KEY = re.compile(r"(.+)@((?:\d{1,19}(?:,\d{1,19})*)?)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class LocalBox:
    """A part that this rank holds. `tensor` has the elements of the part, which is a box of the
    whole tensor.
    """

    name: str
    shape: Shape
    offsets: Shape
    tensor: Tensor

    @property
    def key(self) -> str:
        """The name under which the part is stored in a file: the tensor's name, and the offsets of
        the box.
        """
        return f"{self.name}@{','.join(map(str, self.offsets))}"

    @property
    def box(self) -> Box:
        """The box of the whole tensor that the part covers."""
        return Box(self.offsets, tuple(self.tensor.shape))


@dataclass(frozen=True)
class Stored:
    """A part that is stored in a file: a box of the whole tensor."""

    name: str
    box: Box
    dtype: str
    file: Any
    key: str

    def read(self, within: Sequence[slice]) -> Tensor:
        """Return the elements in these slices of the part, one slice for each dimension. Raises
        `SafetensorError` if they cannot be read.
        """
        tensor: Tensor = (
            self.file.get_slice(self.key)[tuple(within)]
            if within
            else self.file.get_tensor(self.key)
        )
        return tensor


def write_parts(path: Path, parts: Iterable[LocalBox]) -> None:
    """Write `parts` into one file, and wait until it is on the disk. Raises `BridgeError` if it
    cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({part.key: part.tensor.detach().contiguous() for part in parts}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except (SafetensorError, OSError) as error:
        raise BridgeError(
            f"{path}: cannot be written ({error}); make room on the disk, or choose a folder that all ranks share"
        ) from None


def read_parts(path: Path, root: Path) -> Iterator[Stored]:
    """Yield the parts that are stored in a file. Raises `SourceError` if the file is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(regular(path, root), "pt")
        for key in file.keys():  # noqa: SIM118 - it is no dictionary
            part = file.get_slice(key)
            name, box = place_of(key, tuple(part.get_shape()), path)
            yield Stored(name, box, part.get_dtype(), file, key)
    except (SafetensorError, OSError) as error:
        raise SourceError(f"{path}: {error}; the checkpoint is damaged") from None


def place_of(key: str, sizes: Shape, path: Path) -> tuple[str, Box]:
    """Return the tensor's name and the box of a part, from the name NAME@OFFSETS under which the
    part is stored. Raises `SourceError` if the name does not have this form, or if it has more or
    fewer offsets than there are `sizes`.
    """
    match = KEY.fullmatch(key)
    offsets = tuple(map(int, match[2].split(","))) if match and match[2] else ()
    if match is None or len(offsets) != len(sizes):
        raise SourceError(
            f"{path}: found a part called {show_value(key)}, expected NAME@ and {len(sizes)} offsets; the checkpoint is damaged"
        )
    return match[1], Box(offsets, sizes)


def check_cover(name: str, shape: Shape, parts: Sequence[Stored]) -> str:
    """Return the reason why these parts do not cover a tensor of this shape exactly once, or an
    empty text if they do.
    """
    boxes = [part.box for part in parts]
    for box in boxes:
        fits = len(box.sizes) == len(shape) and all(
            offset + size <= length
            for offset, size, length in zip(box.offsets, box.sizes, shape, strict=True)
        )
        if not fits:
            return f"{name}: a part of size {box.sizes} at {box.offsets} lies outside of the tensor's shape {shape}"
    count, elements = sum(prod(box.sizes) for box in boxes), prod(shape)
    if count != elements:
        return f"{name}: the parts have {count} elements, but the tensor's shape {shape} has {elements}"
    if len({part.dtype for part in parts}) > 1:
        return f"{name}: the parts of this tensor have several number formats"
    # As many elements as the shape, all within it: the parts cover it exactly if no two overlap.
    if not _are_disjoint([box for box in boxes if prod(box.sizes)], 2 * len(shape) + 2):
        return f"{name}: its parts overlap"
    return ""


def _are_disjoint(boxes: Sequence[Box], depth: int) -> bool:
    """Return whether straight cuts, nested at most `depth` deep, separate all boxes from each
    other, so that no two overlap.

    The boxes of all parallel layouts can be separated like this, and it is faster than comparing
    each pair. Boxes that form a pinwheel cannot, and the result is False for them.
    """
    if len(boxes) < 2:
        return True
    for dim in range(len(boxes[0].sizes)):
        groups = _cut_boxes(boxes, dim)
        if len(groups) > 1:
            return depth > 0 and all(_are_disjoint(group, depth - 1) for group in groups)
    return False


def _cut_boxes(boxes: Sequence[Box], dim: int) -> list[list[Box]]:
    """Divide boxes into groups by all cuts across the dimension `dim` that go through no box."""
    groups: list[list[Box]] = []
    end = 0
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        if not groups or box.offsets[dim] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box.offsets[dim] + box.sizes[dim])
    return groups


def fill_parts(parts: Iterable[LocalBox], sources: Mapping[str, Sequence[Stored]]) -> None:
    """Copy the stored elements into `parts`. The caller must have checked names and shapes. Raises
    `SourceError` if the files cannot be read.
    """
    for part in parts:
        for source in sources[part.name]:
            mine, theirs = part.box, source.box
            # What both boxes have in common, dimension by dimension; a range is empty if they do
            # not meet there.
            ranges = [
                range(max(start, begin), min(start + size, begin + length))
                for start, size, begin, length in zip(
                    mine.offsets, mine.sizes, theirs.offsets, theirs.sizes, strict=True
                )
            ]
            if all(ranges):
                _copy_elements(part, source, ranges)


def _copy_elements(part: LocalBox, source: Stored, ranges: Sequence[range]) -> None:
    from safetensors import SafetensorError

    place = part.tensor.detach()
    for dim, (common, offset) in enumerate(zip(ranges, part.offsets, strict=True)):
        place = place.narrow(dim, common.start - offset, len(common))
    origins = zip(ranges, source.box.offsets, strict=True)
    within = [slice(common.start - origin, common.stop - origin) for common, origin in origins]
    try:
        place.copy_(source.read(within))
    except SafetensorError as error:
        raise SourceError(
            f"{part.name}: {error}; the checkpoint changed while it was read"
        ) from None
