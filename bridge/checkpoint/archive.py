"""Archives that `torch.save` writes: zip files with a pickle and with storages of tensors. The
pickle is read as data; the storages are read one tensor at a time.
"""

from __future__ import annotations

import errno
import struct
import zipfile
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import IO, Any

from bridge.checkpoint import unpickle
from bridge.checkpoint.lazy import SAFE, WIDTH, Lazy, Span, Strided
from bridge.checkpoint.unpickle import PLAIN, Constant, Known, Record
from bridge.errors import SourceError
from bridge.files.contained import regular
from bridge.files.shown import show_value

LOCAL, SIGNATURE = 30, b"PK\x03\x04"
"""The header before each file in an archive: the number of its bytes without the name, and its
first bytes.
"""
STORAGES = {
    "Double": "F64",
    "Float": "F32",
    "Half": "F16",
    "BFloat16": "BF16",
    "Long": "I64",
    "Int": "I32",
    "Short": "I16",
    "Char": "I8",
    "Byte": "U8",
    "Bool": "BOOL",
    "ComplexFloat": "C64",
    "Untyped": "U8",
}
DAMAGED = "the file is damaged"
MOST_REPEATED = 2**28
"""Most bytes of a tensor that has more elements than its storage."""
UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    ArithmeticError,
    EOFError,
    NotImplementedError,
    struct.error,
    zipfile.BadZipFile,
)
"""The errors that may arise when a damaged zip file is read, such as `NotImplementedError` for an
unknown compression.
"""


@dataclass(frozen=True)
class Storage:
    """A storage: a range of bytes in an archive that holds the elements of one or more tensors.
    `dtype` is the number format of its elements, as the storage's class names it.
    """

    path: Path
    begin: int
    size: int
    dtype: str


def _size_of(*arguments: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in (arguments[0] if arguments else ()))


def _device_name(*arguments: Any) -> str:
    return ":".join(map(str, arguments))


def _as_parameter(tensor: Any, *_: Any) -> Lazy:
    if not isinstance(tensor, Lazy):
        raise ValueError("found a parameter that holds no tensor")
    return tensor


def _from_type(build: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Return a tensor that was saved with attributes, without the attributes. Raises `ValueError`
    if it belongs to a subclass of Tensor.
    """
    if getattr(kind, "name", "") not in (
        "torch Tensor",
        "torch.nn.parameter Parameter",
    ) or not isinstance(arguments, tuple):
        raise ValueError("found a tensor of a subclass of torch.Tensor")
    return build.build(*arguments)


def _build_tensor(
    storage: Any,
    offset: int,
    shape: Any,
    strides: Any,
    _grad: Any = None,
    _hooks: Any = None,
    flags: Any = None,
) -> Lazy:
    found = lazy_view(storage, storage.dtype, offset, shape, strides)
    _refuse_flags(storage.path, flags)
    return found


# `x.conj()`, and `.imag` of it, share the storage of `x`: torch saves them with the flags `conj` and
# `neg`, and applies them when it loads (torch/_utils.py: get_tensor_metadata).
def _refuse_flags(path: Path, flags: Any) -> None:
    """Raise `SourceError` if a tensor's elements are not those in its storage."""
    if flags:
        raise SourceError(
            f"{path}: found a tensor whose elements are not those that are stored: torch loads it "
            f"with the flags {show_value(list(flags))}; save it again after resolve_conj() and "
            "resolve_neg()"
        )


# torch writes `_rebuild_tensor_v3` for number formats that have no storage class of their own, such
# as float8: the storage is untyped bytes, and the format is an argument (torch/_tensor.py:
# _reduce_ex_internal).
def _typed_view(
    storage: Any,
    offset: int,
    shape: Any,
    strides: Any,
    _grad: Any,
    _hooks: Any,
    dtype: Any,
    flags: Any = None,
) -> Lazy:
    found = lazy_view(storage, str(dtype), offset, shape, strides)
    _refuse_flags(storage.path, flags)
    return found


def lazy_view(storage: Any, dtype: str, offset: Any, shape: Any, strides: Any) -> Lazy:
    """Return the lazy tensor whose elements lie in a storage, from `offset` on. Raises
    `ValueError` if the tensor reaches beyond the storage.
    """
    shape, strides = _size_of(shape), _size_of(strides)
    if (
        not isinstance(storage, Storage)
        or len(shape) != len(strides)
        or min((offset, *shape, *strides)) < 0
    ):
        raise ValueError("found a tensor without a storage, or with impossible sizes or strides")
    count, width = storage.size // WIDTH[dtype], WIDTH[dtype]
    # The last element lies this many elements behind the first. A tensor without elements reaches
    # nowhere.
    reach = (
        1 + sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True))
        if all(shape)
        else 0
    )
    if offset + reach > count and reach:
        raise ValueError(
            f"found a tensor that needs {offset + reach} elements of a storage of {count}"
        )
    if prod(shape) * width > MOST_REPEATED and prod(shape) > count:
        # Strides of 0 repeat elements, and a tensor with strides is read as a whole.
        raise ValueError(f"found {prod(shape)} elements that repeat a storage of {count}")
    if strides == contiguous_strides(shape) or not all(shape):
        return Span(storage.path, storage.begin + offset * width, shape, dtype)
    return Strided(Span(storage.path, storage.begin, (count,), dtype), offset, shape, strides)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a tensor in row-major order without gaps.

    A dimension of 0 counts as 1, as in torch.
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


TENSORS: Known = {
    "torch Size": _size_of,
    "torch device": _device_name,
    "torch._utils _rebuild_tensor_v2": _build_tensor,
    "torch._utils _rebuild_tensor_v3": _typed_view,
    "torch._utils _rebuild_parameter": _as_parameter,
    "torch._utils _rebuild_parameter_with_state": _as_parameter,
    "torch._tensor _rebuild_from_type_v2": _from_type,
    **unpickle.recorders(
        "torch Tensor", "torch.nn.parameter Parameter", "torch.storage UntypedStorage"
    ),
    **unpickle.recorders(*(f"torch {name}Storage" for name in STORAGES)),
    **{f"torch {name}": Constant(code) for name, code in SAFE.items()},
}
"""Names that pickles of tensors contain, each with the function that builds the value (as
torch/_utils.py and torch/serialization.py define them).
"""


def _numpy_scalar(dtype: Any, content: Any) -> Any:
    """Return the value of a numpy scalar, read from its little-endian bytes."""
    form = NUMBERS.get(dtype.arguments[0] if isinstance(dtype, Record) and dtype.arguments else "")
    if form is None or not isinstance(content, bytes):
        raise ValueError("found a numpy number in an unknown format")
    return struct.unpack(f"<{form}", content)[0]


NUMBERS = {
    "f8": "d",
    "f4": "f",
    "i8": "q",
    "i4": "i",
    "i2": "h",
    "i1": "b",
    "u8": "Q",
    "u4": "I",
    "u2": "H",
    "u1": "B",
    "b1": "?",
}
NUMPY: Known = {
    "numpy dtype": lambda *arguments: Record("numpy dtype", arguments),
    **{f"numpy.{core}.multiarray scalar": _numpy_scalar for core in ("core", "_core")},
    **{
        f"numpy.{core}.multiarray _reconstruct": lambda *arguments: Record("numpy array", arguments)
        for core in ("core", "_core")
    },
    **unpickle.recorders("numpy ndarray"),
}
"""Names that pickles of numpy's numbers and arrays contain, each with the function that builds the
value. Learning rates and random states may be such numbers and arrays.
"""
KNOWN: Known = {**PLAIN, **TENSORS, **NUMPY}


class Window:
    """A range of a file that can be read like a file, so that `zipfile` can read an archive that
    lies in a larger file.
    """

    def __init__(self, file: IO[bytes], begin: int, size: int) -> None:
        self.file, self.begin, self.size, self.at = file, begin, size, 0

    def seek(self, place: int, whence: int = 0) -> int:
        """As a file does."""
        self.at = max(0, place + (0, self.at, self.size)[whence])
        return self.at

    def tell(self) -> int:
        """As a file does."""
        return self.at

    def read(self, count: int = -1) -> bytes:
        """As a file does."""
        rest = max(0, self.size - self.at)
        self.file.seek(self.begin + self.at)
        content = self.file.read(rest if count < 0 else min(count, rest))
        self.at += len(content)
        return content

    def seekable(self) -> bool:
        """As a file does."""
        return True


@dataclass(frozen=True)
class ArchiveEntry:
    """A file in an archive: where its bytes begin in the file that holds the archive, how many
    they are, and their checksum.
    """

    begin: int
    size: int
    checksum: int


def read_archive(
    path: Path, root: Path, extra: Known | None = None, begin: int = 0, size: int | None = None
) -> Any:
    """Return the value that `torch.save` wrote to `path`, or to a range of this file. Tensors in
    it are lazy.

    `extra` are names that the pickle may contain in addition to those of tensors and plain values.
    Raises `SourceError` if the file is damaged or contains other names.
    """
    with _open_file(path, root) as file:
        entries = archive_entries(
            path, file, begin, path.stat().st_size - begin if size is None else size
        )
        name = next((name for name in entries if name.endswith("/data.pkl")), "")
        top = name.removesuffix("data.pkl")
        if not name:
            raise SourceError(f"{path}: found an archive without a pickle of torch.save; {DAMAGED}")
        order = entries.get(f"{top}byteorder")
        if order is not None and _entry_content(file, order) != b"little":
            raise SourceError(
                f"{path}: the numbers in this file are not little-endian; save it again on a "
                "little-endian machine"
            )
        content = _entry_content(file, entries[name])
    # The storages are not read here: the pickle refers to them by key, and a lazy tensor notes
    # where its bytes lie.
    storages = {
        key.removeprefix(f"{top}data/"): entry
        for key, entry in entries.items()
        if key.startswith(f"{top}data/")
    }
    return unpickle.unpickle_value(
        content, {**KNOWN, **(extra or {})}, path, partial(_storage_of_reference, path, storages)
    )


def advice_on(error: Exception, otherwise: str) -> str:
    """Return advice for a file that could not be read: the system refused it, or it is damaged."""
    # An offset in a damaged file leads to EINVAL.
    is_refusal = isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)
    return "expected a file that can be read" if is_refusal else otherwise


@contextmanager
def _open_file(path: Path, root: Path) -> Iterator[IO[bytes]]:
    """Open the file for a `with` statement. Errors that a damaged archive causes become a
    `SourceError`.
    """
    try:
        with regular(path, root).open("rb") as file:
            yield file
    except UNREADABLE as error:
        raise SourceError(f"{path}: {error}; {advice_on(error, DAMAGED)}") from None


def _entry_content(file: IO[bytes], entry: ArchiveEntry) -> bytes:
    if entry.size > unpickle.MOST:
        raise zipfile.BadZipFile(f"found a pickle of {entry.size} bytes, which is too large")
    file.seek(entry.begin)
    content = file.read(entry.size)
    if zlib.crc32(content) != entry.checksum:
        raise zipfile.BadZipFile("the checksum of a file in the archive does not match")
    return content


def _storage_of_reference(
    path: Path, storages: Mapping[str, ArchiveEntry], reference: Any
) -> Storage:
    """Return the storage to which a pickle refers by the tuple `("storage", class, key, device,
    elements)`.
    """
    kind, holder, key, _, count = reference
    name = holder.name.removeprefix("torch.storage ").removeprefix("torch ").removesuffix("Storage")
    dtype, entry = STORAGES[name], storages[str(key)]
    if kind != "storage" or entry.size != count * WIDTH[dtype]:
        raise ValueError(
            f"found {entry.size} bytes in storage {key}, expected {count} elements of {dtype}"
        )
    return Storage(path, entry.begin, entry.size, dtype)


def archive_entries(path: Path, file: IO[bytes], begin: int, size: int) -> dict[str, ArchiveEntry]:
    """Return the files of an archive by name.

    Raises `SourceError` if two files have the same name or share bytes, or if a file is compressed.
    """
    whole = Window(file, begin, size)
    if whole.read(4) != SIGNATURE:
        raise SourceError(
            f"{path}: expected a file that torch.save of PyTorch 1.6 or later wrote; load it with the "
            "program that wrote it, and save it again"
        )
    infos = zipfile.ZipFile(whole).infolist()
    if any(info.filename.endswith("/constants.pkl") for info in infos):
        raise SourceError(
            f"{path}: found a TorchScript program, expected weights; save the program's state_dict() instead"
        )
    entries: dict[str, ArchiveEntry] = {}
    # torch stores its entries uncompressed, so a tensor's bytes can be read in place. `zipfile`
    # itself accepts all that is refused here: a second entry of a name would replace the first
    # without a word.
    for info in infos:
        if (
            info.filename in entries
            or info.compress_type != zipfile.ZIP_STORED
            or info.flag_bits & 0x1
        ):
            raise SourceError(
                f"{path}: {show_value(info.filename)} is in the archive twice, or is compressed or encrypted; {DAMAGED}"
            )
        start = begin + _content_offset(whole, info)
        if info.file_size != info.compress_size or start + info.file_size > begin + size:
            raise SourceError(
                f"{path}: {show_value(info.filename)} reaches beyond the end of the archive; {DAMAGED}"
            )
        entries[info.filename] = ArchiveEntry(start, info.file_size, info.CRC)
    ends = sorted((entry.begin, entry.begin + entry.size, name) for name, entry in entries.items())
    for (_, end, name), (start, _, other) in pairwise(ends):
        if end > start:
            raise SourceError(
                f"{path}: {show_value(name)} and {show_value(other)} in the archive share bytes; {DAMAGED}"
            )
    return entries


def _content_offset(whole: Window, info: zipfile.ZipInfo) -> int:
    """Return the offset at which the content of a file in an archive begins, behind its header. The
    length of the header is read from the header itself, because the directory at the end of the
    archive may give another one.
    """
    whole.seek(info.header_offset)
    header = whole.read(LOCAL)
    if header[:4] != SIGNATURE:
        raise zipfile.BadZipFile(f"found no header of {show_value(info.filename)}")
    name, padding = struct.unpack("<HH", header[26:30])
    return int(info.header_offset) + LOCAL + int(name) + int(padding)


def title_of_archive(path: Path, root: Path) -> str:
    """Return the name, without suffix, under which a file was written by `torch.save`, even if the
    file was renamed since.
    """
    # torch.save names the folder within the archive after the file, so that a renamed file gives
    # itself away.
    with _open_file(path, root) as file:
        return next(iter(archive_entries(path, file, 0, path.stat().st_size))).partition("/")[0]


Used = Mapping[Path, Sequence[int]]
"""For each file, in ascending order, the offsets of the tensors that are read from it."""


def verify_archive(
    path: Path, root: Path, begin: int = 0, size: int | None = None, used: Used | None = None
) -> None:
    """Raise `SourceError` unless every file in the archive has the checksum that was written with
    it. With `used`, a storage is checked only if a tensor in it is used.
    """
    begins = None if used is None else used.get(path, ())
    with _open_file(path, root) as file:
        for name, entry in archive_entries(
            path, file, begin, path.stat().st_size - begin if size is None else size
        ).items():
            if begins is not None and "/data/" in name:
                # Several tensors may share a storage, so a used one may begin anywhere in it.
                at = bisect_left(begins, entry.begin)
                if at == len(begins) or begins[at] >= entry.begin + entry.size:
                    continue
            file.seek(entry.begin)
            rest, checksum = entry.size, 0
            while rest and (content := file.read(min(rest, 2**22))):
                checksum, rest = zlib.crc32(content, checksum), rest - len(content)
            if checksum != entry.checksum:
                raise SourceError(
                    f"{path}: the checksum of {show_value(name)} does not match its content; {DAMAGED}"
                )
