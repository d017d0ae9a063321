"""JSON and HJSON: values as the standard parsers read them, with the line of each."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bridge.errors import SourceError
from bridge.files.document import (
    TEXT,
    Builder,
    Document,
    Entry,
    Key,
    Node,
    check_limits,
    check_scalar,
    integer,
    key_with_dots,
)


class MalformedError(SourceError):
    """Raised for text with a syntax error.

    `lax` says whether a laxer syntax, such as HJSON, may allow the text.
    """

    def __init__(self, problem: str, lax: bool) -> None:
        super().__init__(problem)
        self.lax = lax


def load_json(text: str, name: str = TEXT) -> Document:
    """Parse strict JSON.

    Raises `SourceError` for syntax errors, duplicate keys, NaN and numbers out of range.
    """
    import json

    constants: list[str] = []
    try:
        data = json.loads(text, parse_int=integer, parse_constant=constants.append)
    except RecursionError:
        data = None  # the limits are checked below, with a line
    except ValueError as error:
        raise _malformed_error(error, text, name) from None
    if constants:
        raise SourceError(
            f"{name}: line {_constant_line(text)}: found {constants[0]}; write a finite number"
        )
    # The values are those of the standard library. The HJSON parser, which reads JSON as well, adds
    # lines and duplicates.
    document = replace(load_hjson(text, name), data=data, format="json")
    _check_scalars(document.data, document)
    return document


def load_hjson(text: str, name: str = TEXT) -> Document:
    """Parse HJSON: JSON with comments, trailing commas, and keys and strings without quotes.

    Raises `SourceError` for the same reasons as `load_json`.
    """
    document = Builder(name).document(_nodes(text, name), "hjson")
    SourceError.raise_if(
        f"{name}: lines {twin.lines[0]} and {twin.lines[1]}: {key_with_dots(twin.key)} is given twice; keep one"
        for twin in document.duplicates
    )
    return document


def load_json_or_hjson(text: str, name: str = TEXT) -> Document:
    """Parse JSON, or HJSON if the text differs from JSON in a way that HJSON allows."""
    try:
        return load_json(text, name)
    except MalformedError as error:
        strict = error
    # If HJSON would not allow what is wrong with the JSON, the text is meant as JSON, and that
    # error is the one to tell.
    try:
        return load_hjson(text, name)
    except MalformedError as error:
        raise (error if strict.lax else strict) from None


def _malformed_error(error: Exception, text: str, name: str) -> MalformedError:
    position = min(getattr(error, "pos", len(text)), len(text))
    if position >= len(text.rstrip()):
        return MalformedError(f"{name}: ends within a value; is the file complete?", lax=False)
    excerpt = text[position : position + 20].partition("\n")[0]
    problem = (
        getattr(error, "msg", str(error))
        .removesuffix(" starting at")
        .removesuffix(" at")
        .replace(" %r", "")
    )
    line = text.count("\n", 0, position) + 1
    problem = problem[:1].lower() + problem[1:]
    message = f"{name}: line {line}: found {excerpt!r}; {problem}; fix the syntax there"
    return MalformedError(message, lax=re.match(r"[#/'\w}\]]", excerpt) is not None)


def _constant_line(text: str) -> int:
    """Return the line of the first NaN or Infinity outside of strings, in a text that is otherwise JSON."""
    for match in re.finditer(r'"(?:[^"\\]|\\.)*+"|(NaN|-?Infinity)', text):
        if match[1]:
            return text.count("\n", 0, match.start()) + 1
    return 1


def _check_scalars(data: Any, document: Document, key: Key = ()) -> None:
    check_scalar(data, document.name, document.line(*key), key)
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for step, value in items:
        _check_scalars(value, document, (*key, step))


class _Infinite(float):
    """An infinite float that `int()` turns into 0.

    The HJSON parser calls `int()`; the infinity itself is refused later, with its line.
    """

    def __int__(self) -> int:
        return 0


def _real(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _Infinite(value)


def _nodes(text: str, name: str) -> Node:
    from hjson.decoder import HjsonDecoder, make_scanner

    parser: Any = HjsonDecoder(parse_int=integer, parse_float=_real)
    scan = _Scan(text, name)
    parser.parse_object, parser.parse_array = scan.mapping, scan.items
    parser.scan_once, parser.scan_object_once = make_scanner(parser)
    try:
        root = parser.decode(text)
    except (ValueError, IndexError) as error:
        raise _malformed_error(error, text, name) from None
    return (
        root
        if isinstance(root, Node)
        else Node([] if root == {} else root, 1, "mapping" if root == {} else "scalar")
    )


class _Scan:
    """Replacements for functions of the HJSON parser, so that each value becomes a node with its line."""

    def __init__(self, text: str, name: str) -> None:
        self.name, self.nodes, self.depth = name, 0, 0
        self.breaks = [match.start() for match in re.finditer("\n", text)]

    def line(self, position: int) -> int:
        return bisect_left(self.breaks, position) + 1

    def mapping(
        self,
        state: tuple[str, int],
        encoding: Any,
        strict: Any,
        scan: Any,
        hook: Any,
        pairs: Any,
        *rest: Any,
    ) -> tuple[Node, int]:
        from hjson.decoder import JSONObject

        line_scan = self.scan_with_lines(scan)
        return self.scan_inner(
            state,
            "mapping",
            lambda: JSONObject(state, encoding, strict, line_scan, None, _entries, *rest),
        )

    def items(self, state: tuple[str, int], scan: Any) -> tuple[Node, int]:
        from hjson.decoder import JSONArray

        return self.scan_inner(state, "list", lambda: JSONArray(state, self.scan_with_lines(scan)))

    def scan_with_lines(self, scan: Any) -> Callable[[str, int], tuple[Node, int]]:
        def scan_node(text: str, position: int) -> tuple[Node, int]:
            self.nodes += 1
            check_limits(self.nodes, self.depth, self.name, self.line(position))
            value, end = scan(text, position)
            return (value if isinstance(value, Node) else Node(value, self.line(position))), end

        return scan_node

    def scan_inner(
        self, state: tuple[str, int], kind: str, scan: Callable[[], tuple[Any, int]]
    ) -> tuple[Node, int]:
        self.depth += 1
        value, end = scan()
        self.depth -= 1
        return Node(value, self.line(max(state[1] - 1, 0)), kind), end


def _entries(pairs: list[tuple[str, Node]]) -> list[Entry]:
    return [(key, node, node.line) for key, node in pairs]
