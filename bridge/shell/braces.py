"""Brace expansion: `{a,b}` and `{1..8..2}` in a word, before anything else is expanded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from bridge.shell.tokens import WordPart

MOST = 10_000
SEQUENCE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?$")

NAME = re.compile(r"[A-Za-z_]")
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"

Atom = tuple[str, WordPart]
"""A character with the part of the word that it comes from.

The text is empty for a part that is not a single character, such as a variable.
"""


def expand_braces(text: str, parts: tuple[WordPart, ...]) -> list[tuple[WordPart, ...]]:
    """Return the words that brace expansion makes of one word.

    Raises `OverflowError` for too many words.
    """
    if not any(part.kind == "text" and "{" in text[part.start : part.end] for part in parts):
        return [parts]
    atoms: list[Atom] = []
    for part in parts:
        # Braces are expanded before variables. In `$a{b,c}` the name may thus grow by what the
        # braces yield, as in `$ab`.
        if part.kind == "short":
            atoms.append(("", replace(part, text=text[part.start + 1 : part.end])))
        elif part.kind == "text":
            atoms += [
                (text[place], WordPart("text", place, place + 1))
                for place in range(part.start, part.end)
            ]
        else:
            atoms.append(("", part))
    if len(atoms) > MOST:
        raise OverflowError(
            f"a word with braces has more than {MOST:,} characters; is this the right file?"
        )
    return [tuple(_whole(word)) for word in _words(atoms)]


def _whole(atoms: Sequence[Atom]) -> Iterator[WordPart]:
    """Yield the parts of a word, with neighbouring characters joined into one part."""
    last: WordPart | None = None
    for char, part in atoms:
        if last is not None and last.kind == part.kind == "text" and last.end == part.start:
            last = WordPart("text", last.start, part.end)
            continue
        if (
            last is not None
            and last.kind == "short"
            and NAME.match(last.text)
            and part.kind in ("text", "made")
        ):
            # The letters behind a variable belong to its name.
            text = part.text or char
            count = len(text) - len(text.lstrip(LETTERS))
            last = WordPart(
                "short", last.start, part.end if count else last.end, text=last.text + text[:count]
            )
            if count == len(text):
                continue
            part = replace(part, text=text[count:]) if part.text else part
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last


def _words(atoms: Sequence[Atom]) -> list[list[Atom]]:
    """Combine every alternative of the first brace with every expansion of the rest.

    The alternatives of the leftmost brace vary slowest.
    """
    for place, (char, _) in enumerate(atoms):
        expansion = _choices(atoms, place) if char == "{" else None
        if expansion is None:
            continue
        choices, end = expansion
        rest = _words(atoms[end:])
        if len(choices) * len(rest) > MOST:
            raise OverflowError(f"braces become more than {MOST:,} words; is this the right file?")
        return [[*atoms[:place], *choice, *after] for choice in choices for after in rest]
    return [list(atoms)]


def _choices(atoms: Sequence[Atom], start: int) -> tuple[list[list[Atom]], int] | None:
    """Return the alternatives of the brace at `start`, and the end of the brace; None if this brace is not expanded."""
    depth, cuts = 0, [start]
    for place in range(start, len(atoms)):
        char = atoms[place][0]
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 1:
            cuts.append(place)
        if not depth:
            return _split_list(atoms, [*cuts, place])
    return None


def _split_list(atoms: Sequence[Atom], cuts: Sequence[int]) -> tuple[list[list[Atom]], int] | None:
    end = cuts[-1] + 1
    if len(cuts) > 2:
        pieces = (atoms[low + 1 : high] for low, high in pairwise(cuts))
        return [choice for piece in pieces for choice in _words(piece)], end
    # Without a comma, only `{first..last}` is an expansion. A part that is more than a character
    # fits no sequence.
    inside = atoms[cuts[0] + 1 : cuts[1]]
    match = SEQUENCE.match("".join(char or "\0" for char, _ in inside))
    texts = _sequence(match[1], match[2], match[3]) if match else None
    if texts is None:
        return None
    place = inside[0][1].start, inside[-1][1].end
    return [[("", WordPart("made", *place, text=text))] for text in texts], end


def _sequence(first: str, last: str, step: str | None) -> list[str] | None:
    letters = first.isalpha(), last.isalpha()
    if letters[0] is not letters[1]:
        return None
    low, high = (ord(first), ord(last)) if letters[0] else (int(first), int(last))
    if letters[0] and first.isupper() is not last.isupper():
        raise OverflowError(
            "braces from a capital to a small letter yield characters that a shell expands once more"
        )
    # A leading zero on one side pads all numbers to the longer side.
    width = (
        max(len(first), len(last)) if any(re.match(r"-?0\d", text) for text in (first, last)) else 0
    )
    size = abs(int(step or 1)) or 1  # the sign of a step has no effect, and 0 stands for 1
    if abs(high - low) // size > MOST:
        raise OverflowError(f"braces become more than {MOST:,} words; is this the right file?")
    numbers = range(low, high + 1, size) if low <= high else range(low, high - 1, -size)
    return [chr(number) if letters[0] else f"{number:0{width}d}" for number in numbers]
