"""Shell text with its statements, and the place of every character in the script. Nothing is run."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from bridge.errors import SourceError
from bridge.shell.syntax import AndOr, Parser
from bridge.shell.tokens import HOLE, Fault, Lexer, Scanner, Token, Word, WordPart
from bridge.shell.word_pieces import Piece, Pieces, Text, Unknown

PLACEHOLDER = re.compile(r"<[A-Za-z][^<>\n|&;]*>")
UNSET = re.compile(rf"^[ \t]*(?:export[ \t]+)?\w+=({PLACEHOLDER.pattern})[ \t]*$", re.MULTILINE)
"""Matches an assignment whose value is only a placeholder in angle brackets."""


@dataclass(frozen=True, slots=True)
class Sourced:
    """A sourced file that was not read: its line, its name and the reason.

    `tools` is true if the file is assumed only to set up tools.
    """

    line: int
    name: str
    why: str
    tools: bool


class ShellSource:
    """Shell text with its statements: the script itself, or text that it hands to another shell."""

    def __init__(
        self,
        text: str,
        name: str,
        segments: Sequence[Piece] | None = None,
        script: ShellSource | None = None,
        commands: bool = True,
    ) -> None:
        """Set up a source for `text`. Raises `SourceError` with the line of a syntax error.

        `segments` are the pieces of `text` if it is not a literal part of `script`.
        """
        self.text, self.name, self.segments = text, name, segments
        self.script: ShellSource = script.script if script else self
        # `starts` are the offsets of segments in the text, `breaks` those of line ends in the whole
        # script.
        self.starts = [0, *accumulate(_length(piece) for piece in segments or ())]
        self.breaks: list[int] = (
            script.breaks if script else [match.start() for match in re.finditer("\n", text)]
        )
        self.scanner = Scanner(text)
        self.operands: dict[tuple[int, int, bool], tuple[WordPart, ...]] = {}
        self.inner: dict[int, ShellSource] = {}
        # Statements in the groups that a shell parses together, because no line ends between them.
        self.lines: list[list[AndOr]] = []
        try:
            if commands:
                self.lines = Parser(Lexer(text).run(), len(text)).lines()
        except Fault as fault:
            raise SourceError(*_all(self, [self._broken(fault.place, fault.problem)])) from None

    @classmethod
    def of(cls, pieces: Pieces, script: ShellSource) -> ShellSource:
        """Return a source for the text of `pieces`, which is read a second time, as with `eval`, `bash -c` and `$(...)`."""
        text = "".join(piece.text if isinstance(piece, Text) else HOLE for piece in pieces)
        return cls(text, script.name, pieces, script)

    @classmethod
    def inert(cls, pieces: Pieces, script: ShellSource) -> ShellSource:
        """Return a source for text that contains expansions but no commands."""
        text = "".join(piece.text if isinstance(piece, Text) else HOLE for piece in pieces)
        return cls(text, script.name, pieces, script, commands=False)

    def line(self, place: int) -> int:
        """Return the line of the script, counted from 1, that contains a character."""
        return bisect_left(self.breaks, self.place(place, place + 1)[0]) + 1

    def pieces(self, start: int, end: int, in_quotes: bool) -> Iterator[Piece]:
        """Yield the characters from `start` to `end` as pieces."""
        if self.segments is None:
            if start < end:
                yield Text(self.text[start:end], (start, end), in_quotes)
            return
        for index in range(bisect_right(self.starts, start) - 1, len(self.segments)):
            piece, offset = self.segments[index], self.starts[index]
            low, high = max(start - offset, 0), min(end - offset, _length(piece))
            if low >= high and offset >= end:
                return
            if low < high:
                yield (
                    replace(piece, quoted=in_quotes)
                    if isinstance(piece, Unknown)
                    else piece.part(low, high).literal(in_quotes)
                )

    def place(self, start: int, end: int) -> tuple[int, int]:
        """Return the span in the script of the characters from `start` to `end`."""
        if self.segments is None:
            return start, end
        spans = [piece.span for piece in self.pieces(start, end, False)]
        return (spans[0][0], spans[-1][1]) if spans else (0, 0)

    def text_of(self, part: WordPart | Word | Token) -> str:
        """Return the text of a part."""
        return self.text[part.start : part.end]

    def operand(self, start: int, end: int, single: bool) -> tuple[WordPart, ...]:
        """Return the parts of a word within `${...}`."""
        key = start, end, single
        if key not in self.operands:
            parts: list[WordPart] = []
            self.scanner.operand(start, parts, single)
            self.operands[key] = tuple(parts)
        return self.operands[key]

    def double(self, start: int, end: int) -> tuple[WordPart, ...]:
        """Return the parts of text that is expanded as in double quotes, such as arithmetic and here-documents."""
        key = start, end, False
        if key not in self.operands:
            parts: list[WordPart] = []
            try:
                Scanner(self.text[:end]).scan_quotes(start, parts, "")
            except Fault as fault:
                raise SourceError(*_all(self, [self._broken(fault.place, fault.problem)])) from None
            self.operands[key] = tuple(parts)
        return self.operands[key]

    def within(self, start: int, end: int) -> ShellSource:
        """Return the text from `start` to `end` as a separate source."""
        if start not in self.inner:
            self.inner[start] = ShellSource.of(tuple(self.pieces(start, end, False)), self)
        return self.inner[start]

    def _broken(self, place: int, problem: str) -> str:
        line = self.text[:place].rpartition("\n")[2] + self.text[place:].partition("\n")[0]
        placeholder = PLACEHOLDER.search(line)
        if placeholder:
            problem = _placeholder_message(placeholder[0])
        if not problem:
            near = self.text[place:].split("\n")[0][:40].strip()
            problem = f"not shell syntax near {near!r}; an open quote, bracket or here-document before it is the usual cause"
        return f"{self.name}: line {self.line(min(place, max(len(self.text) - 1, 0)))}: {problem}"


def _length(piece: Piece) -> int:
    return len(piece.text) if isinstance(piece, Text) else len(HOLE)


def check_ends(text: str, name: str) -> None:
    """Raise `SourceError` for line ends of Windows: a shell reads the carriage return as part of the last word."""
    place = text.find("\r\n")
    if place >= 0:
        line = text.count("\n", 0, place) + 1
        raise SourceError(
            f"{name}: line {line}: ends in CR and LF, and a shell reads the CR as text; save the "
            "script with LF alone"
        )


def _all(source: ShellSource, problems: Sequence[str]) -> Iterable[str]:
    """Return the problems.

    If a placeholder is among them, add a problem for every variable whose value is only a
    placeholder, because the parser stops at the first one.
    """
    unset = UNSET.finditer(source.text) if any(map(PLACEHOLDER.search, problems)) else ()
    more = (
        f"{source.name}: line {source.line(match.start(1))}: {_placeholder_message(match[1])}"
        for match in unset
    )
    return dict.fromkeys((*problems, *more))


def check_redirects(source: ShellSource, redirects: Iterable[Token]) -> None:
    """Raise `SourceError` for placeholders in angle brackets, which a shell reads as redirections."""
    placeholders = (
        (source.line(token.start), PLACEHOLDER.match(source.text, token.start))
        for token in redirects
    )
    SourceError.raise_if(
        f"{source.name}: line {line}: {_placeholder_message(match[0])}"
        for line, match in placeholders
        if match
    )


def _placeholder_message(placeholder: str) -> str:
    return f"{placeholder} is a placeholder, which a shell reads as redirections; put a value there"
