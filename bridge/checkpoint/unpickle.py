"""Pickles, read as data: only plain values are built, no module is imported, and names that are
not listed are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from bridge.errors import SourceError
from bridge.files.shown import show_value

Builder = Callable[..., Any]
"""Function that builds the value for a listed name, from the arguments that the pickle has for it.
"""
Known = Mapping[str, "Builder | Constant"]
"""The names that a pickle may contain, as "MODULE NAME": each with the function that builds its
value, or with the value itself.
"""
MOST = 2**28
"""Maximum number of bytes of a pickle. Tensors are not in it, but stored beside it."""
MOST_REPEATED, REPEATED = 10**6, 8
"""Most values of a pickle whose containers stand in it several times: so many, and this number for
each of its bytes.
"""
ENCODINGS = ("latin1", "latin-1", "ascii", "utf-8", "utf8")


@dataclass(frozen=True)
class Global:
    """A listed name that a pickle contains, with the function that builds its value."""

    name: str
    build: Builder


@dataclass(eq=False)
class Record:
    """An object in a pickle, kept as data: the name of its class, the arguments of the call that
    would make it, and its attributes. Nothing is called.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)


CONTAINERS = (dict, list, tuple, set, frozenset, Record)


class Constant(str):
    """A listed name that stands for a value and is not called, such as a number format."""

    __slots__ = ()


def recorders(*names: str) -> dict[str, Builder | Constant]:
    """Return entries of a `Known` for these classes. Their objects are kept as records."""

    def recorder(name: str) -> Builder:
        return lambda *arguments: Record(name, arguments)

    # A lambda in the comprehension itself would see the last name only.
    return {name: recorder(name) for name in names}


def _as_dictionary(pairs: Any = ()) -> dict[Any, Any]:
    rows = pairs.items() if isinstance(pairs, Mapping) else pairs
    return {checked_key(key): value for key, value in rows}


DEEPEST_KEY, LARGEST_KEY, LONGEST_NUMBER = 20, 1000, 2**12
"""Bounds of a key of a dictionary or an element of a set: nested tuples, values in all of them, and
bits of a number. Python's hash of a tuple walks all of it each time, without a limit of depth.
"""


def checked_key(key: Any) -> Any:
    """Return `key`. Raises `ValueError` if it is nested too deeply or too large to be hashed."""
    level, count = [key], 0
    for _ in range(DEEPEST_KEY):
        # Values that stand in a tuple many times count each time, as they are hashed each time.
        inner = [item for item in level if isinstance(item, tuple | frozenset)]
        count += len(level)
        sizes = (item.bit_length() for item in level if isinstance(item, int))
        if count + sum(map(len, inner)) > LARGEST_KEY or max(sizes, default=0) > LONGEST_NUMBER:
            break
        if not inner:
            return key
        level = [value for item in inner for value in item]
    raise ValueError("found a key of a dictionary or set that is too deeply nested or too large")


def refuse_repetition(value: Any, most: int) -> None:
    """Raise `ValueError` if a value contains itself, or if it has more than `most` values with each
    container counted as often as it is reached: a small file could unfold into values without end.
    """
    sizes: dict[int, int] = {}
    stack: list[tuple[Any, list[Any] | None]] = [(value, None)]
    while stack:
        item_to_visit, inner = stack.pop()
        if inner is None:
            if id(item_to_visit) in sizes:
                if not sizes[id(item_to_visit)]:
                    raise ValueError("found a value that contains itself")
                continue
            inner = _values_inside(item_to_visit)
            sizes[id(item_to_visit)] = 0
            stack.append((item_to_visit, inner))
            stack += [(item, None) for item in inner if isinstance(item, CONTAINERS)]
        else:
            count = 1 + len(inner)
            count += sum(sizes[id(item)] for item in inner if isinstance(item, CONTAINERS))
            if count > most:
                raise ValueError("found values that are repeated without end")
            sizes[id(item_to_visit)] = count


def _values_inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, Record):
        return [*value.arguments, value.state]
    return list(value) if isinstance(value, list | tuple | set | frozenset) else []


def _as_bytes(text: str, encoding: str) -> bytes:
    if encoding not in ENCODINGS:
        raise ValueError(encoding)
    return text.encode(encoding)


NAMESPACES = ("argparse Namespace", "types SimpleNamespace")
"""Classes of Python whose objects have attributes and nothing else."""
DICTIONARIES = (
    *(
        f"{package}.utilities.parsing AttributeDict"
        for package in ("lightning.pytorch", "pytorch_lightning")
    ),
    *(
        f"{package}.utilities.data AttributeDict"
        for package in ("lightning.fabric", "lightning_fabric")
    ),
)
"""Classes of Lightning that are dictionaries (lightning/fabric/utilities/data.py)."""


def values_of(value: Any) -> Any:
    """Return the attributes of a namespace by name; any other value as it is."""
    is_namespace = isinstance(value, Record) and value.name in NAMESPACES
    return value.state if is_namespace else value


PLAIN: Known = {
    **recorders(*NAMESPACES),
    **dict.fromkeys(DICTIONARIES, _as_dictionary),
    **dict.fromkeys(
        ("pathlib PosixPath", "pathlib._local PosixPath"), lambda *parts: str(PurePosixPath(*parts))
    ),
    **dict.fromkeys(
        ("pathlib WindowsPath", "pathlib._local WindowsPath"),
        lambda *parts: str(PureWindowsPath(*parts)),
    ),
    "collections OrderedDict": _as_dictionary,
    "collections Counter": _as_dictionary,
    "builtins dict": _as_dictionary,
    "builtins set": lambda items=(): {checked_key(item) for item in items},
    "builtins bytes": lambda: b"",
    "builtins frozenset": lambda items=(): frozenset(map(checked_key, items)),
    "builtins complex": complex,
    "_codecs encode": _as_bytes,
}
"""Names that pickles contain for plain values of Python, each with the function that builds the
value.
"""


OLD = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Names that modules had in Python 2 and have in pickles of protocol 2, with the names in Python
3.
"""


class _Stopped(Exception):
    """Raised by the operation that ends a pickle."""


class _Mark:
    """Mark that a pickle puts on the stack before a sequence of values."""


MARK = _Mark()


class Machine:
    """Reads one pickle. `known` has the names that it may contain; `persistent` builds the value
    of a reference to something outside the pickle, such as a storage.
    """

    def __init__(self, data: bytes, names: Known, persistent: Builder | None = None) -> None:
        self.data, self.known, self.persistent = data, names, persistent
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.repeated = False
        """Whether a container stands in the pickle more than once."""

    def run(self) -> Any:
        """Return the value of the pickle. Raises `Unlisted` if it contains another name, and one
        of `FLAWS` if it is damaged.
        """
        try:
            while True:
                code = self.take(1)[0]
                if code not in OPERATIONS:
                    raise ValueError(f"found the unknown operation {code:#x} at byte {self.at - 1}")
                OPERATIONS[code](self)
        except _Stopped:
            (value,) = self.stack
            if self.repeated:
                refuse_repetition(value, MOST_REPEATED + REPEATED * len(self.data))
            return value

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        content = self.data[self.at : self.at + count]
        if len(content) != count:
            raise ValueError(f"the pickle ends too early, at byte {len(self.data)}")
        self.at += count
        return content

    def number(self, form: str) -> Any:
        """Return the next number; `form` is its format as in the module `struct`."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        """Read the next line."""
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def pop_to_mark(self) -> list[Any]:
        """Return the values above the last mark on the stack. They and the mark are removed."""
        for place in range(len(self.stack) - 1, -1, -1):
            if self.stack[place] is MARK:
                values = self.stack[place + 1 :]
                del self.stack[place:]
                return values
        raise ValueError(f"found no mark on the stack at byte {self.at}")

    def look_up(self, module: str, name: str) -> Any:
        """Return what a name stands for: its value, or a `Global` with its function. Raises
        `Unlisted` for a name that is not listed.
        """
        full = f"{OLD.get(module, module)} {name}"
        if full not in self.known:
            raise Unlisted(f"{module}.{name}")
        build = self.known[full]
        return build if isinstance(build, Constant) else Global(full, build)

    def call(self, target: Any, arguments: Any) -> Any:
        """Return the value that a listed name's function builds from these arguments."""
        if not isinstance(target, Global) or not isinstance(arguments, tuple):
            raise ValueError(
                f"found a call at byte {self.at} of something other than a listed name"
            )
        return target.build(*arguments)


class Unlisted(Exception):
    """Raised if a pickle contains a name that is not listed."""


def _put_memo(key: Callable[[Machine], int]) -> Callable[[Machine], None]:
    def put(machine: Machine) -> None:
        machine.memo[key(machine)] = machine.stack[-1]

    return put


def _get_memo(key: Callable[[Machine], int]) -> Callable[[Machine], None]:
    def get(machine: Machine) -> None:
        value = machine.memo[key(machine)]
        machine.repeated = machine.repeated or isinstance(value, CONTAINERS)
        machine.stack.append(value)

    return get


def _push_value(make: Callable[[Machine], Any]) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(make(machine))


def _unpack_form(form: str) -> Callable[[Machine], Any]:
    return lambda machine: machine.number(form)


def _read_text(form: str) -> Callable[[Machine], None]:
    return _push_value(
        lambda machine: machine.take(machine.number(form)).decode("utf-8", "surrogatepass")
    )


def _read_raw(form: str) -> Callable[[Machine], None]:
    return _push_value(lambda machine: machine.take(machine.number(form)))


def _read_long(form: str) -> Callable[[Machine], None]:
    return _push_value(
        lambda machine: int.from_bytes(machine.take(machine.number(form)), "little", signed=True)
    )


def _build_tuple(count: int) -> Callable[[Machine], None]:
    def build(machine: Machine) -> None:
        items = [machine.stack.pop() for _ in range(count)]
        machine.stack.append(tuple(reversed(items)))

    return build


def _append_item(machine: Machine) -> None:
    item = machine.stack.pop()
    _container_on_top(machine, list).append(item)


def _container_on_top(machine: Machine, kind: type[Any]) -> Any:
    """Return the value on top of the stack. Raises `ValueError` if it is not exactly of the type
    `kind`.
    """
    # The exact type: an operation must not reach a method of anything else that a pickle put there.
    container = machine.stack[-1]
    if type(container) is not kind:
        raise ValueError(f"found no {kind.__name__} on the stack at byte {machine.at}")
    return container


def _append_items(machine: Machine) -> None:
    items = machine.pop_to_mark()
    _container_on_top(machine, list).extend(items)


def _add_items(machine: Machine) -> None:
    items = machine.pop_to_mark()
    _container_on_top(machine, set).update(map(checked_key, items))


def _set_item(machine: Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _container_on_top(machine, dict)[checked_key(key)] = value


def _set_items(machine: Machine) -> None:
    items = machine.pop_to_mark()
    target = _container_on_top(machine, dict)
    # One by one: a call for all of them could not be interrupted.
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[checked_key(key)] = value


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise ValueError(f"found a name at byte {machine.at} that is no text")
    machine.stack.append(machine.look_up(module, name))


def _find_global(machine: Machine) -> None:
    machine.stack.append(machine.look_up(machine.line(), machine.line()))


def _call_builder(machine: Machine) -> None:
    arguments, target = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.call(target, arguments))


def _new_with_names(machine: Machine) -> None:
    keywords = machine.stack.pop()
    if keywords:
        raise ValueError(f"found keyword arguments at byte {machine.at}, which are not read")
    _call_builder(machine)


def _set_attributes(machine: Machine) -> None:
    """Set the attributes of the object on top of the stack. A record keeps its attributes. Those of
    a dictionary are dropped, such as the `_metadata` of a state dict.
    """
    state, target = machine.stack.pop(), machine.stack[-1]
    if isinstance(target, Record):
        target.state = state if isinstance(state, dict) else {"": state}
    elif not (isinstance(target, dict) and isinstance(state, dict)):
        raise ValueError(
            f"found attributes of a {type(target).__name__}, which has none, at byte {machine.at}"
        )


def _load_persistent(machine: Machine) -> None:
    if machine.persistent is None:
        raise ValueError(f"found a reference to a storage at byte {machine.at}, expected none")
    machine.stack.append(machine.persistent(machine.stack.pop()))


def _stop_machine(machine: Machine) -> None:
    raise _Stopped


def _drop_marked(machine: Machine) -> None:
    machine.pop_to_mark()


def _pop_value(machine: Machine) -> None:
    machine.stack.pop()


def _skip_frame(machine: Machine) -> None:
    machine.take(8)


def _check_protocol(machine: Machine) -> None:
    if machine.take(1)[0] > 5:
        raise ValueError("found a pickle of a protocol above 5")


OPERATIONS: Mapping[int, Callable[[Machine], None]] = {
    ord("."): _stop_machine,
    ord("("): _push_value(lambda machine: MARK),
    ord("0"): _pop_value,
    ord("1"): _drop_marked,
    ord("N"): _push_value(lambda machine: None),
    0x88: _push_value(lambda machine: True),
    0x89: _push_value(lambda machine: False),
    ord("J"): _push_value(_unpack_form("<i")),
    ord("K"): _push_value(_unpack_form("<B")),
    ord("M"): _push_value(_unpack_form("<H")),
    0x8A: _read_long("<B"),
    0x8B: _read_long("<i"),
    ord("G"): _push_value(_unpack_form(">d")),
    ord("X"): _read_text("<I"),
    0x8C: _read_text("<B"),
    0x8D: _read_text("<Q"),
    ord("B"): _read_raw("<I"),
    ord("C"): _read_raw("<B"),
    0x8E: _read_raw("<Q"),
    ord(")"): _push_value(lambda machine: ()),
    ord("t"): _push_value(lambda machine: tuple(machine.pop_to_mark())),
    0x85: _build_tuple(1),
    0x86: _build_tuple(2),
    0x87: _build_tuple(3),
    ord("]"): _push_value(lambda machine: []),
    ord("l"): _push_value(lambda machine: machine.pop_to_mark()),
    ord("a"): _append_item,
    ord("e"): _append_items,
    ord("}"): _push_value(lambda machine: {}),
    ord("s"): _set_item,
    ord("u"): _set_items,
    0x8F: _push_value(lambda machine: set()),
    0x90: _add_items,
    0x91: _push_value(lambda machine: frozenset(map(checked_key, machine.pop_to_mark()))),
    ord("q"): _put_memo(_unpack_form("<B")),
    ord("r"): _put_memo(_unpack_form("<I")),
    0x94: _put_memo(lambda machine: len(machine.memo)),
    ord("h"): _get_memo(_unpack_form("<B")),
    ord("j"): _get_memo(_unpack_form("<I")),
    ord("c"): _find_global,
    0x93: _stack_global,
    ord("R"): _call_builder,
    # NEWOBJ makes an object without a call of __init__. For data it is the same as REDUCE: a record
    # with its arguments.
    0x81: _call_builder,
    0x92: _new_with_names,
    ord("b"): _set_attributes,
    ord("Q"): _load_persistent,
    0x80: _check_protocol,
    0x95: _skip_frame,
}
"""A table from the code of an operation to the function that does it. It has the operations of
protocols 2 to 5, except those that look up names by number or call functions in unusual ways.
"""

FLAWS = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    struct.error,
    OverflowError,
    RecursionError,
)
"""The errors that may arise when a damaged pickle is read."""


def unpickle_value(
    data: bytes, names: Known, where: object, persistent: Builder | None = None
) -> Any:
    """Return the value of the pickle `data`. Raises `SourceError` if it is damaged or contains a
    name that is not listed; `where` is the place in the message.
    """
    if len(data) > MOST:
        raise SourceError(
            f"{where}: found a pickle of {len(data)} bytes, expected at most {MOST}; this is no checkpoint"
        )
    try:
        return Machine(data, names, persistent).run()
    except Unlisted as error:
        raise SourceError(
            f"{where}: the pickle names {show_value(str(error))}, which no checkpoint of this kind needs; no "
            "code was executed; if you trust the author of the file, save it again as plain tensors and numbers"
        ) from None
    except FLAWS as error:
        raise SourceError(
            f"{where}: expected a pickle as torch writes it ({show_value(str(error), 60)}); the file is damaged"
        ) from None
