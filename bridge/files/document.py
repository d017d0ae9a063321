"""A parsed document: plain data, the line of every value, and duplicate keys.

Also the limits that apply to all formats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge import limits
from bridge.errors import SourceError

Key = tuple[str | int, ...]
"""Place of a value: mapping keys and list positions from the root."""

LONGEST = 400
"""Number of digits from which on a decimal text is not converted to an integer."""
TEXT = "text"
"""What messages call a text that was not read from a file."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A key that occurs twice in one mapping: both lines, the first value, which is replaced, and
    whether the two values differ.
    """

    key: Key
    lines: tuple[int, int]
    replaced: Any
    differs: bool = True


@dataclass(frozen=True)
class Document:
    """Parsed content: plain mappings, lists and scalars, and the line of each value, counted from 1.

    `format` is json, hjson, yaml or flags; for flags `data` is a list of words. `strings` holds
    numbers that YAML 1.1 loaders would leave as strings, such as `1e-6`, as they are spelled;
    `data` has them as numbers.
    """

    data: Any
    lines: Mapping[Key, int]
    format: str
    duplicates: tuple[Duplicate, ...] = ()
    strings: Mapping[Key, str] = field(default_factory=dict)
    name: str = TEXT

    def line(self, *key: str | int) -> int | None:
        """Return the line of the value at `key`, else the line of its nearest parent that has one."""
        parents = (key[:length] for length in range(min(len(key), limits.DEPTH), -1, -1))
        return next((self.lines[parent] for parent in parents if parent in self.lines), None)


Entry = tuple[str, "Node", int]
"""One pair of a mapping: its name, its value, and the line of the name."""


@dataclass(slots=True)
class Node:
    """A parsed value, before duplicates and aliases are resolved: a scalar, a list of nodes, or the
    entries of a mapping.

    `spelling` is set for numbers that YAML 1.1 loaders leave as strings.
    """

    value: Any
    line: int
    kind: str = "scalar"
    spelling: str = ""


@dataclass
class Builder:
    """Turns nodes into plain data. Raises `SourceError` if the data exceeds the limits."""

    name: str
    lines: dict[Key, int] = field(default_factory=dict)
    strings: dict[Key, str] = field(default_factory=dict)
    duplicates: list[Duplicate] = field(default_factory=list)
    compared: int = 0

    def document(self, root: Node, format: str) -> Document:
        """Return the document with the root node `root`.

        Raises `SourceError` if it exceeds the limits or contains a number that is not finite.
        """
        data = self.value(root, (), root.line)
        return Document(data, self.lines, format, tuple(self.duplicates), self.strings, self.name)

    def value(self, node: Node, key: Key, line: int) -> Any:
        self.lines[key] = line
        check_limits(len(self.lines), len(key), self.name, node.line)
        if node.kind == "mapping":
            return self.mapping(node.value, key)
        if node.kind == "list":
            return [
                self.value(item, (*key, index), item.line) for index, item in enumerate(node.value)
            ]
        return self.scalar(node, key)

    def mapping(self, entries: list[Entry], key: Key) -> dict[str, Any]:
        last: dict[str, tuple[Node, int]] = {}
        for name, node, line in entries:
            check_scalar(name, self.name, line, key)
            if name in last:
                self.record_duplicate(*last[name], (*key, name), node, line)
            last[name] = (node, line)
        return {name: self.value(node, (*key, name), line) for name, (node, line) in last.items()}

    def record_duplicate(self, node: Node, before: int, key: Key, now: Node, line: int) -> None:
        value = node.value if node.kind == "scalar" else None
        self.duplicates.append(Duplicate(key, (before, line), value, not self.same(node, now)))

    def same(self, one: Node, other: Node) -> bool:
        """Return whether two nodes have the same value.

        After more than `limits.VALUES` compared pairs, two nodes always count as different.
        """
        pairs = [(one, other)]
        while pairs:
            left, right = pairs.pop()
            self.compared += 1
            inner = [] if left is right else _pairs(left, right)
            if inner is None or self.compared > limits.VALUES:
                return False
            pairs += inner
        return True

    def scalar(self, node: Node, key: Key) -> Any:
        check_scalar(node.value, self.name, node.line, key)
        if node.spelling:
            self.strings[key] = node.spelling
        return node.value


def _pairs(left: Node, right: Node) -> list[tuple[Node, Node]] | None:
    """Return the pairs of inner nodes that remain to be compared; None if the two nodes already differ."""
    if left.kind != right.kind:
        return None
    if left.kind == "scalar":
        alike = type(left.value) is type(right.value) and (left.value, left.spelling) == (
            right.value,
            right.spelling,
        )
        return [] if alike else None
    if len(left.value) != len(right.value):
        return None
    if left.kind == "list":
        return list(zip(left.value, right.value, strict=True))
    ours, theirs = ({name: node for name, node, _ in side.value} for side in (left, right))
    return [(ours[name], theirs[name]) for name in ours] if ours.keys() == theirs.keys() else None


def check_limits(nodes: int, depth: int, name: str, line: int) -> None:
    """Raise `SourceError` for more values than `limits.VALUES`, or for nesting deeper than `limits.DEPTH`."""
    if nodes > limits.VALUES:
        problem = f"found more than {limits.VALUES:,} values, aliases expanded"
        raise SourceError(
            f"{name}: line {line}: {problem}; a config is smaller, is this the right file?"
        )
    if depth > limits.DEPTH:
        problem = f"found nesting deeper than {limits.DEPTH} levels"
        raise SourceError(
            f"{name}: line {line}: {problem}; no config is nested that deep, is this the right file?"
        )


def check_nested(data: Any, name: str, most: int = limits.VALUES) -> None:
    """Raise `SourceError` if `data` exceeds the limits that apply to files.

    `data` was not read from a file, so a mapping or list may contain itself.
    """
    level, nodes, depth = [data], 0, 0
    while level:
        nodes, depth = nodes + len(level), depth + 1
        if nodes > most or depth > limits.DEPTH:
            problem = f"more than {most:,} values or {limits.DEPTH} levels of nesting"
            raise SourceError(f"{name}: found {problem}; a config is smaller")
        # Level by level, and counted: data with a cycle ends at the limit.
        following: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                following += value.values()
            elif isinstance(value, list | tuple):
                following += value
        level = following


def check_scalar(value: Any, name: str, line: int | None, key: Key) -> None:
    """Raise `SourceError` for NaN, infinity, numbers out of range, and text with half a surrogate pair."""
    if isinstance(value, float) and not math.isfinite(value):
        problem = "found NaN, infinity or a number out of range"
        raise SourceError(
            f"{name}: line {line}: {key_with_dots(key)}: {problem}; write a finite number"
        )
    if isinstance(value, int) and abs(value) > limits.INTEGER:
        raise SourceError(
            f"{name}: line {line}: {key_with_dots(key)}: found a whole number beyond 64 bits; write a smaller one"
        )
    # No UTF-8 can hold half a pair, so that what is written later would fail. ASCII is the quick
    # way out.
    if (
        isinstance(value, str)
        and not value.isascii()
        and any("\ud800" <= char <= "\udfff" for char in value)
    ):
        where = key_with_dots(key).encode("ascii", "backslashreplace").decode()
        raise SourceError(
            f"{name}: line {line}: {where}: found half a surrogate pair; write whole characters"
        )


def key_with_dots(key: Key) -> str:
    """Return `key` as one text with dots, such as `zero_optimization.stage`."""
    return ".".join(map(str, key)) or "the file"


def integer(digits: str) -> int | float:
    """Convert decimal digits to an integer.

    Too many digits give infinity, which a later check refuses.
    """
    # The time of the conversion grows with the square of the digits.
    return int(digits) if len(digits) < LONGEST else math.inf
