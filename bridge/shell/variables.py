"""Assignments: `=` and `+=`, to variables, arrays and associative arrays, and by `declare`, `export` and the like."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

from bridge.shell import arithmetic, expansion_subjects, parameters
from bridge.shell.expand import OUTPUT
from bridge.shell.expansion_subjects import put_element
from bridge.shell.patterns import Unread
from bridge.shell.scope import Value, several
from bridge.shell.source import ShellSource
from bridge.shell.state import ShellState
from bridge.shell.tokens import Word, WordPart
from bridge.shell.word_pieces import (
    NOWHERE,
    Pieces,
    Text,
    Unknown,
    cut,
    spell_pieces,
    text_if_known,
)

DECLARING = ("export", "declare", "local", "readonly", "typeset")
SPLIT = ("short", "param", "command", "backtick")
NOTHING = Value(((Text("", NOWHERE),),), keys=(0,))
FORM = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<index>\[.*?\])?(?P<more>\+)?=", re.DOTALL)
GIVEN = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<more>\+)?(?:=(?P<value>.*))?\Z", re.DOTALL)
"""Matches an assignment in a word that is the result of an expansion."""
KEYED = re.compile(r"\[(?P<key>.*?)\](?P<more>\+)?=", re.DOTALL)


@dataclass(slots=True, unsafe_hash=True)
class AssignmentTarget:
    """The target of an assignment: the name, the span of the index, and the offset of the value.

    `more` is true for `+=`.
    """

    name: str
    index: tuple[int, int] | None
    more: bool
    value: int


def assignment(source: ShellSource, word: Word) -> AssignmentTarget | None:
    """Return the target of a word that is an assignment; None for any other word."""
    if not word.parts or word.parts[0].kind != "text":
        return None
    first = word.parts[0]
    match = FORM.match(source.text[first.start : first.end])
    if match is None:
        return None
    end = match.end()
    # The index may hold brackets and `=` itself, which a pattern cannot pair.
    if match["index"] is not None:
        end = _index_end(source, first, match.end("name"))
        rest = re.compile(r"\+?=").match(source.text, end, first.end) if end else None
        if rest is None:
            return None
        return AssignmentTarget(
            match["name"],
            (first.start + match.end("name") + 1, end - 1),
            rest[0] == "+=",
            rest.end(),
        )
    return AssignmentTarget(match["name"], None, match["more"] is not None, first.start + end)


def _index_end(source: ShellSource, part: WordPart, place: int) -> int:
    depth = 0
    for position in range(part.start + place, part.end):
        depth += (source.text[position] == "[") - (source.text[position] == "]")
        if not depth:
            return position + 1
    return 0


def behind(word: Word, place: int) -> Word:
    """Return the part of a word from offset `place` on."""
    parts = [
        part if part.start >= place else replace(part, start=place)
        for part in word.parts
        if part.end > place
    ]
    return Word(place, word.end, tuple(parts))


def perform(reader: ShellState, word: Word) -> None:
    """One assignment."""
    target = assignment(reader.source, word)
    if target is not None:
        _perform(reader, word, target)()


def perform_alone(reader: ShellState, word: Word, target: AssignmentTarget) -> None:
    """Perform an assignment before a command.

    It sets a plain variable, even if the variable was an array.
    """
    scope = reader.scope
    if any(part.kind == "array" for part in word.parts) or "n" in scope.marks.get(target.name, ()):
        raise Unread("an array or a reference before a command is not supported")
    marks = scope.marks.get(target.name, frozenset())
    if marks & {"A", "?a", "?A"}:
        raise Unread("an associative array before a command is not supported")
    if "a" in marks:
        scope.mark(target.name, (), "a")
    perform(reader, word)
    value = scope.get(target.name)
    if value is not None and value.array and target.index is None:
        scope.variables[target.name] = Value((value.pieces,))


def _perform(
    reader: ShellState, word: Word, target: AssignmentTarget, marks: frozenset[str] = frozenset()
) -> Callable[[], None]:
    """Expand the value of an assignment, and return a function that performs the assignment."""
    index: Callable[[], int | str] | None = None
    reader.begun.add(target.name)
    if target.index is not None:
        span = target.index
        index = lambda: expansion_subjects.certain_key(  # noqa: E731
            reader.expander,
            span,
            reader.scope.get(target.name) or _fresh(reader, target.name, marks),
        )
    value_word = behind(word, target.value)
    if len(value_word.parts) == 1 and value_word.parts[0].kind == "array":
        table = _table(reader, target.name, marks)
        try:
            value = _array(reader, value_word.parts[0], table)
        except Unread as error:
            value = _hidden(target.name, str(error), table)
    else:
        value = Value((reader.expander.text(value_word, assigned=True),))
    reader.check_stops()
    return lambda: assign(reader, target.name, index, value, target.more)


def _fresh(reader: ShellState, name: str, marks: frozenset[str]) -> Value:
    return Value((), True, () if _table(reader, name, marks) else None, _table(reader, name, marks))


def _table(reader: ShellState, name: str, marks: frozenset[str]) -> bool:
    value = reader.scope.get(name)
    return (
        "A" in marks
        or "A" in reader.scope.marks.get(reader.scope.target(name), ())
        or bool(value and value.table)
    )


def _array(reader: ShellState, part: WordPart, table: bool) -> Value:
    """The elements of `(...)`."""
    value = Value((), True, () if table else None, table)
    # `place` is that of the next element without an index. `tail` are elements behind the last one
    # of `value`; they are added together, since each copy of a long array takes time. `pairs` are
    # keys and values of a table in turn.
    place, pairs, tail = 0, list[Pieces](), list[Pieces]()
    for key_span, word in _entries(reader, part):  # all of them, before the first place is counted
        if key_span is not None:
            before = _longer(value, tail)
            key = expansion_subjects.certain_key(reader.expander, key_span, before)
            value, place, tail = (
                put_element(before, key, word),
                (key + 1 if isinstance(key, int) else 0),
                [],
            )
        elif table:
            pairs.append(word)
        elif several(word):
            # Behind a word of unknown length no place is known. With places of its own before it,
            # the whole array is unknown.
            value, tail = (
                Value((word,), True) if value.keys is not None else _longer(value, [*tail, word]),
                [],
            )
        elif value.keys is None and (place == len(value.words) + len(tail) or value.open):
            tail.append(word)
            place += 1
        else:
            value, place, tail = put_element(_longer(value, tail), place, word), place + 1, []
    value = _longer(value, tail)
    for key_word, value_word in _pair_words(pairs):
        value = value.put(key_word, value_word)
    return value


def _entries(reader: ShellState, part: WordPart) -> list[tuple[tuple[int, int] | None, Pieces]]:
    """Return the words of `(...)`, each with the span of its index, or None without an index."""
    entries: list[tuple[tuple[int, int] | None, Pieces]] = []
    for word in part.words:
        key_span = _key_of_element(reader.source, word)
        if key_span is None:
            entries += [(None, one) for one in reader.expander.words(word)]
        else:
            entries.append((key_span[:2], reader.expander.text(behind(word, key_span[2]))))
    return entries


def _longer(value: Value, tail: Sequence[Pieces]) -> Value:
    """Return an array with more elements at its end."""
    return Value((*value.words, *tail), True, value.keys, value.table) if tail else value


def _pair_words(words: Sequence[Pieces]) -> Iterator[tuple[str, Pieces]]:
    for index in range(0, len(words), 2):
        key = text_if_known(words[index])
        if key is None or several(words[index]):
            raise Unread("a key of an associative array is not known")
        yield key, words[index + 1] if index + 1 < len(words) else (Text("", NOWHERE),)


def _key_of_element(source: ShellSource, word: Word) -> tuple[int, int, int] | None:
    if (
        not word.parts
        or word.parts[0].kind != "text"
        or not source.text.startswith("[", word.start)
    ):
        return None
    end = _index_end(source, word.parts[0], 0)
    match = re.compile("=").match(source.text, end, word.parts[0].end) if end else None
    return (word.start + 1, end - 1, match.end()) if match else None


def assign(
    reader: ShellState, name: str, index: Callable[[], int | str] | None, value: Value, more: bool
) -> None:
    """Set a variable according to its attributes (`-i`, `-u`, `-l`, `-r`)."""
    scope = reader.scope
    if "[" in (reference := scope.resolve_reference(name)):
        if index is not None or value.array:
            raise Unread(f"{name} refers to {reference}, which holds no array")
        put(reader, reference, value, more)
        return
    marks = scope.marks.get(scope.target(name), frozenset())
    before = scope.get(name)
    if marks & {"i", "u", "l"}:
        value = Value(
            tuple(_mark_variable(reader, word, marks) for word in value.words),
            value.array,
            value.keys,
            value.table,
        )
    if index is not None or (before is not None and before.array and not value.array):
        scope.set(name, _place_value(reader, name, index, value, more))
        return
    if more:
        # A variable without a known value may be set by a sourced file; `+=` then appends to
        # something unknown.
        absent: Pieces = ()
        if scope.overtaker(name) and not scope.is_unset(name):
            absent = (Unknown(f"${name}", NOWHERE, 0, reader.expander.unset(name)),)
        value = _append_value(reader, before, value, "i" in marks, absent)
    scope.set(name, value)


def put(reader: ShellState, target: str, value: Value, more: bool = False) -> None:
    """Assign a value to `NAME` or `NAME[index]`, a target that comes from an expansion."""
    name, sign, index = target.partition("[")
    if not name.isidentifier():
        raise reader.refuse(reader.place, f"{target} is no name for a variable")
    if sign and (
        expansion_subjects.AGAIN.search(index)
        or not index.endswith("]")
        or index[:-1] in ("", "@", "*")
    ):
        raise reader.refuse(reader.place, f"the index of {target} is not supported")
    table = bool(sign) and _table(reader, name, frozenset())

    def place() -> int | str:
        return (
            index[:-1] if table else expansion_subjects.certain_number(reader.expander, index[:-1])
        )

    assign(reader, name, place if sign else None, value, more)


def _place_value(
    reader: ShellState, name: str, index: Callable[[], int | str] | None, value: Value, more: bool
) -> Value:
    array = reader.scope.get(name) or _fresh(reader, name, frozenset())
    if not array.array:
        array = Value(array.words, True)
    try:
        key: int | str = index() if index is not None else ("0" if array.table else 0)
        word = value.words[0] if value.words else ()
        if more:
            subject = expansion_subjects.element(reader.expander, name, array, key, True)
            word = (*(subject.words[0] if subject.elements else ()), *word)
        return put_element(array, key, word)
    except Unread as error:
        return _hidden(name, str(error), array.table)


def _hidden(name: str, why: str, table: bool) -> Value:
    """Return an array of which nothing is known."""
    unknown = Unknown(f"${name}", NOWHERE, 0, why, loose=True)
    return Value(((unknown,),), True, ("",) if table else None, table)


def _mark_variable(reader: ShellState, word: Pieces, marks: frozenset[str]) -> Pieces:
    expander = reader.expander
    text = text_if_known(expander.plain(word) if "i" in marks else word)
    if text is None:
        return tuple(piece for piece in word if isinstance(piece, Unknown))[:1]
    if "i" in marks:
        try:
            text = str(expander.evaluate_text(text))
        except Unread as error:
            return (Unknown(text, NOWHERE, 0, str(error)),)
        except arithmetic.Wrong as error:
            if expander.lacking:
                return (Unknown(text, NOWHERE, 0, expander.lack(str(error))),)
            raise arithmetic.Discarded(f"{text!r}: {error}") from None
        if expander.lacking:
            return (Unknown(text, NOWHERE, 0, expander.lack(), alone=text),)
    else:
        try:
            text = parameters.TURNED["U" if "u" in marks else "L"](text)
        except Unread as error:
            return (Unknown(text, NOWHERE, 0, str(error)),)
    return (Text(text, NOWHERE, plain=False),)


def _append_value(
    reader: ShellState, before: Value | None, more: Value, number: bool, absent: Pieces
) -> Value:
    if before is None:
        return more if not absent or more.array else Value(((*absent, *more.pieces),))
    if not before.array and not more.array:
        if number:  # `+=` of a number adds
            return Value(
                (
                    _mark_variable(
                        reader, (*before.pieces, Text("+", NOWHERE), *more.pieces), frozenset("i")
                    ),
                )
            )
        return Value(((*before.pieces, *more.pieces),))
    if before.table or more.table:
        for key, word in zip(more.places, more.words, strict=True):
            before = before.put(key, word)
        return before
    if before.keys is None and more.keys is None:
        return Value((*before.words, *more.words), True)
    if before.open or more.open:
        return Value((*before.words, *more.words), True)
    start = (
        0 if more.keys is not None else max((int(place) for place in before.places), default=-1) + 1
    )
    for place, word in zip(more.places, more.words, strict=True):
        before = before.put(int(place) + start, word)
    return before


# declare, local, export, readonly


def declare(reader: ShellState, words: Sequence[Word], place: int) -> None:
    """Read `declare`, `local`, `export` or `readonly`.

    All values are expanded before the first is set.
    """
    command = reader.source.text_of(words[0])
    marks, unmarks, declarations = (
        set[str](),
        set[str](),
        list[tuple[str, Callable[[], None] | None]](),
    )
    for word in (choice for source_word in words[1:] for choice in _choices(reader, source_word)):
        text = reader.source.text_of(word)
        if re.fullmatch(r"[-+][A-Za-z]+", text):
            (marks if text[0] == "-" else unmarks).update(text[1:])
            continue
        target = assignment(reader.source, word)
        if target is not None:
            declarations.append((target.name, _perform(reader, word, target, frozenset(marks))))
        else:
            declarations += _variables_of_word(reader, word, frozenset(marks))
    reader.check_stops()
    reader.scope.status = 0
    if "f" in marks and not marks & {"F", "p"} and (command == "export" or "x" in marks):
        _share(reader, [name for name, _ in declarations], not ("n" in marks or "x" in unmarks))
        return
    if marks & {"f", "F", "p"} or not declarations:
        reader.write((Unknown(f"({command})", NOWHERE, reader.source.line(place), OUTPUT),))
        reader.scope.status = None
        return
    for name, perform_ in declarations:
        if command == "local":
            reader.scope.certain(name)
        if "r" in reader.scope.marks.get(name, ()) and (perform_ is not None or command == "local"):
            reader.scope.status = 1
            continue
        with reader.scope.globally(name) if "g" in marks and command != "local" else nullcontext():
            _declare(reader, command, name, perform_, (frozenset(marks), frozenset(unmarks)))


def _share(reader: ShellState, names: Sequence[str], on: bool) -> None:
    """Export functions to inner shells, as `export -f` does, or stop exporting them."""
    scope, there = reader.scope, {name for name in names if name in reader.scope.functions}
    others = {name: sure for name, sure in scope.shared.items() if name not in there}
    scope.shared = {**others, **dict.fromkeys(there, True)} if on else others
    scope.status = int(len(there) < len(set(names)))


def _choices(reader: ShellState, word: Word) -> list[Word]:
    """Return the words of a brace expansion, each a separate assignment.

    Raises `SourceError` if such a word also has an expansion that a shell would split.
    """
    choices = reader.expander.choices(word)
    if len(choices) == 1:
        return [word]
    if any(
        part.kind in SPLIT or (part.kind == "double" and "@" in reader.source.text_of(part))
        for part in word.parts
    ):
        raise reader.refuse(
            word.start,
            'braces and an expansion that a shell splits are not supported in one argument of "declare"',
        )
    return [Word(word.start, word.end, parts) for parts in choices]


def _variables_of_word(
    reader: ShellState, word: Word, marks: frozenset[str]
) -> Iterator[tuple[str, Callable[[], None] | None]]:
    """Yield the variables that a word declares only after its expansion, such as `"$name=$value"`.

    Each variable has the function that assigns the value; None without a value.
    """
    for expansion in reader.expander.words(word):
        text = "".join(piece.text if isinstance(piece, Text) else "\0" for piece in expansion)
        match = GIVEN.match(text)
        if match is None or several(expansion) or (match["value"] is None and match["more"]):
            reader.overtake(word.start, expansion)
            continue
        name = match["name"]
        if match["value"] is None:
            yield name, None
            continue
        value = cut(expansion, match.start("value")) or (Text("", NOWHERE),)
        if text.startswith("(", match.start("value")) and (
            marks & {"a", "A"} or reader.scope.get(name) is not None
        ):
            raise reader.refuse(
                word.start, f"it is not known whether {spell_pieces(expansion)} sets an array"
            )
        yield name, partial(assign, reader, name, None, Value((value,)), bool(match["more"]))


def _declare(
    reader: ShellState,
    command: str,
    name: str,
    perform_: Callable[[], None] | None,
    marks: tuple[frozenset[str], frozenset[str]],
) -> None:
    scope, (additions, removals) = reader.scope, marks
    here = command == "local" or (
        command in ("declare", "typeset") and scope.frames and "g" not in additions
    )
    if here:
        # A local begins without a value. Declared again, it keeps the one that it has.
        fresh = name not in scope.frames[-1] if scope.frames else False
        scope.local(name)
        if fresh:
            scope.variables[name] = None
    refers = "n" in additions | removals and command != "export"
    name = name if refers else scope.target(name)
    attributes = additions & {"i", "u", "l", "A", "a"}
    if attributes or removals or refers:
        scope.mark(name, attributes, removals | {"n"})
        if "A" in attributes and scope.get(name) is None:
            scope.variables[name] = None
    if command == "export" or "x" in additions | removals:
        scope.export(name, not ("x" in removals or ("n" in additions and command == "export")))
    if perform_ is not None:
        perform_()
    # These take effect behind the assignment, which they would refuse or turn elsewhere.
    late = {"r"} if command == "readonly" or "r" in additions else set[str]()
    late |= {"n"} if refers and "n" in additions else set()
    if late:
        scope.mark(name, late)
