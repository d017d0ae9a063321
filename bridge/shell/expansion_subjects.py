"""The subject of an expansion: a variable, an array element, the arguments, or a special parameter."""

from __future__ import annotations

import re

from bridge.shell import arithmetic
from bridge.shell.expansion import Expansion, Subject
from bridge.shell.patterns import Unread, simple
from bridge.shell.scope import RUN, Value, elements, several
from bridge.shell.tokens import HOLE, Fault, WordPart
from bridge.shell.word_pieces import Pieces, Text, Unknown, text_if_known

NAMED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-]")
WHOLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\[.*\])?|[0-9]+|[@*]", re.DOTALL)
AGAIN = re.compile(r"[$`'\"\\]")
"""Matches a character that starts a further expansion. The shell expands an array index again if
the index came from an expansion.
"""
ALL = ("@", "*")
SPECIAL = "#?$!-"
FORM = "this form of expansion is not supported"


class Absent(Unread):
    """Raised for a variable that nothing sets."""


def put_element(value: Value, key: int | str, word: Pieces) -> Value:
    """Return an array with a new element. Raises `Unread` if the indices of the array are not known."""
    if value.open:
        raise Unread("the indices of the array are not known")
    if isinstance(key, int) and key < 0:
        # Counted from behind the last place, gaps included.
        key += max((int(place) for place in value.places), default=-1) + 1
        if key < 0:
            raise arithmetic.Wrong("the index lies before the start of the array")
    return value.put(key, word)


def malformed_expansion(expander: Expansion, start: int, end: int) -> ValueError:
    """Return the error for a malformed `${...}`, or for one with a part that is not known."""
    return (
        Unread(FORM)
        if HOLE in expander.source.text[start:end]
        else arithmetic.Discarded("bad substitution")
    )


def at(expander: Expansion, start: int, end: int) -> tuple[Subject, int]:
    """Return the variable at offset `start`, and the offset after its name and index."""
    match = NAMED.match(expander.source.text, start, end)
    if match is None:
        raise malformed_expansion(expander, start, end)
    position, index = match.end(), None
    if expander.source.text.startswith("[", position):
        position = _end_of_index(expander, position + 1)
        index = match.end() + 1, position - 1
    return subject_of_name(expander, match[0], index), position


def _end_of_index(expander: Expansion, position: int) -> int:
    try:
        return expander.source.scanner.scan_brackets(position, "[", "]")
    except Fault:
        raise Unread(FORM) from None


def subject_of_name(expander: Expansion, name: str, index: tuple[int, int] | None) -> Subject:
    if name in ALL:
        return Subject(name, list(enumerate(expander.scope.positional_arguments, 1)), name)
    if name in SPECIAL:
        return Subject(name, [(0, _special(expander, name))])
    if "[" in (reference := expander.scope.resolve_reference(name)):
        if index or reference.endswith(("[@]", "[*]")):
            raise Unread(f"a reference to {reference} is not supported here")
        return target(expander, reference, name)
    value = expander.scope.get(name)
    index_text = expander.source.text[slice(*index)] if index else ""
    if index_text in ALL:
        return Subject(name, list(elements(value)) if value else None, index_text)
    # Of a variable that is not set, only a negative index matters: it is an error.
    place = key(expander, index, value) if index and (value or index_text[:1] == "-") else None
    return element(expander, name, value, place, bool(index))


def element(
    expander: Expansion, name: str, value: Value | None, key: int | str | None, with_index: bool
) -> Subject:
    """Return one element of a variable."""
    if value is None or not value.words:
        before = isinstance(key, int) and key < 0
        if before and expander.scope.on("errexit"):
            raise arithmetic.Wrong(
                "the index lies before the start of the array; with set -e, a shell ends here"
            )
        return Subject(name, None, element=value is not None, before=before, indexed=with_index)
    if key is None:
        key = "0" if value.table else 0
    if isinstance(key, int) and key < 0:
        if value.open:
            raise Unread("the length of the array is not known")
        key += max((int(place) for place in value.places), default=-1) + 1
    before = isinstance(key, int) and key < 0
    if before and expander.scope.on("errexit"):
        raise arithmetic.Wrong(
            "the index lies before the start of the array; with set -e, a shell ends here"
        )
    word = value.at(key)
    pairs = None if word is None else [(key, word)]
    return Subject(
        name, pairs, element=with_index or value.array, before=before, indexed=with_index
    )


def key(expander: Expansion, index: tuple[int, int], value: Value | None) -> int | str:
    """Return the number or the key that an index expands to."""
    # An index of an array is arithmetic, and is expanded as such. A key of a table is a word, with
    # quotes of its own.
    parts = (
        expander.source.double(*index) if not (value and value.table) else _bare(expander, *index)
    )
    pieces = expander.parts(parts, True)
    text = text_if_known(
        expander.without_splitting(pieces if value and value.table else expander.plain(pieces))
    )
    if text is None:
        raise Unread("the index is not known")
    if value and value.table and not text and expander.scope.on("errexit"):
        raise arithmetic.Wrong("an empty key is an error; with set -e, a shell ends here")
    return text if value and value.table else arithmetic.value(text.replace('"', ""), expander)


def certain_key(expander: Expansion, index: tuple[int, int], value: Value | None) -> int | str:
    """Return the number or the key of an element that is set. Raises `Unread` if it depends on a variable that nothing sets."""
    result = key(expander, index, value)
    if expander.lacking:
        raise Unread(expander.lack())
    return result


def certain_number(expander: Expansion, index: str) -> int:
    """Return the value of an index. Raises `Unread` if it depends on a variable that nothing sets."""
    result = arithmetic.value(index, expander)
    if expander.lacking:
        raise Unread(expander.lack())
    return result


def _bare(expander: Expansion, start: int, end: int) -> list[WordPart]:
    parts: list[WordPart] = []
    source = expander.source
    scanner, position = type(source.scanner)(source.text[:end]), start
    while position < end:
        char = source.text[position]
        if char in "\\'\"$`":
            position = scanner.piece(char, position, parts)
        else:
            parts.append(WordPart("text", position, position + 1))
            position += 1
    return parts


def _special(expander: Expansion, name: str) -> Pieces:
    if name == "#":
        if any(several(word) for word in expander.scope.positional_arguments):
            raise Unread("the number of arguments is not known")
        return (Text(str(len(expander.scope.positional_arguments)), (0, 0), plain=False),)
    if name == "?" and expander.scope.status is not None:
        return (Text(str(expander.scope.status), (0, 0), plain=False),)
    raise Unread(RUN)


def count_elements(expander: Expansion, subject: Subject) -> int:
    if subject.joined:
        if any(several(word) for word in subject.words):
            raise Unread("the number of characters or words is not known")
        return len(subject.words)
    return len(simple(text_of(expander, subject)))


def text_of(expander: Expansion, subject: Subject) -> str:
    """Return the text of a variable that is not a list. Raises `Unread` if the text is not known."""
    if subject.elements is None:
        if not expander.is_unset(subject):
            raise Absent(expander.unset(subject.name))
        return ""
    text = text_if_known(subject.words[0]) if subject.words else ""
    if text is None:
        raise Unread(next(piece.why for piece in subject.words[0] if isinstance(piece, Unknown)))
    return text


def target(expander: Expansion, name: str, through: str) -> Subject:
    if not WHOLE.fullmatch(name):
        raise Unread(f"{through} does not name a variable")
    plain, _, index = name.partition("[")
    if not index:
        return subject_of_name(expander, name, None)
    value = expander.scope.get(plain)
    if AGAIN.search(index):
        raise Unread(
            f"{through} names {name}, and an index with a further expansion in it is not supported"
        )
    if index[:-1] in ALL:
        return Subject(plain, list(elements(value)) if value else None, index[:-1])
    key: int | str = index[:-1] if value and value.table else arithmetic.value(index[:-1], expander)
    return element(expander, plain, value, key, True)
