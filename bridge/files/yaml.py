"""YAML 1.1 as data: anchors and merges are resolved, duplicate keys are noted, and no tag runs code."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bridge import limits
from bridge.errors import SourceError
from bridge.files.document import (
    LONGEST,
    TEXT,
    Builder,
    Document,
    Entry,
    Node,
    check_limits,
    integer,
)


def load_yaml(text: str, name: str = TEXT) -> Document:
    """Parse one YAML 1.1 document.

    A key given twice has its last value, and is noted in `duplicates`. Numbers, switches and null
    are read like PyYAML's safe loader, except that `1e-6` is a number. Raises `SourceError` for
    foreign tags, NaN, infinity, and content beyond the limits.
    """
    return Builder(name).document(_Events(name).read(text), "yaml")


NULL = re.compile(r"~|null|Null|NULL|")
SWITCH = re.compile(r"(yes|true|on)|no|false|off", re.IGNORECASE)
INTEGER = re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*(?::[0-5]?[0-9])*)")
REAL = re.compile(
    r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?"
    r"|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
    r"|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*"
)
NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
ONLY_OURS = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+|[-+]\.[0-9]+")
"""Matches numbers of YAML 1.2 that YAML 1.1 reads as strings: without a point, or without a sign in
the exponent.
"""


def plain_scalar(text: str) -> Any:
    """Return the value of an unquoted YAML 1.1 scalar, like PyYAML's safe loader, except that dates stay text.

    `1e-6` stays text too.
    """
    if NULL.fullmatch(text):
        return None
    if INTEGER.fullmatch(text):
        return _integer(text.replace("_", ""))
    if REAL.fullmatch(text):
        return _sexagesimal(text.replace("_", ""), float)
    if NOT_FINITE.fullmatch(text):
        return math.nan
    # `yes`, `Yes` and `YES` are switches, `yEs` is text.
    switch = (
        SWITCH.fullmatch(text) if text in (text.lower(), text.upper(), text.capitalize()) else None
    )
    return text if switch is None else switch[1] is not None


def scalar(text: str) -> Any:
    """Return the value of a text in a YAML file. Unlike for YAML 1.1 loaders, `1e-6` is a number."""
    value = plain_scalar(text)
    return float(value) if isinstance(value, str) and ONLY_OURS.fullmatch(value) else value


def _integer(text: str) -> int | float:
    sign, digits = (-1 if text[0] == "-" else 1), text.lstrip("+-")
    if len(digits) >= LONGEST:
        return math.inf
    if ":" in digits:
        return int(_sexagesimal(text, int))
    if digits[:2] in ("0b", "0x"):
        return sign * int(digits[2:] or "0", 2 if digits[1] == "b" else 16)
    return sign * (int(digits, 8) if digits[0] == "0" else integer(digits))


def _sexagesimal(text: str, number: Callable[[str], float]) -> float:
    # `1:30:00` has digits of base 60. The bound keeps a long row of them from growing without end.
    total: float = 0
    for part in text.lstrip("+-").split(":"):
        total = min(total * 60, 1e300) + number(part)
    return -total if text[0] == "-" else total


@dataclass(slots=True)
class _Named(Node):
    """A node that can be the key of an entry: `key` is its text, and `merge` is true for an unquoted `<<`."""

    key: str = ""
    merge: bool = False


class _Events:
    """Builds nodes from YAML events, without recursion."""

    def __init__(self, name: str) -> None:
        self.name, self.nodes = name, 0
        self.anchors: dict[str, Node] = {}
        self.open: list[tuple[Node, list[Node]]] = []
        self.root: Node | None = None

    def read(self, text: str) -> Node:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError

        if match := TAGGED.search(text):
            line = text.count("\n", 0, match.start()) + 1
            raise self.refuse(line, f"found a tag of more than {limits.NAME} characters; drop it")
        yaml: Any = YAML(typ="safe", pure=True)
        yaml.version = (1, 1)
        try:
            for event in yaml.parse(text):
                self.take(type(event).__name__, event, event.start_mark.line + 1)
        except YAMLError as error:
            raise self.malformed_error(error, text) from None
        if self.root is None:
            raise SourceError(f"{self.name}: holds only comments; expected a config")
        return self.root

    def refuse(self, line: int, problem: str) -> SourceError:
        return SourceError(f"{self.name}: line {line}: {problem}")

    def malformed_error(self, error: Any, text: str) -> SourceError:
        start, mark = getattr(error, "context_mark", None), getattr(error, "problem_mark", None)
        if mark is None:
            line = text.count("\n", 0, getattr(error, "position", 0)) + 1
            return self.refuse(line, "found a control character; expected plain text")
        since = (
            f" ({error.context} that starts at line {start.line + 1})"
            if start and error.context
            else ""
        )
        return self.refuse(
            mark.line + 1, f"not valid YAML: {error.problem}{since}; fix the syntax there"
        )

    def take(self, kind: str, event: Any, line: int) -> None:
        if kind == "ScalarEvent":
            self.add(self.scalar(event, line), event.anchor)
        elif kind == "AliasEvent":
            self.add(self.alias(event.anchor, line), None)
        elif kind in ("MappingStartEvent", "SequenceStartEvent"):
            self.begin("mapping" if kind.startswith("Mapping") else "list", event, line)
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            self.end()

    def begin(self, kind: str, event: Any, line: int) -> None:
        self.check_tag(event.tag, ("map",) if kind == "mapping" else ("seq",), line)
        node = Node([], line, kind)
        self.open.append((node, []))
        check_limits(self.nodes, len(self.open) - 1, self.name, line)
        if event.anchor:
            self.anchors[event.anchor] = node

    def end(self) -> None:
        node, items = self.open.pop()
        node.value = items if node.kind == "list" else self.entries(items)
        self.add(node, None)

    def add(self, node: Node, anchor: str | None) -> None:
        self.count(1, node.line)
        if anchor:
            self.anchors[anchor] = node
        if self.open:
            self.open[-1][1].append(node)
        elif self.root is None:
            self.root = node
        else:
            raise self.refuse(
                node.line, "found a second YAML document, expected one; split the file"
            )

    def count(self, more: int, line: int) -> None:
        self.nodes += more
        check_limits(self.nodes, len(self.open), self.name, line)

    def alias(self, anchor: str, line: int) -> Node:
        node = self.anchors.get(anchor)
        if node is None:
            raise self.refuse(
                line, f"found alias *{anchor} without an anchor before it; define &{anchor} first"
            )
        if any(node is parent for parent, _ in self.open):
            raise self.refuse(
                line, f"found alias *{anchor} inside its own anchor; a config cannot contain itself"
            )
        return node

    def scalar(self, event: Any, line: int) -> Node:
        text, tag = event.value, event.tag
        self.check_tag(tag, ("str", "int", "float", "bool", "null"), line)
        if tag is not None and tag != "!":
            return self.tag_node(tag.removeprefix(TAG), text, line)
        if tag == "!" or event.style not in (None, ""):
            return _Named(text, line, key=text)
        value = plain_scalar(text)
        if isinstance(value, str) and ONLY_OURS.fullmatch(value):
            return _Named(float(value), line, spelling=text, key=text)
        return _Named(value, line, key=text, merge=text == "<<")

    def tag_node(self, kind: str, text: str, line: int) -> Node:
        value = text if kind == "str" else plain_scalar(text)
        if kind == "float" and (isinstance(value, int) or ONLY_OURS.fullmatch(text)):
            value = float(text.replace("_", ""))
        kind_type = {"str": str, "int": int, "float": float, "bool": bool, "null": type(None)}[kind]
        if type(value) is not kind_type:
            raise self.refuse(
                line, f"found {text!r}, expected !!{kind}; drop the tag or fix the value"
            )
        return _Named(value, line, key=text)

    def check_tag(self, tag: str | None, kinds: tuple[str, ...], line: int) -> None:
        if tag is not None and tag != "!" and tag not in {TAG + kind for kind in kinds}:
            tag_text = "!!" + tag.removeprefix(TAG) if tag.startswith(TAG) else tag
            raise self.refuse(
                line,
                f"found the tag {tag_text}, expected plain data; code in tags is not run, so write "
                "the value",
            )

    def entries(self, items: list[Node]) -> list[Entry]:
        """Return the pairs of a mapping: merged pairs first, without duplicates.

        The mapping's own keys win over merged keys.
        """
        merges: dict[str, Entry] = {}
        own: list[Entry] = []
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, _Named):
                raise self.refuse(key.line, f"found a {key.kind} as a key, expected a name")
            if key.merge:
                merges.update({entry[0]: entry for entry in self.merge_entries(value, key.line)})
            else:
                own.append((key.key, value, key.line))
        for name, _, _ in own:
            merges.pop(name, None)
        return [*merges.values(), *own]

    def merge_entries(self, value: Node, line: int) -> list[Entry]:
        sources = value.value if value.kind == "list" else [value]
        if any(source.kind != "mapping" for source in sources):
            raise self.refuse(
                line, "<< takes a mapping or a list of mappings; name the anchor of a mapping"
            )
        self.count(sum(len(source.value) for source in sources), line)
        return [entry for source in reversed(sources) for entry in source.value]


TAG = "tag:yaml.org,2002:"
TAGGED = re.compile(rf"^[^#'\"\n]*?(?<![^\s,\[{{-])![^\s'\"]{{{limits.NAME}}}", re.MULTILINE)
"""Matches a long tag. It is refused before the scanner sees it, because the scanner reads a tag of
n characters n times.
"""


def spell_yaml(data: Mapping[str, Any]) -> str:
    """Return a mapping as YAML in block style, which every loader reads as `data`."""
    return "\n".join(_block(data, "")) + "\n" if data else "{}\n"


def _block(data: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in data.items():
        key = f"{indent}{_word(name)}:"
        if isinstance(value, Mapping) and value:
            yield key
            yield from _block(value, indent + "  ")
        elif isinstance(value, list | tuple) and any(
            isinstance(item, Mapping | list | tuple) for item in value
        ):
            yield key
            yield from (f"{indent}- {_inline(item)}" for item in value)
        else:
            yield f"{key} {_inline(value)}"


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{_word(name)}: {_inline(inner)}" for name, inner in value.items())
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    if isinstance(value, float):
        # YAML 1.1 takes 1e-08 for a text: it wants a point before the exponent, and a sign in it.
        digits, exponent, power = repr(value).partition("e")
        if "." not in digits:
            digits += ".0"
        if exponent and power[0] not in "+-":
            power = "+" + power
        return digits + exponent + power
    return _word(value) if isinstance(value, str) else json.dumps(value)


PLAIN = re.compile(r"[A-Za-z_./][\w./-]*")


def _word(text: str) -> str:
    """Return a text for YAML, in quotes if a loader would read the bare text as another type."""
    if (
        PLAIN.fullmatch(text)
        and text.isascii()
        and text not in (".", "..")
        and scalar(text) == text
    ):
        return text
    # YAML refuses characters that do not print, except as escapes.
    word = ""
    for char in json.dumps(text, ensure_ascii=False):
        if char.isprintable():
            word += char
        else:
            word += f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"
    return word
