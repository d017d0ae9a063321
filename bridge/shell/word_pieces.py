"""The pieces of a shell word: known text, and parts whose value is known only in a real run.

Each piece has its position in the script.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

Span = tuple[int, int]
"""Position in the script, as the offsets of its start and its end."""

# Hundred thousands of these are made and never changed; to make a frozen dataclass would take three times as long.


@dataclass(slots=True, unsafe_hash=True)
class Text:
    """Known characters, written at `span`.

    `uses` are the expansions that yielded them, outermost first. With `plain`, the span has the
    same characters, so that each part of the text has a position of its own. `quoted` text is
    literal in patterns. With `splits`, the text came from an expansion without quotes, so word
    splitting applies.
    """

    text: str
    span: Span
    quoted: bool = False
    plain: bool = True
    uses: tuple[Span, ...] = ()
    splits: bool = False

    @property
    def key(self) -> str:
        """Key for comparisons."""
        return self.text

    def part(self, start: int, end: int) -> Text:
        """Return the text from character `start` to character `end`."""
        span = (self.span[0] + start, self.span[0] + end) if self.plain else self.span
        return Text(self.text[start:end], span, self.quoted, self.plain, self.uses, self.splits)

    def used(self, place: Span, in_quotes: bool) -> Text:
        """Return this text as the result of one more expansion, at `place`."""
        return Text(self.text, self.span, in_quotes, self.plain, (place, *self.uses), not in_quotes)

    def literal(self, in_quotes: bool) -> Text:
        """Return this text as a part of a text that a shell reads a second time, as with `eval`."""
        return Text(self.text, self.span, in_quotes, self.plain, self.uses)


@dataclass(slots=True, unsafe_hash=True)
class Unknown:
    """A part of a word whose value is known only in a real run: its spelling at `span`, the line,
    and the reason why it is not known.

    With `loose`, the part is unquoted and may expand to any number of words. `alone` is the text of
    the part if the script is started alone, where the part depends on variables that nothing sets:
    empty for such a variable itself, a number for arithmetic with it. It is None for any other part.
    With `perhaps`, the variable may be unset. `at` is the file or folder that the part names, if
    any, relative to the script's first working directory. With `firm`, the part names the same file
    or folder in any working directory.
    """

    spelling: str
    span: Span
    line: int
    why: str
    quoted: bool = False
    uses: tuple[Span, ...] = ()
    loose: bool = False
    alone: str | None = None
    perhaps: bool = False
    at: str = ""
    firm: bool = False

    @property
    def key(self) -> str:
        """Key for comparisons."""
        return f"\0{self.spelling}\0{self.span}\0{self.line}"


@dataclass(slots=True, unsafe_hash=True)
class Break:
    """The border between two elements of an array.

    Without word splitting it becomes the text `joiner`. With word splitting it ends a word; if
    `mark` is a separator other than a blank, an empty text before the border is a word too. In a
    test or `case`, elements that were `made` by an operator are joined by a space.
    """

    joiner: str = " "
    mark: str = ""
    made: bool = False


Piece = Text | Unknown
Pieces = tuple[Piece, ...]
NOWHERE: Span = (0, 0)
"""Position of text that is not in the script."""
DEFAULT_IFS = " \t\n"


@cache
def _delimiter(separators: str) -> re.Pattern[str]:
    """Return the pattern of text between words: several blanks of `separators`, or one other
    separator with the blanks around it.
    """
    blanks = "".join(char for char in separators if char in DEFAULT_IFS)
    others = re.escape("".join(char for char in separators if char not in DEFAULT_IFS))
    blank = f"[{re.escape(blanks)}]" if blanks else "(?!)"
    return re.compile(f"{blank}*(?P<hard>[{others}]){blank}*|{blank}+" if others else f"{blank}+")


def words(pieces: Iterable[Piece | Break], separators: str = DEFAULT_IFS) -> list[Pieces]:
    """Split the results of unquoted expansions into words at the characters of IFS, as a shell does."""
    result: list[list[Piece]] = [[]]
    for piece in _join_neighbours(map(_text_of_break, pieces), separators):
        if isinstance(piece, Break):
            result.append([])
        elif isinstance(piece, Unknown):
            result[-1].append(piece if piece.quoted else replace(piece, loose=True))
        elif piece.splits and separators:
            _split(piece, result, _delimiter(separators))
        else:
            result[-1].append(piece)
    # A word without a piece that is quoted, unknown or has a letter is none: an unquoted expansion
    # that was empty.
    stands = [
        word
        for word in result
        if any(isinstance(one, Unknown) or one.quoted or one.text for one in word)
    ]
    # Empty parts are dropped unless the word is empty itself.
    return [
        tuple(one for one in word if isinstance(one, Unknown) or one.text) or tuple(word)
        for word in stands
    ]


def _text_of_break(piece: Piece | Break) -> Piece | Break:
    return (
        Text(piece.mark, NOWHERE, plain=False, splits=True)
        if isinstance(piece, Break) and piece.mark
        else piece
    )


def _join_neighbours(pieces: Iterable[Piece | Break], separators: str) -> Iterator[Piece | Break]:
    """Join neighbouring texts of unquoted expansions, because a separator may begin in one and end in the next."""
    if not separators.strip(DEFAULT_IFS):
        yield from pieces
        return
    last: Piece | Break | None = None
    for piece in pieces:
        if isinstance(last, Text) and last.splits and isinstance(piece, Text) and piece.splits:
            last = replace(last, text=last.text + piece.text, plain=False)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _split(piece: Text, result: list[list[Piece]], delimiter: re.Pattern[str]) -> None:
    position, hard = 0, "hard" in delimiter.groupindex
    for blank in delimiter.finditer(piece.text):
        if position < blank.start():
            result[-1].append(piece.part(position, blank.start()))
        # A separator that is no blank ends a word even if nothing stands before it. The quoted
        # empty part keeps that word.
        if hard and blank["hard"]:
            result[-1].append(piece.part(position, position).literal(True))
        result.append([])
        position = blank.end()
    if position < len(piece.text):
        result[-1].append(piece.part(position, len(piece.text)) if position else piece)


def spell_pieces(pieces: Iterable[Piece | Break]) -> str:
    """The text of `pieces`, with the script's spelling of unknown parts."""
    texts = []
    for piece in pieces:
        if isinstance(piece, Break):
            texts.append(piece.joiner)
        else:
            texts.append(piece.text if isinstance(piece, Text) else piece.spelling)
    return "".join(texts)


def text_if_known(pieces: Iterable[Piece | Break]) -> str | None:
    """The text of `pieces`, or None if a part of it is not known."""
    items = list(pieces)
    return None if any(isinstance(piece, Unknown) for piece in items) else spell_pieces(items)


def unknowns(pieces: Iterable[Piece | Break]) -> Iterator[Unknown]:
    """Return the pieces whose value is not known."""
    return (piece for piece in pieces if isinstance(piece, Unknown))


def emptied(pieces: Iterable[Piece | Break]) -> list[Piece | Break]:
    """Return `pieces` with the text that each has if the script is started alone, where a variable that nothing sets is empty."""
    return [
        Text(piece.alone, piece.span, piece.quoted, plain=False)
        if isinstance(piece, Unknown) and piece.alone is not None
        else piece
        for piece in pieces
    ]


def same(left: Sequence[Piece], right: Sequence[Piece]) -> bool:
    """Return whether two values are equal, apart from their positions."""
    return [piece.key for piece in left] == [piece.key for piece in right]


def shared(left: Pieces, right: Pieces) -> Pieces:
    """Return the pieces with which both `left` and `right` begin."""
    pairs = zip(left, right, strict=False)
    length = next(
        (index for index, (one, other) in enumerate(pairs) if one.key != other.key),
        min(len(left), len(right)),
    )
    return left[:length]


def cut(word: Pieces, length: int) -> Pieces:
    """Return `word` without its first `length` known characters."""
    rest: list[Piece] = []
    for piece in word:
        count = min(length, len(piece.text)) if isinstance(piece, Text) else 0
        length -= count
        if not isinstance(piece, Text) or count < len(piece.text):
            rest.append(piece.part(count, len(piece.text)) if isinstance(piece, Text) else piece)
    return tuple(rest)


def start_of_pieces(pieces: Pieces) -> int | None:
    """Return the offset in the script at which `pieces` begin; None if they are not in the script."""
    spans = (span for piece in pieces for span in (piece.span, *piece.uses[::-1]))
    return next((span[0] for span in spans if span != NOWHERE), None)


def line_of(pieces: Pieces, text: str) -> int | None:
    """Return the line of `text` on which `pieces` begin."""
    place = start_of_pieces(pieces)
    return None if place is None else text.count("\n", 0, place) + 1
