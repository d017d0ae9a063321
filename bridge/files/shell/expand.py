"""Expansion of shell words: variables, defaults, text operators, arithmetic; commands inside of them are never run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fnmatch import translate
from typing import TYPE_CHECKING

from bridge.errors import nearest
from bridge.files.shell import arithmetic
from bridge.files.shell.pieces import BREAK, NOWHERE, Break, Piece, Pieces, Span, Text, Unknown, known, spelled, unknowns, words
from bridge.files.shell.scope import Scope, Value, number
from bridge.files.shell.source import EXPANSIONS, Source

if TYPE_CHECKING:
    from tree_sitter import Node

PARAMETER = re.compile(r"(?P<before>[#!]?)(?P<name>\w+|[@*#?$!-])(?:\[(?P<index>[^\]]*)\])?")
OPERATOR = re.compile(r":?[-=+?]|//?|%%?|##?|\^\^?|,,?|:")
ALL = ("@", "*")
OUTPUT = "it is the output of a command, and nothing is run"

Expanded = list[Piece | Break]


class Expander:
    """Expands the words of one source in a scope."""

    def __init__(self, source: Source, scope: Scope) -> None:
        self.source, self.scope = source, scope

    def words(self, node: Node) -> list[Pieces]:
        """The words that a node becomes, after splitting."""
        return words(self.word(node))

    def text(self, node: Node) -> Pieces:
        """The text that a node becomes where nothing is split: assigned values, names of files."""
        return tuple(piece for piece in self.word(node, quoted=True) if not isinstance(piece, Break))

    def word(self, node: Node, quoted: bool = False) -> Expanded:
        """The pieces that a node becomes, before splitting."""
        start, end = node.start_byte, node.end_byte
        match node.type:
            case "string":
                return [*self._empty(start, end), *self.between(node, start + 1, max(end - 1, start + 1), "double", True)]
            case "raw_string":
                return [*self._empty(start, end), *self.source.literal(start + 1, end - 1, "raw", True)]
            case "ansi_c_string":
                return [Text(_decoded(self.source.text[start + 2 : end - 1]), self.source.place(start, end), True, False)]
            case "concatenation" | "command_name" | "translated_string":
                return [piece for child in node.children if child.type != "$" for piece in self.word(child, quoted)]
            case _ if node.type in EXPANSIONS:
                return self.expansion(node, quoted)
            case "comment":
                return []
        return list(self.between(node, start, end, "bare", quoted))

    def _empty(self, start: int, end: int) -> Iterator[Piece]:
        """An empty pair of quotes is a word as well."""
        if end - start <= 2:
            yield Text("", self.source.place(start, end), True, plain=False)

    def between(self, node: Node | _Flat, start: int, end: int, mode: str, quoted: bool) -> Iterator[Piece | Break]:
        """Everything from `start` to `end` inside of `node`: expansions, and what stands between them as it is."""
        position = start
        for child in node.children:
            if child.start_byte >= position and child.end_byte <= end and _special(child, mode):
                yield from self.source.literal(position, self.source.start(child), mode, quoted)
                yield from self.word(child, quoted)
                position = child.end_byte
        yield from self.source.literal(position, end, mode, quoted)

    def expansion(self, node: Node, quoted: bool) -> Expanded:
        """What `$NAME`, `${NAME...}`, `$((...))` and `$(...)` stand for."""
        match node.type:
            case "simple_expansion":
                return self.parameter(node, self.source.said(node)[1:], quoted)
            case "expansion":
                return self.parameter(node, self.source.said(node)[2:-1], quoted)
            case "arithmetic_expansion":
                return [self.arithmetic(node, quoted)]
        return [self.output(node, quoted)]

    def unknown(self, node: Node, why: str, quoted: bool) -> Unknown:
        """An expansion that cannot be known."""
        start, end = self.source.start(node), node.end_byte
        return Unknown(self.source.said(node), self.source.place(start, end), self.source.line(node), why, quoted)

    # Parameters

    def parameter(self, node: Node, inside: str, quoted: bool) -> Expanded:
        """A variable with what is done to it: `inside` is what stands between the braces."""
        found = PARAMETER.match(inside)
        if found is None:
            return [self.unknown(node, "this form of expansion is not read", quoted)]
        name, index, rest = found["name"], found["index"], inside[found.end() :]
        if found["before"] == "#" or (name == "#" and not rest):
            return self._counted(node, name, index, quoted)
        if found["before"] == "!":
            return self._indirect(node, name, quoted)
        values = self._values(node, name, index, quoted)
        return self._operated(node, name, values, rest, quoted) if rest else self._plain(node, name, values, quoted)

    def _values(self, node: Node, name: str, index: str | None, quoted: bool) -> Expanded | None:
        """The words of a variable with breaks between them; None where it is not set."""
        if name in ALL:
            return self._listed(self.scope.arguments or (), node, name == "@" or not quoted, quoted)
        value = self.scope.get(name)
        if value is None:
            return None
        if index in ALL:
            return self._listed(value.words, node, index == "@" or not quoted, quoted)
        position = number(Value(((Text(index, NOWHERE),),))) if index and not index.isidentifier() else 0
        picked = value.words[position] if position is not None and -len(value.words) <= position < len(value.words) else ()
        return self._used(picked, node, quoted)

    def _listed(self, listed: tuple[Pieces, ...], node: Node, apart: bool, quoted: bool) -> Expanded:
        found: Expanded = []
        for position, word in enumerate(listed):
            if position:
                found.append(BREAK if apart else Text(" ", self._place(node), quoted, plain=False))
            found += self._used(word, node, quoted)
        return found

    def _used(self, pieces: Pieces, node: Node, quoted: bool) -> Expanded:
        place = self._place(node)
        return [replace(piece, quoted=quoted, uses=(place, *piece.uses)) for piece in pieces]

    def _place(self, node: Node) -> Span:
        return self.source.place(self.source.start(node), node.end_byte)

    def _plain(self, node: Node, name: str, values: Expanded | None, quoted: bool) -> Expanded:
        return [self.unknown(node, self._unset(name), quoted)] if values is None else values

    def _unset(self, name: str) -> str:
        if name.isdigit():
            return f"the script is started with it; say it with --env {name}=..."
        if not name.isidentifier():
            return "only a run tells"
        return f"the script sets it nowhere{nearest(name, self.scope.variables) or f'; say it with --env {name}=...'}"

    def _counted(self, node: Node, name: str, index: str | None, quoted: bool) -> Expanded:
        if name in (*ALL, "#"):
            count = len(self.scope.arguments or ())
        elif index in ALL:
            value = self.scope.get(name)
            count = len(value.words) if value else 0
        else:
            text = known(self._values(node, name, index, quoted) or [])
            if text is None:
                return [self.unknown(node, "it counts what is not known", quoted)]
            count = len(text)
        return [self._made(node, str(count), quoted)]

    def _indirect(self, node: Node, name: str, quoted: bool) -> Expanded:
        value = self.scope.get(name)
        target = known(value.pieces) if value else None
        if not target or not target.isidentifier():
            return [self.unknown(node, f"{name} does not name a variable", quoted)]
        return self._plain(node, target, self._values(node, target, None, quoted), quoted)

    def _made(self, node: Node, text: str, quoted: bool) -> Text:
        return Text(text, self._place(node), quoted, plain=False)

    # Operators

    def _operated(self, node: Node, name: str, values: Expanded | None, rest: str, quoted: bool) -> Expanded:
        found = OPERATOR.match(rest)
        if found is None:
            return [self.unknown(node, "this form of expansion is not read", quoted)]
        operator, start = found[0], node.end_byte - 1 - len(rest) + found.end()
        if operator.rstrip("-=+?") in ("", ":") and operator != ":":
            absent = values is None or (operator[0] == ":" and known(values) == "")
            return self._chosen(node, name, values, operator[-1], absent, (start, quoted))
        if values is None:
            return [self.unknown(node, self._unset(name), quoted)]
        text, operand = known(values), known(self._operand(node, start, True))
        if text is None or operand is None:
            return values
        changed = _changed(text, operator, operand, self._number)
        return [
            self.unknown(node, "this form of expansion is not read", quoted)
            if changed is None
            else self._made(node, changed, quoted)
        ]

    def _operand(self, node: Node, start: int, quoted: bool) -> Expanded:
        flat = _Flat([leaf for child in node.children if child.start_byte >= start for leaf in _leaves(child)])
        return list(self.between(flat, start, node.end_byte - 1, "bare", quoted))

    def _chosen(
        self, node: Node, name: str, values: Expanded | None, operator: str, absent: bool, at: tuple[int, bool]
    ) -> Expanded:
        """`${NAME:-text}` and its kin."""
        start, quoted = at
        if operator == "+":
            return [] if absent else self._operand(node, start, quoted)
        if not absent:
            return values or []
        if operator == "?":
            return [self.unknown(node, self._unset(name), quoted)]
        default = [piece for piece in self._operand(node, start, quoted) if not isinstance(piece, Break)]
        if operator == "=":
            self.scope.set(name, Value((tuple(default),)))
        return [replace(piece, uses=(self._place(node), *piece.uses)) for piece in default]

    # Arithmetic and commands

    def arithmetic(self, node: Node, quoted: bool) -> Piece:
        """`$((...))`: its value, where all that it needs is known."""
        result = self.calculated(node)
        if result is not None:
            return self._made(node, str(result), quoted)
        part = next(unknowns(self._inside(node)), None)
        return self.unknown(node, part.why if part else "it is no arithmetic over known whole numbers", quoted)

    def calculated(self, node: Node) -> int | None:
        """The value of an arithmetic node; None if it is not known."""
        text = known(self._inside(node))
        return None if text is None else arithmetic.value(_bare(text), self._number)

    def _inside(self, node: Node) -> Expanded:
        flat = _Flat(list(_descendants(node)))
        return list(self.between(flat, self.source.start(node), node.end_byte, "raw", True))

    def _number(self, name: str) -> int | None:
        return number(self.scope.get(name))

    def output(self, node: Node, quoted: bool) -> Piece:
        """`$(...)`: known only for `echo` and `expr` of what is known."""
        commands = [child for child in node.children if child.is_named]
        if len(commands) == 1 and commands[0].type == "command":
            called = [
                spelled(word) if known(word) is not None else None for child in commands[0].children for word in self.words(child)
            ]
            result = self._echoed(called)
            if result is not None:
                return self._made(node, result, quoted)
        return self.unknown(node, OUTPUT, quoted)

    def _echoed(self, called: list[str | None]) -> str | None:
        rest = [word for word in called[1:] if word is not None]
        if not called or len(rest) < len(called) - 1 or called[0] not in ("echo", "expr"):
            return None
        if called[0] == "echo":
            return None if rest[:1] and rest[0].startswith("-") else " ".join(rest)
        result = arithmetic.value(" ".join(rest), self._number)
        return None if result is None else str(result)


class _Flat:
    """Nodes as children of one, wherever they hang."""

    def __init__(self, children: list[Node]) -> None:
        self.children = children


def _leaves(node: Node) -> Iterator[Node]:
    if node.type == "concatenation":
        for child in node.children:
            yield from _leaves(child)
    else:
        yield node


def _descendants(node: Node) -> Iterator[Node]:
    for child in node.children:
        if child.type in EXPANSIONS:
            yield child
        else:
            yield from _descendants(child)


def _special(node: Node, mode: str) -> bool:
    """Whether a node inside of text is more than the text itself."""
    return node.type in EXPANSIONS or (mode == "bare" and node.type in ("string", "raw_string", "ansi_c_string"))


def _bare(text: str) -> str:
    """An arithmetic expression without its brackets."""
    for opening, closing in (("$((", "))"), ("$[", "]"), ("((", "))")):
        if text.startswith(opening):
            return text.removeprefix(opening).removesuffix(closing)
    return text


def _decoded(text: str) -> str:
    """`$'...'`: the escapes that scripts use."""
    simple: Mapping[str, str] = {"n": "\n", "t": "\t", "r": "\r", "'": "'", '"': '"', "\\": "\\"}
    return re.sub(r"\\(.)", lambda escape: simple.get(escape[1], escape[0]), text, flags=re.DOTALL)


def _changed(text: str, operator: str, operand: str, numbers: arithmetic.Number) -> str | None:
    """`text` after one of the text operators; None for a form that is not read."""
    if operator in TRIMS:
        return TRIMS[operator](text, operand)
    if operator == ":":
        return _cut(text, operand, numbers)
    if operator in ("/", "//"):
        pattern, _, put = operand.partition("/")
        return re.sub(_pattern(pattern), lambda _: put, text, count=int(operator == "/")) if pattern else text
    return {"^^": text.upper(), ",,": text.lower(), "^": text[:1].upper() + text[1:], ",": text[:1].lower() + text[1:]}.get(
        operator
    )


def _pattern(pattern: str) -> str:
    return translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")


def _ends(text: str, pattern: str, longest: bool) -> str:
    places = range(len(text) + 1) if longest else range(len(text), -1, -1)
    return next((text[:place] for place in places if re.fullmatch(_pattern(pattern), text[place:])), text)


def _begins(text: str, pattern: str, longest: bool) -> str:
    places = range(len(text), -1, -1) if longest else range(len(text) + 1)
    return next((text[place:] for place in places if re.fullmatch(_pattern(pattern), text[:place])), text)


TRIMS: Mapping[str, Callable[[str, str], str]] = {
    "%": lambda text, pattern: _ends(text, pattern, longest=False),
    "%%": lambda text, pattern: _ends(text, pattern, longest=True),
    "#": lambda text, pattern: _begins(text, pattern, longest=False),
    "##": lambda text, pattern: _begins(text, pattern, longest=True),
}


def _cut(text: str, operand: str, numbers: arithmetic.Number) -> str | None:
    start, _, length = operand.partition(":")
    first, count = arithmetic.value(start, numbers), arithmetic.value(length, numbers) if length else len(text)
    if first is None or count is None:
        return None
    begin = max(first if first >= 0 else len(text) + first, 0)
    return text[begin : begin + count if count >= 0 else count]
