"""Shell text as a syntax tree: parsed with tree-sitter, never run, every character with its place in the script."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

from bridge.errors import SourceError
from bridge.files.shell.pieces import Piece, Pieces, Text, Unknown

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

ESCAPES = {
    "bare": re.compile(r"\\(\n|.)|\\$", re.DOTALL),
    "double": re.compile(r'\\([$`"\\\n])'),
    "heredoc": re.compile(r"\\([$`\\\n])"),
    "raw": re.compile(r"(?!)"),
}
"""Backslashes that a shell takes away, by the quotes around them."""
MISSING = {"heredoc_end": "end of the here-document"}
EXPANSIONS = ("simple_expansion", "expansion", "arithmetic_expansion", "command_substitution", "process_substitution")
LEADING = re.compile(r"(?:\s|\\\n)*")
PLACEHOLDER = re.compile(r"<[A-Za-z][^<>\n|&;]*>")
HOLE = "x"
"""What stands for a character beyond ASCII while the tree is built, so that its places count characters."""


@cache
def _parser() -> Parser:
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


class Source:
    """Shell text and its tree: the script itself, or text that the script hands to another shell."""

    def __init__(self, text: str, name: str, segments: Sequence[Piece] | None = None, script: Source | None = None) -> None:
        """`segments` are the pieces that `text` is made of, for text that does not stand in `script` as it is."""
        self.text, self.name, self.segments = text, name, segments
        self.starts = [0, *accumulate(_length(piece) for piece in segments or ())]
        self.breaks: list[int] = script.breaks if script else [match.start() for match in re.finditer("\n", text)]
        self.root: Node = _parser().parse(re.sub(r"[^\x00-\x7f]", HOLE, text).encode("ascii")).root_node

    @classmethod
    def of(cls, pieces: Pieces, script: Source) -> Source:
        """The text of `pieces`, for a second reading (`eval`, `bash -c`)."""
        text = "".join(piece.text if isinstance(piece, Text) else HOLE for piece in pieces)
        return cls(text, script.name, pieces, script)

    def line(self, node: Node) -> int:
        """The line of the script, from 1, on which a node begins."""
        start = self.start(node)
        return bisect_left(self.breaks, self.place(start, max(node.end_byte, start + 1))[0]) + 1

    def literal(self, start: int, end: int, mode: str, quoted: bool) -> Iterator[Piece]:
        """Characters `start` to `end` without the backslashes that belong to `mode`."""
        position = start
        for escape in ESCAPES[mode].finditer(self.text, start, end):
            yield from self.pieces(position, escape.start(), quoted)
            kept = (escape[1] or "").removeprefix("\n")
            if kept:
                yield Text(kept, self.place(escape.start(), escape.end()), True, plain=False)
            position = escape.end()
        yield from self.pieces(position, end, quoted)

    def pieces(self, start: int, end: int, quoted: bool) -> Iterator[Piece]:
        """Characters `start` to `end` as they are."""
        if self.segments is None:
            if start < end:
                yield Text(self.text[start:end], (start, end), quoted)
            return
        for index in range(bisect_right(self.starts, start) - 1, len(self.segments)):
            piece, offset = self.segments[index], self.starts[index]
            low, high = max(start - offset, 0), min(end - offset, _length(piece))
            if low >= high and offset >= end:
                return
            if low < high:
                yield _requoted(piece if isinstance(piece, Unknown) else piece.part(low, high), quoted)

    def place(self, start: int, end: int) -> tuple[int, int]:
        """Where characters `start` to `end` stand in the script."""
        if self.segments is None:
            return start, end
        spans = [piece.span for piece in self.pieces(start, end, False)]
        return (spans[0][0], spans[-1][1]) if spans else (0, 0)

    def start(self, node: Node) -> int:
        """Where a node begins; the grammar counts blanks before an expansion in a string to it."""
        begun = LEADING.match(self.text, node.start_byte, node.end_byte) if node.type in EXPANSIONS else None
        return begun.end() if begun else node.start_byte

    def said(self, node: Node) -> str:
        """The text of a node."""
        return self.text[self.start(node) : node.end_byte]


def _length(piece: Piece) -> int:
    return len(piece.text) if isinstance(piece, Text) else len(HOLE)


def _requoted(piece: Piece, quoted: bool) -> Piece:
    from dataclasses import replace

    return replace(piece, quoted=quoted)


def check_syntax(source: Source) -> None:
    """Raise `SourceError` with the line of everything that is not shell syntax."""
    SourceError.raise_if(f"{source.name}: line {source.line(node)}: {_fault(node, source)}" for node in _faults(source.root))


def _faults(root: Node) -> Iterator[Node]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.is_missing or (node.type == "ERROR" and node.start_byte < node.end_byte):
            yield (node.parent or node) if node.is_missing else node
        elif node.has_error:
            waiting += reversed(node.children)


def check_redirects(source: Source, redirects: Iterable[Node]) -> None:
    """Raise `SourceError` for text in angle brackets that was to be filled in, and that a shell takes for redirections."""
    found = ((source.line(node), PLACEHOLDER.match(source.text, node.start_byte)) for node in redirects)
    SourceError.raise_if(f"{source.name}: line {line}: {_unfilled(match[0])}" for line, match in found if match)


def _unfilled(placeholder: str) -> str:
    return f"{placeholder} is a placeholder, which a shell takes for redirections; put a value there"


def _fault(node: Node, source: Source) -> str:
    line = source.text[: node.start_byte].rpartition("\n")[2] + source.text[node.start_byte :].partition("\n")[0]
    placeholder = PLACEHOLDER.search(line)
    if placeholder:
        return _unfilled(placeholder[0])
    missing = next((child.type for child in node.children if child.is_missing), "")
    if missing:
        return f"opens what is never closed; found no {MISSING.get(missing, missing)} before the end"
    found = (node.text or b"").decode().split("\n")[0][:40].strip()
    return f"not shell syntax near {found!r}; an open quote, bracket or here-document before it is the usual cause"
