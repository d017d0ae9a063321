"""Edits of command-line words in a script's text: in arrays, strings and commands.

Everything else stays byte for byte.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from bridge.errors import TranslationError
from bridge.shell.word_pieces import NOWHERE, Piece, Pieces, Span

Range = tuple[int, int]
"""A range of word indices: the first index, and the index after the last word."""


def edit(
    text: str,
    words: Sequence[Pieces],
    put: Mapping[Range, Sequence[str]],
    insertions: Iterable[Sequence[str]],
    after: int,
) -> str:
    """Return `text` with changed words.

    `put` gives the new words for each range of word indices; an empty list removes the range.
    `insertions` are words to insert after word `after`. Raises `TranslationError` for a word that does
    not have a span of its own in the text.
    """
    spans = places(words)
    patches = [
        patch
        for (start, end), new in put.items()
        for patch in _patches(text, spans[start:end], new)
    ]
    more = "".join(f" {_quote_word(word)}" for line in insertions for word in line)
    if more:
        patches.append(((_end(text, spans[after]), _end(text, spans[after])), more))
    # From the end, so that the places of the patches before stay right.
    for (start, end), new in sorted(patches, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def places(words: Sequence[Pieces]) -> list[Span | None]:
    """Return for each word the widest span of the text that belongs to no other word; None if there is no such span."""
    owners = Counter(
        place for word in words for place in {place for piece in word for place in _levels(piece)}
    )
    return [_place(word, owners) for word in words]


def _levels(piece: Piece) -> tuple[Span, ...]:
    return (*piece.uses, piece.span)


def _place(word: Pieces, owners: Mapping[Span, int]) -> Span | None:
    # The place of an expansion that yields one word is the expansion itself. If it yields several,
    # it is the text in the value.
    own = [
        next((place for place in _levels(piece) if owners[place] == 1 and place != NOWHERE), None)
        for piece in word
    ]
    spans = list(dict.fromkeys(place for place in own if place is not None))
    if not spans or None in own or any(one[1] > other[0] for one, other in pairwise(spans)):
        return None
    return spans[0][0], spans[-1][1]


def _patches(
    text: str, word_spans: Sequence[Span | None], new: Sequence[str]
) -> list[tuple[Span, str]]:
    """Return patches that replace the words of a range one by one.

    Surplus old words are removed; surplus new words are added after the last old word.
    """
    if None in word_spans:
        raise TranslationError(
            "one expansion in the script yields this word together with others, so it cannot be changed alone"
        )
    spans = [place for place in word_spans if place is not None]
    patches = [(place, _quote_word(word)) for place, word in zip(spans, new, strict=False)]
    rest = "".join(f" {_quote_word(word)}" for word in new[len(spans) :])
    if rest and patches:
        patches[-1] = patches[-1][0], patches[-1][1] + rest
    return [
        *patches,
        *((_with_line(text, place), "") for place in _join_spans(text, spans[len(new) :])),
    ]


def _join_spans(text: str, spans: Sequence[Span]) -> list[Span]:
    """Return the spans of words. Spans with only spaces or tabs between them are merged."""
    result: list[Span] = []
    for place in (_with_quotes(text, span) for span in spans):
        if result and not text[result[-1][1] : place[0]].strip(" \t"):
            result[-1] = result[-1][0], place[1]
        else:
            result.append(place)
    return [_with_quotes(text, place) for place in result]


def _end(text: str, place: Span | None) -> int:
    if place is None:
        raise TranslationError(
            "one expansion in the script yields the last flag together with others; no flag can be added after it"
        )
    return _with_quotes(text, place)[1] if text[place[0] - 1 : place[0]] == "'" else place[1]


def _quote_word(word: str) -> str:
    return word if re.fullmatch(r"[\w./:,+=@%\[\]*-]+", word) else shlex.quote(word)


def _with_quotes(text: str, place: Span) -> Span:
    start, end = place
    in_quotes = start > 0 and text[start - 1] in "'\"" and text[start - 1] == text[end : end + 1]
    return (start - 1, end + 1) if in_quotes else place


def _with_line(text: str, place: Span) -> Span:
    """Return the span to remove with a word: the word, the blanks before it, and the whole line if nothing else is on it."""
    start, end = len(text[: place[0]].rstrip(" \t")), place[1]
    rest = re.compile(r"[ \t]*(\\?)\n").match(text, end)
    before = text[:start]
    # The line of a word alone goes with it, unless it ends a command whose line before ends in a
    # backslash.
    if rest is not None and before.endswith("\n") and (rest[1] or not before.endswith("\\\n")):
        return start, rest.end()
    if before.endswith(("\n", "(")):
        return place[0], end + len(text[end:]) - len(text[end:].lstrip(" \t"))
    return start, end
