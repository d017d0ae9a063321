"""Operators within `${...}`: defaults, substrings, and patterns that are removed or replaced."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from bridge.shell import arithmetic, parameters
from bridge.shell.expansion import Expanded, Expansion, Subject
from bridge.shell.expansion_subjects import ALL, FORM, malformed_expansion
from bridge.shell.patterns import Char, Unread, active
from bridge.shell.scope import Value, several
from bridge.shell.tokens import WordPart
from bridge.shell.word_pieces import Break, Piece, Pieces, Text, Unknown, emptied, text_if_known

UNTURNED = "AaKkP"
"""Letters of `${NAME@letter}` that describe a variable's attributes. They are not supported."""
OPERATOR = re.compile(r":?[-=+?]|//?|%%?|##?|\^\^?|,,?|:|@[A-Za-z]$")


def apply_operator(
    expander: Expansion, part: WordPart, subject: Subject, start: int, in_quotes: bool
) -> Expanded:
    match = OPERATOR.match(expander.source.text, start, part.end - 1)
    if match is None and expander.source.text.startswith("~", start):
        raise Unread(FORM)
    if match is None and expander.source.text.startswith("@", start) and subject.elements is None:
        return expander.spread(subject, part, in_quotes)
    if match is None or (match[0] == ":" and match.end() == part.end - 1):
        raise malformed_expansion(expander, start, part.end - 1)
    operator, start = match[0], match.end()
    # Only operators with a default look at variables that are not set.
    if operator[-1] in "-=+?" and operator != ":":
        return _chosen(expander, part, subject, operator, start, in_quotes)
    if operator == ":":
        return _cut(expander, part, subject, start, in_quotes)
    if subject.elements is None:
        return expander.spread(subject, part, in_quotes)
    if operator[0] in "#%":
        expander.check_joiner(subject.joined, in_quotes)
    change = _change(expander, part, operator, start)
    expander.solid |= subject.joined == "@" and bool(subject.words)
    if not subject.joined:
        expander.solid |= operator[0] in "/^,@" or text_if_known(subject.words[0]) != ""
    words: list[Pieces] = [
        (_change_text(expander, part, word, change, in_quotes),) for word in subject.words
    ]
    return expander.list_pieces(words, subject.joined, part, in_quotes)


def _change_text(
    expander: Expansion, part: WordPart, word: Pieces, change: Callable[[str], str], in_quotes: bool
) -> Piece:
    text = text_if_known(word)
    if text is None:
        unknown = expander.unknown(
            part, next(piece.why for piece in word if isinstance(piece, Unknown)), in_quotes
        )
        alone = text_if_known(emptied(word))
        return replace(
            unknown, loose=several(word), alone=alone if alone is None else change(alone)
        )
    return expander.make_text(part, change(text), in_quotes)


def _change(expander: Expansion, part: WordPart, operator: str, start: int) -> Callable[[str], str]:
    """Return the function by which an operator changes a text."""
    if operator[0] == "@":
        if operator[1] not in parameters.TURNED:
            raise Unread(FORM) if operator[1] in UNTURNED else arithmetic.Wrong("bad substitution")
        return parameters.TURNED[operator[1]]
    if operator[0] == "/":
        pattern, put = _halves(expander, part, start)
        fold = expander.scope.on("nocasematch")
        return lambda text: parameters.replace_match(text, operator, pattern, put, fold)
    chars = expander.chars(expander.without_splitting(expander.operand(part, start, True)))
    if operator[0] in "#%":
        return lambda text: parameters.trim_match(text, operator, chars)
    return lambda text: parameters.change_case(text, operator, chars)


def _halves(expander: Expansion, part: WordPart, start: int) -> tuple[list[Char], str]:
    """Return the pattern and the replacement of `${NAME/pattern/replacement}`.

    The first literal slash separates them.
    """
    before, after = _split_parts(
        expander.source.text, expander.source.operand(start, part.end - 1, True), start
    )
    put = active(expander.without_splitting(expander.parts(after, False)))
    if after and expander.source.text.startswith("~", after[0].start):
        raise Unread("the home folder is not known")
    if any(char in (("&", True), ("\\", True)) for char in put):
        raise Unread('the meaning of "&" in a replacement depends on the release of bash')
    pattern = expander.chars(
        expander.without_splitting(expander.parts(expander.tilde(before, False), False))
    )
    return pattern, "".join(char for char, _ in put)


def _chosen(
    expander: Expansion,
    part: WordPart,
    subject: Subject,
    operator: str,
    start: int,
    in_quotes: bool,
) -> Expanded:
    """Return the value of `${NAME:-text}`, and of the other operators with a default value."""
    absent = _absent(expander, subject, operator[0] == ":")
    if absent is None:
        if subject.elements is None:
            raise Unread(expander.unset(subject.name))
        raise Unread(
            next(
                piece.why for word in subject.words for piece in word if isinstance(piece, Unknown)
            )
        )
    if operator[-1] == "+":
        nothing: Expanded = (
            [] if subject.joined == "@" else [expander.make_text(part, "", in_quotes)]
        )
        return nothing if absent else _default(expander, part, start, in_quotes)
    if not absent:
        return expander.spread(subject, part, in_quotes)
    if operator[-1] == "?":
        if expander.is_unset(subject) or subject.elements is not None:
            raise arithmetic.Unset(f"{subject.name} is not set")
        expander.runner.doubt(expander.source.line(part.start))
        raise Unread(expander.unset(subject.name))
    default = _default(expander, part, start, in_quotes)
    if operator[-1] == "=":
        if subject.joined or subject.element or subject.indexed or subject.name.isdigit():
            why = "an expansion that sets an array element or an argument is not supported"
            expander.scope.overtaken(
                f"line {expander.source.line(part.start)}, where {why},", re.escape(subject.name)
            )
            raise Unread(why)
        expander.scope.set(subject.name, Value((tuple(expander.without_splitting(default)),)))
        default = [*expander._used(tuple(expander.without_splitting(default)), part, in_quotes)]
    place = expander.place(part)
    return [
        replace(piece, uses=(place, *piece.uses)) if not isinstance(piece, Break) else piece
        for piece in default
    ]


def _default(expander: Expansion, part: WordPart, start: int, in_quotes: bool) -> Expanded:
    """Return the default value that replaces a variable.

    Within double quotes, the default value is not split into words.
    """
    pieces = list(expander.operand(part, start, not in_quotes, in_quotes))
    if not in_quotes:
        pieces = [
            replace(piece, splits=True) if isinstance(piece, Text) and not piece.quoted else piece
            for piece in pieces
        ]
    return pieces or [expander.make_text(part, "", in_quotes)]


def _absent(expander: Expansion, subject: Subject, empty: bool) -> bool | None:
    """Return whether a variable is unset or, with `empty`, has an empty value; None if that is not known."""
    if subject.elements is None or (subject.joined and not subject.elements):
        return (
            None
            if expander.scope.overtaker(subject.name)
            and not expander.scope.is_unset(subject.name)
            and not subject.joined
            else True
        )
    if any(
        isinstance(piece, Unknown) and piece.perhaps for word in subject.words for piece in word
    ):
        return None
    if any(several(word) for word in subject.words):
        return None
    if not empty:
        return False
    pieces = [piece for word in subject.words for piece in word]
    if any(isinstance(piece, Text) and piece.text for piece in pieces) or (
        subject.joined and len(subject.words) > 1
    ):
        return False
    unknowns = [piece.alone for piece in pieces if isinstance(piece, Unknown)]
    return None if None in unknowns else not any(unknowns)


def _cut(
    expander: Expansion, part: WordPart, subject: Subject, start: int, in_quotes: bool
) -> Expanded:
    """The value of `${NAME:first:count}`."""
    if subject.elements is None:
        return expander.spread(subject, part, in_quotes)
    text = text_if_known(
        expander.without_splitting(
            expander.plain(expander.parts(expander.source.double(start, part.end - 1), True))
        )
    )
    if text is None:
        raise Unread("the offset of a substring is not known")
    first, count = (
        arithmetic.value(half, expander) if half is not None else None
        for half in _bounds(text.replace('"', ""))
    )
    if not subject.joined:

        def part_of(whole: str) -> str:
            # Within the text, an empty part in quotes is still a word.
            expander.solid |= -len(whole) <= (first or 0) <= len(whole)
            return parameters.slice_text(whole, first or 0, count)

        return [_change_text(expander, part, subject.words[0], part_of, in_quotes)]
    words = _slice_words(expander, subject, first or 0, count)
    expander.solid |= subject.joined == "@" and bool(words)
    return expander.list_pieces(words, subject.joined, part, in_quotes)


def _slice_words(
    expander: Expansion, subject: Subject, first: int, count: int | None
) -> list[Pieces]:
    if any(several(word) for word in subject.words):
        raise Unread("the length of the list is not known")
    # `${@:0}` and a negative start reach the name of the script, which stands before the first
    # argument.
    elements = subject.elements or []
    if subject.name in ALL and (not first or first < -len(elements)):
        raise Unread("the list includes the name of the script, which is not known")
    if count is not None and count < 0:
        raise arithmetic.Wrong("the number of elements is below 0")
    value = expander.scope.get(subject.name) if subject.name not in ALL else None
    if value is not None and value.table:
        raise Unread("the order of an associative array is not certain")
    # Places count, and not elements: of an array with gaps, `${A[@]:5}` begins at the first place
    # from 5 on.
    last = max((int(place) for place, _ in elements), default=-1) + 1
    begin = first if first >= 0 else last + first
    words = [word for place, word in elements if int(place) >= begin] if begin >= 0 else []
    return words[:count]


def _split_parts(
    text: str, parts: Sequence[WordPart], start: int
) -> tuple[tuple[WordPart, ...], tuple[WordPart, ...]]:
    """Return the parts before and after the first literal slash.

    A slash at the very start belongs to the pattern.
    """
    for index, part in enumerate(parts):
        place = text.find("/", max(part.start, start + 1), part.end) if part.kind == "text" else -1
        if place >= 0:
            before = (replace(part, end=place),) if place > part.start else ()
            right = (replace(part, start=place + 1),) if place + 1 < part.end else ()
            return (*parts[:index], *before), (*right, *parts[index + 1 :])
    return tuple(parts), ()


def _bounds(text: str) -> tuple[str, str | None]:
    """Return the two halves of `first:count`. A colon that belongs to `? :` does not separate them."""
    waiting = depth = 0
    for place, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        waiting += char == "?"
        if char == ":" and not depth:
            if not waiting:
                return text[:place], text[place + 1 :]
            waiting -= 1
    return text, None
