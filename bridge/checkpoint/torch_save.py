"""Files as `torch.save` writes them: a pickle of plain values, and the storages of tensors, which
are filled from lazy tensors.
"""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from bridge.checkpoint.archive import contiguous_strides
from bridge.checkpoint.files import File, Late, all_of, size_of
from bridge.checkpoint.lazy import TORCH, ElementRun, Lazy
from bridge.checkpoint.unpickle import Constant, Record

ALIGNED = 64
"""Each storage begins at a multiple of this number of bytes, as in torch."""
KIND = {
    "F64": "Double",
    "F32": "Float",
    "F16": "Half",
    "BF16": "BFloat16",
    "I64": "Long",
    "I32": "Int",
    "I16": "Short",
    "I8": "Char",
    "U8": "Byte",
    "BOOL": "Bool",
    "C64": "ComplexFloat",
}
"""Names of the classes of storages. Numbers of other formats are in a storage of bytes, with their format beside
it (torch/_tensor.py: _reduce_ex_internal).
"""


class Size(tuple[int, ...]):
    """A shape that is written into a pickle as `torch.Size`."""

    __slots__ = ()


class Pickle:
    """Writes a value as a pickle of protocol 2, as torch.save does. The lazy tensors in it are
    collected in `storages`.
    """

    # The operations are those of Python's pickletools: "(" marks, "t" makes a tuple of all above
    # the mark, "R" calls, "b" sets attributes, "Q" is a reference to a storage.

    def __init__(self) -> None:
        self.storages: list[Lazy] = []
        self.numbers: dict[int, int] = {}
        self.out = bytearray(b"\x80\x02")

    def of(self, value: Any) -> bytes:
        """Return the bytes of the pickle of `value`."""
        self.put(value)
        return bytes(self.out + b".")

    def put(self, value: Any) -> None:
        """One value."""
        for kinds, write in WRITERS:
            if isinstance(value, kinds):
                write(self, value)
                return
        raise TypeError(
            f"found a value of type {type(value).__name__}, which a checkpoint cannot hold"
        )

    def name(self, full: str) -> None:
        """Write the name of a class or function; `full` is its module and its name."""
        module, _, name = full.partition(" ")
        self.out += f"c{module}\n{name}\n".encode()

    def constant(self, value: Constant) -> None:
        """Write a number format."""
        self.name(f"torch {TORCH[value]}")

    def integer(self, value: int) -> None:
        """Write an integer."""
        # "J" has four bytes; LONG1 has as many as it says, with room for the sign.
        if -(2**31) <= value < 2**31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            size = value.bit_length() // 8 + 1
            self.out += b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)

    def text(self, value: str) -> None:
        """A text."""
        content = value.encode("utf-8", "surrogatepass")
        self.out += b"X" + struct.pack("<I", len(content)) + content

    def items(self, values: Sequence[Any]) -> None:
        """A tuple."""
        self.out += b"("
        for value in values:
            self.put(value)
        self.out += b"t"

    def shape(self, value: Size) -> None:
        """A shape."""
        self.name("torch Size")
        self.items((tuple(value),))
        self.out += b"R"

    def add_list(self, values: list[Any]) -> None:
        """A list."""
        self.out += b"]("
        for value in values:
            self.put(value)
        self.out += b"e"

    def collection(self, values: set[Any] | frozenset[Any]) -> None:
        """Write a set. The order of its elements is the same in every process, so that equal
        values make equal files.
        """
        self.name(f"builtins {type(values).__name__}")
        self.items((sorted(values, key=repr),))
        self.out += b"R"

    def add_ordered_dict(self, values: Mapping[Any, Any]) -> None:
        """An OrderedDict."""
        self.name("collections OrderedDict")
        self.out += b")R"
        self.pairs(values)

    def add_dict(self, values: Mapping[Any, Any]) -> None:
        """A dictionary."""
        self.out += b"}"
        self.pairs(values)

    def pairs(self, values: Mapping[Any, Any]) -> None:
        """Write the keys and values of a dictionary."""
        self.out += b"("
        for key, value in values.items():
            self.put(key)
            self.put(value)
        self.out += b"u"

    def record(self, value: Record) -> None:
        """Write an object: its class, a call of the class if there are arguments, and the object's
        attributes.
        """
        self.name(value.name)
        self.items(value.arguments)
        self.out += b"R" if value.arguments else b"\x81"
        if value.state:
            self.put(value.state[""] if set(value.state) == {""} else value.state)
            self.out += b"b"

    def tensor(self, value: Lazy) -> None:
        """Write a tensor, which gets a storage of its own."""
        typed = value.dtype in KIND
        self.name(f"torch._utils _rebuild_tensor_{'v2' if typed else 'v3'}")
        self.out += b"("
        self.items_of_storage(value)
        self.integer(0)
        self.items(tuple(value.shape))
        self.items(contiguous_strides(value.shape))
        self.put(False)
        self.add_ordered_dict({})
        if not typed:
            self.constant(Constant(value.dtype))
        self.out += b"tR"

    def items_of_storage(self, value: Lazy) -> None:
        """Write the reference by which torch finds the storage of a tensor."""
        self.out += b"("
        self.text("storage")
        kind = KIND.get(value.dtype)
        self.name(f"torch {kind}Storage" if kind else "torch.storage UntypedStorage")
        # A tensor that stands in two places, such as a tied weight, has one storage, and is tied
        # again when it is loaded.
        number = self.numbers.setdefault(id(value), len(self.storages))
        self.text(str(number))
        self.text("cpu")
        self.integer(value.count if kind else value.size)
        self.out += b"tQ"
        if number == len(self.storages):
            self.storages.append(value)


def _pack_flag(pickle: Pickle, value: bool) -> None:
    pickle.out += b"\x88" if value else b"\x89"


def _pack_number(pickle: Pickle, value: float) -> None:
    pickle.out += b"G" + struct.pack(">d", value)


def _pack_none(pickle: Pickle, value: None) -> None:
    pickle.out += b"N"


WRITERS: tuple[tuple[Any, Callable[[Pickle, Any], None]], ...] = (
    (type(None), _pack_none),
    (bool, _pack_flag),
    (Constant, Pickle.constant),
    (int, Pickle.integer),
    (float, _pack_number),
    (str, Pickle.text),
    (Size, Pickle.shape),
    (tuple, Pickle.items),
    (list, Pickle.add_list),
    (set | frozenset, Pickle.collection),
    (OrderedDict, Pickle.add_ordered_dict),
    (Mapping, Pickle.add_dict),
    (Record, Pickle.record),
    (Lazy, Pickle.tensor),
)
"""Types of values, each with the function that writes such a value. A type comes before its base
types: bool before int.
"""


def torch_file(name: str, value: Any) -> File:
    """Return the file that `torch.save(value, name)` would write if all tensors were contiguous
    and on the CPU.
    """
    return File(name, tuple(parts_of(name.rpartition("/")[2].rpartition(".")[0], value)))


def parts_of(top: str, value: Any) -> Iterator[bytes | ElementRun | Late]:
    """Yield the parts of a file as torch.save writes it. The names in the archive begin with the
    folder `top`.
    """
    pickle = Pickle()
    content = pickle.of(value)
    small = {
        "data.pkl": content,
        ".format_version": b"1",
        ".storage_alignment": b"64",
        "byteorder": b"little",
    }
    bodies: dict[str, bytes | ElementRun] = {
        **small,
        **{f"data/{at}": all_of(storage) for at, storage in enumerate(pickle.storages)},
    }
    yield from _zip_parts(
        {f"{top}/{name}": body for name, body in {**bodies, "version": b"3\n"}.items()}
    )


LOCAL, CENTRAL, END = "<4sHHHHHIIIHH", "<4sHHHHHHIIIHHHHHII", "<4sHHHHIIH"
LARGE = 0xFFFFFFFF


def _zip_parts(bodies: Mapping[str, bytes | ElementRun]) -> Iterator[bytes | ElementRun | Late]:
    """Yield the parts of an uncompressed zip file that has these contents by name.

    The checksum of a tensor's run is written behind the run and in the directory at the end of the
    file. So a run is read only once, while it is written, although its checksum is not known when
    the header before it is written.
    """
    at, places = 0, []
    for name, body in bodies.items():
        size = len(body) if isinstance(body, bytes) else size_of(body)
        header = _local_header(name, body, size, at)
        places.append((name.encode(), body, size, at))
        yield header
        yield body
        at += len(header) + size
        if isinstance(body, ElementRun):
            behind = Late(24, (body,), partial(_zip_descriptor, size))
            yield behind
            at += behind.size
    runs = tuple(body for _, body, _, _ in places if isinstance(body, ElementRun))
    # The list is as long with any checksums, so its size is known now.
    directory = _zip_directory(places, dict.fromkeys(range(len(runs)), 0), at)
    yield Late(len(directory), runs, lambda sums: _zip_directory(places, dict(enumerate(sums)), at))


def _zip_descriptor(size: int, sums: Sequence[int]) -> bytes:
    """Return the zip descriptor that stands behind a run: the checksum of the run, and its size,
    packed and unpacked.
    """
    return struct.pack("<4sIQQ", b"PK\x07\x08", sums[0], size, size)


def _zip_flags(body: bytes | ElementRun) -> int:
    """Return the flags of a file in a zip archive: its name is in UTF-8 (bit 11), and the checksum
    of a run stands behind the run (bit 3).
    """
    return 0x800 | (0x8 if isinstance(body, ElementRun) else 0)


def _local_header(name: str, body: bytes | ElementRun, size: int, at: int) -> bytes:
    """Return the zip header before the content of a file, padded so that the content begins at a
    multiple of `ALIGNED`. Sizes have 64 bits.
    """
    content_of_name = name.encode()
    sizes = struct.pack("<HHQQ", 1, 16, size, size)
    padding = -(at + struct.calcsize(LOCAL) + len(content_of_name) + len(sizes) + 4) % ALIGNED
    extra = sizes + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    sum_ = zlib.crc32(body) if isinstance(body, bytes) else 0
    fields = (
        b"PK\x03\x04",
        45,
        _zip_flags(body),
        0,
        0,
        0x21,
        sum_,
        LARGE,
        LARGE,
        len(content_of_name),
        len(extra),
    )
    return struct.pack(LOCAL, *fields) + content_of_name + extra


def _zip_directory(
    places: Sequence[tuple[bytes, bytes | ElementRun, int, int]], sums: Mapping[int, int], at: int
) -> bytes:
    """Return the directory of a zip file, which stands at the end of the file from byte `at` on.
    `sums` has the checksum of each run, by the number of the run.
    """
    out, runs = bytearray(), 0
    for name, body, size, begin in places:
        sum_ = zlib.crc32(body) if isinstance(body, bytes) else sums[runs]
        if isinstance(body, ElementRun):
            runs += 1
        extra = struct.pack("<HHQQQ", 1, 24, size, size, begin)
        fields = (
            b"PK\x01\x02",
            45,
            45,
            _zip_flags(body),
            0,
            0,
            0x21,
            sum_,
            LARGE,
            LARGE,
            len(name),
            len(extra),
            0,
            0,
            0,
            0,
            LARGE,
        )
        out += struct.pack(CENTRAL, *fields) + name + extra
    # Sizes and places have 64 bits: the 32-bit fields hold LARGE, and zip64's end record and its
    # locator come before the usual end record.
    size, count = len(out), len(places)
    out += struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, at)
    out += struct.pack("<4sIQI", b"PK\x06\x07", 0, at + size, 1)
    out += struct.pack(END, b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, LARGE, LARGE, 0)
    return bytes(out)
