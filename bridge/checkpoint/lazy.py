"""Lazy tensors: tensors of which only the shape, the number format and the place of the elements
are known. The elements are read on demand.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import SourceError
from bridge.layout.boxes import Box, boxes_of_range

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Shape = tuple[int, ...]

TORCH: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
"""A table from the names of number formats in safetensors to their names in torch."""
SAFE = {name: code for code, name in TORCH.items()}
WIDTH = {
    code: 1 if code == "BOOL" else int("".join(filter(str.isdigit, code.partition("_")[0]))) // 8
    for code in TORCH
}
"""Number of bytes of an element, by number format."""
EIGHT = ("F8_E4M3", "F8_E5M2")
EXACT = {
    "F64": ("F32", "F16", "BF16", *EIGHT),
    "F32": ("F16", "BF16", *EIGHT),
    "F16": EIGHT,
    "BF16": EIGHT,
}
"""Number formats whose numbers another has too, by that other."""
FLOATING = ("F64", "F32", "F16", "BF16", *EIGHT)


def torch_type(code: str) -> torch.dtype:
    """Return torch's dtype for a number format of safetensors."""
    import torch

    dtype: torch.dtype = getattr(torch, TORCH[code])
    return dtype


class Lazy(ABC):
    """A tensor whose elements are not read yet."""

    shape: Shape
    dtype: str

    @abstractmethod
    def flat(self, start: int, stop: int) -> Tensor:
        """Return the elements from index `start` up to `stop`, in row-major order. Raises
        `SourceError` if they cannot be read.
        """

    @property
    def count(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self.count * WIDTH[self.dtype]

    def whole(self) -> Tensor:
        """The whole tensor."""
        return self.flat(0, self.count).view(self.shape)

    def box(self, place: Box) -> Tensor:
        """Return the elements in a box, as a tensor with the shape of the box. Only the rows that
        the box touches are read, each of them whole. A row has one index in the first dimension.
        """
        if not self.shape:
            return self.whole()
        row = prod(self.shape[1:])
        first, rows = place.offsets[0], place.sizes[0]
        rows_of_box = self.flat(first * row, (first + rows) * row).view(rows, *self.shape[1:])
        for dim, (offset, size) in enumerate(
            zip(place.offsets[1:], place.sizes[1:], strict=True), 1
        ):
            rows_of_box = rows_of_box.narrow(dim, offset, size)
        return rows_of_box


@dataclass(frozen=True)
class Span(Lazy):
    """A tensor whose elements lie one after the other in a file, from byte `begin` on."""

    path: Path
    begin: int
    shape: Shape
    dtype: str

    def flat(self, start: int, stop: int) -> Tensor:
        """Return elements, read from the file directly into the memory of the returned tensor."""
        import torch

        width = WIDTH[self.dtype]
        if stop <= start:
            return torch.empty(0, dtype=torch_type(self.dtype))
        content = bytearray((stop - start) * width)
        read_into(self.path, self.begin + start * width, content)
        return torch.frombuffer(content, dtype=torch_type(self.dtype))


def read_into(path: Path, begin: int, content: bytearray) -> None:
    """Fill `content` with bytes of a file, read from byte `begin` on. Raises `SourceError` if the
    file cannot be read or is too short.
    """
    view, count = memoryview(content), 0
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            while count < len(content):
                # One call reads 2 GiB at most (see `man 2 read`), and a network file system may
                # return less than asked for.
                got = os.preadv(descriptor, [view[count:]], begin + count)
                if not got:
                    raise SourceError(
                        f"{path}: the file ends at byte {begin + count}, though it was longer before; it "
                        "changed while it was read"
                    )
                count += got
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; expected a file that can be read") from None


@dataclass(frozen=True)
class Strided(Lazy):
    """A tensor whose elements are spread over `base` with given strides, such as a tensor that was
    saved as a transpose.
    """

    base: Lazy
    offset: int
    shape: Shape
    strides: Shape

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """The number format of `base`."""
        return self.base.dtype

    def flat(self, start: int, stop: int) -> Tensor:
        """Return elements. All elements of `base` between the view's first and last one are read,
        and then put in order.
        """
        reach = (
            1
            + sum(
                stride * (size - 1) for stride, size in zip(self.strides, self.shape, strict=True)
            )
            if self.count
            else 0
        )
        span = self.base.flat(self.offset, self.offset + reach)
        return span.as_strided(self.shape, self.strides).reshape(-1)[start:stop]


@dataclass(frozen=True, eq=False)
class Turned(Lazy):
    """The transpose of a matrix. It is read as a whole, and stays in memory until another
    transpose is read.
    """

    base: Lazy

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        """The shape of `base` with its two dimensions exchanged."""
        rows, columns = self.base.shape
        return columns, rows

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """The number format of `base`."""
        return self.base.dtype

    def flat(self, start: int, stop: int) -> Tensor:
        """Return elements of the transpose, which is computed unless it is still in memory."""
        if not _TURNED or _TURNED[0] is not self:
            _TURNED.clear()
            whole = self.base.whole()
            _TURNED[:] = [
                self,
                whole.t().contiguous().view(-1),
            ]  # what it was made of may have been turned too
        elements: Tensor = _TURNED[1][start:stop]
        return elements


_TURNED: list[Any] = []
"""The last matrix that was transposed, and the elements of the transpose. They are kept because a
transpose is read strip by strip, and must not be computed again for each strip.
"""


@dataclass(frozen=True)
class ElementRun:
    """A run: the elements of a tensor from index `start` up to `stop`, in row-major order."""

    source: Lazy
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Joined(Lazy):
    """A tensor that consists of runs of other tensors, one after the other in row-major order."""

    runs: Sequence[ElementRun]
    shape: Shape
    dtype: str

    def flat(self, start: int, stop: int) -> Tensor:
        """Return elements, which are read from the runs that hold them."""
        import torch

        pieces, at = [], 0
        for run in self.runs:
            first, last = max(start, at), min(stop, at + len(run))
            if first < last:
                pieces.append(run.source.flat(run.start + first - at, run.start + last - at))
            at += len(run)
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch_type(self.dtype))


@dataclass(frozen=True)
class Placed:
    """A box of a tensor, with the lazy tensor that holds the elements of the box."""

    place: Box
    source: Lazy


@dataclass(frozen=True)
class Boxed(Lazy):
    """A tensor that consists of boxes. Each of its elements is in exactly one box."""

    parts: Sequence[Placed]
    shape: Shape
    dtype: str

    def flat(self, start: int, stop: int) -> Tensor:
        """Return elements, which are read from the boxes that hold them."""
        import torch

        if len(self.parts) == 1:
            return self.parts[0].source.flat(start, stop)
        target = torch.empty(max(0, stop - start), dtype=torch_type(self.dtype))
        at = 0
        # A run of elements is a few boxes: the rest of a row, whole rows, the beginning of a row.
        for box in boxes_of_range(self.shape, start, stop):
            self._fill(target[at : at + prod(box.sizes)].view(box.sizes), box)
            at += prod(box.sizes)
        return target

    def _fill(self, target: Tensor, box: Box) -> None:
        for part in self.parts:
            # The box that both have in common, as a range in each dimension; an empty range if they
            # do not meet there.
            ranges = [
                range(max(start, begin), min(start + size, begin + length))
                for start, size, begin, length in zip(
                    box.offsets, box.sizes, part.place.offsets, part.place.sizes, strict=True
                )
            ]
            if all(ranges):
                place = target
                for dim, (common, offset) in enumerate(zip(ranges, box.offsets, strict=True)):
                    place = place.narrow(dim, common.start - offset, len(common))
                offsets = tuple(
                    common.start - origin
                    for common, origin in zip(ranges, part.place.offsets, strict=True)
                )
                place.copy_(
                    part.source.box(Box(offsets, tuple(map(len, ranges)))).view(place.shape)
                )


@dataclass(frozen=True)
class Cast(Lazy):
    """A tensor whose elements are converted to another number format when they are read. If it is
    `bounded`, a finite number that the other format does not reach is refused.
    """

    base: Lazy
    dtype: str
    bounded: bool = False

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        """The shape of `base`."""
        return self.base.shape

    def flat(self, start: int, stop: int) -> Tensor:
        """Return elements in the new number format, rounded to nearest."""
        found = self.base.flat(start, stop)
        made = found.to(torch_type(self.dtype))
        # The two ends tell of all elements, in a twentieth of the time of torch's isfinite.
        if self.bounded and len(made) and not all(end.isfinite() for end in made.aminmax()):
            beyond = found.double()[made.isinf() & ~found.double().isinf()]
            SourceError.raise_if(
                f"found a weight of {number:g}, which {self.dtype} cannot hold: it would become "
                "infinite; choose a wider number format"
                for number in beyond[:1].tolist()
            )
        return made


@dataclass(frozen=True)
class Held(Lazy):
    """A small tensor that is in memory already."""

    tensor: Tensor

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        """Its shape."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """Its number format."""
        return SAFE[str(self.tensor.dtype).removeprefix("torch.")]

    def flat(self, start: int, stop: int) -> Tensor:
        """Return elements of the tensor in memory."""
        return self.tensor.reshape(-1)[start:stop]


def cast_lazy(source: Lazy, dtype: str) -> Lazy:
    """Return `source` in the number format `dtype`."""
    return source if source.dtype == dtype else Cast(source, dtype)


STRIP = 2**22
"""Maximum number of bytes that are read, buffered or written at once."""


def read_strips(source: Lazy, start: int = 0, stop: int | None = None) -> Iterator[Tensor]:
    """Yield the elements of a tensor, or those from index `start` up to `stop`, in strips of at
    most `STRIP` bytes.
    """
    stop = source.count if stop is None else stop
    step = max(1, STRIP // WIDTH[source.dtype])
    for first in range(start, stop, step):
        yield source.flat(first, min(stop, first + step))


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor that is contiguous and on the CPU, without copying them."""
    import torch

    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
