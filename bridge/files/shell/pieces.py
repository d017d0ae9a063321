"""What a shell word is made of: known text and what cannot be known without running the script, each with its place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

Span = tuple[int, int]
"""Place in the script: characters from, to."""


@dataclass(frozen=True, slots=True)
class Text:
    """Known characters, written at `span`; `uses` are the expansions that they came through, outermost first.

    `plain` tells that the text stands there letter by letter, so that a part of it has a place of its own.
    """

    text: str
    span: Span
    quoted: bool = False
    plain: bool = True
    uses: tuple[Span, ...] = ()

    @property
    def key(self) -> str:
        """What makes it the same as another."""
        return self.text

    def part(self, start: int, end: int) -> Text:
        """Characters from `start` to `end`."""
        span = (self.span[0] + start, self.span[0] + end) if self.plain else self.span
        return replace(self, text=self.text[start:end], span=span)


@dataclass(frozen=True, slots=True)
class Unknown:
    """A part that only a run would tell: as it is written at `span`, the line, and why it is not known.

    `loose` tells that it stood without quotes where words are split, so that it may be any number of words.
    """

    spelling: str
    span: Span
    line: int
    why: str
    quoted: bool = False
    uses: tuple[Span, ...] = ()
    loose: bool = False

    @property
    def key(self) -> str:
        """What makes it the same as another."""
        return f"\0{self.spelling}\0{self.span}\0{self.line}"


@dataclass(frozen=True, slots=True)
class Break:
    """Where one element of a quoted array ends and the next begins."""


Piece = Text | Unknown
Pieces = tuple[Piece, ...]
BREAK = Break()
NOWHERE: Span = (0, 0)
"""The place of what stands nowhere in the script: given from outside, or left open by a branch."""
BLANK = re.compile(r"[ \t\n]+")


def words(pieces: Iterable[Piece | Break]) -> list[Pieces]:
    """Split what is not quoted at blanks, as a shell does after expansion."""
    found: list[list[Piece]] = [[]]
    for piece in pieces:
        if isinstance(piece, Break):
            found.append([])
        elif isinstance(piece, Unknown):
            found[-1].append(piece if piece.quoted else replace(piece, loose=True))
        elif piece.quoted:
            found[-1].append(piece)
        else:
            _split(piece, found)
    return [_solid(word) for word in found if any(_stands(piece) for piece in word)]


def _solid(word: list[Piece]) -> Pieces:
    """A word without its empty parts, unless it is empty itself."""
    return tuple(piece for piece in word if isinstance(piece, Unknown) or piece.text) or tuple(word)


def _split(piece: Text, found: list[list[Piece]]) -> None:
    position = 0
    for blank in BLANK.finditer(piece.text):
        found[-1].append(piece.part(position, blank.start()))
        found.append([])
        position = blank.end()
    found[-1].append(piece.part(position, len(piece.text)))


def _stands(piece: Piece) -> bool:
    return isinstance(piece, Unknown) or piece.quoted or bool(piece.text)


def spelled(pieces: Iterable[Piece | Break]) -> str:
    """The text of `pieces`; what is not known stands as the script spells it."""
    return "".join(_spelling(piece) for piece in pieces)


def _spelling(piece: Piece | Break) -> str:
    if isinstance(piece, Break):
        return " "
    return piece.text if isinstance(piece, Text) else piece.spelling


def known(pieces: Iterable[Piece | Break]) -> str | None:
    """The text of `pieces`, or None if a part of it is not known."""
    listed = list(pieces)
    return None if any(isinstance(piece, Unknown) for piece in listed) else spelled(listed)


def unknowns(pieces: Iterable[Piece | Break]) -> Iterator[Unknown]:
    """The parts that are not known."""
    return (piece for piece in pieces if isinstance(piece, Unknown))


def same(left: Sequence[Piece], right: Sequence[Piece]) -> bool:
    """Whether two values read the same, wherever they were written."""
    return [piece.key for piece in left] == [piece.key for piece in right]


def shared(left: Pieces, right: Pieces) -> Pieces:
    """What both begin with."""
    pairs = zip(left, right, strict=False)
    length = next((index for index, (one, other) in enumerate(pairs) if one.key != other.key), min(len(left), len(right)))
    return left[:length]


def cut(word: Pieces, length: int) -> Pieces:
    """`word` without its first `length` known characters."""
    found: list[Piece] = []
    for piece in word:
        taken = min(length, len(piece.text)) if isinstance(piece, Text) else 0
        length -= taken
        if not isinstance(piece, Text) or taken < len(piece.text):
            found.append(piece.part(taken, len(piece.text)) if isinstance(piece, Text) else piece)
    return tuple(found)


def line_of(pieces: Pieces, text: str) -> int | None:
    """The line of `text` on which `pieces` begin."""
    spans = (span for piece in pieces for span in (piece.span, *piece.uses[::-1]))
    first = next((span for span in spans if span != NOWHERE), None)
    return text.count("\n", 0, first[0]) + 1 if first else None
