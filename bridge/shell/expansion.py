"""What the parts of an expansion have in common: the source, the scope, and how pieces are made and joined."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bridge.errors import nearest
from bridge.shell.patterns import Char, Unread, active
from bridge.shell.scope import Scope
from bridge.shell.source import ShellSource
from bridge.shell.tokens import Word, WordPart
from bridge.shell.word_pieces import DEFAULT_IFS, Break, Piece, Pieces, Span, Text, Unknown, emptied

Expanded = list[Piece | Break]


@dataclass(slots=True, unsafe_hash=True)
class Subject:
    """A variable that is expanded. `elements` is None if the variable is not set.

    `joined` says how elements are joined: `@`, `*` or not at all. `element` is true for one element
    of an array, `indexed` for a variable that is written with an index, and `before` for a negative
    index that lies before the start of the array.
    """

    name: str
    elements: list[tuple[int | str, Pieces]] | None
    joined: str = ""
    element: bool = False
    before: bool = False
    indexed: bool = False

    @property
    def words(self) -> list[Pieces]:
        return [word for _, word in self.elements or ()]


class Runner(Protocol):
    """Interface for running the commands within a word."""

    def capture(self, source: ShellSource) -> Pieces:
        """Return the output of the commands of `source`."""

    def stop(self, line: int, problem: str, discards: bool) -> None:
        """Record that a shell certainly stops at an expansion on `line`; if it `discards`, only the rest of the line is lost."""

    def doubt(self, line: int) -> None:
        """Record that a shell possibly stops at an expansion on `line`."""

    def setter(self, name: str) -> int:
        """Return the first line on which the script assigns a variable; 0 if it never does."""

    def sets(self, name: str) -> bool:
        """Return whether the script has set a variable so far, or is setting it at present."""

    def lies(self, path: Pieces, filled: bool) -> bool | None:
        """Whether a file exists and, with `filled`, is not empty; None if that is not known."""

    def options_for_line(self, line: int) -> str:
        """Return the command-line options that would decide the branches around a line."""

    def record_unset(self, pieces: Iterable[Piece | Break]) -> None:
        """Record the variables in the words of a condition that nothing sets."""


class Expansion(ABC):
    """Expands parts of the words of one source with the variables of a scope."""

    def __init__(self, source: ShellSource, scope: Scope, runner: Runner) -> None:
        """Set up an expander for the words of `source`.

        `solid` is true once an expansion in the current double quotes makes a word, maybe an empty
        one. `lacking` are the reasons why variables that the current expression takes as 0 have no
        value.
        """
        self.source, self.scope, self.runner = source, scope, runner
        self.solid = False
        self.lacking: list[str] = []

    def without_splitting(self, pieces: Iterable[Piece | Break]) -> Iterator[Piece]:
        """Yield the pieces without word splitting."""
        for piece in pieces:
            yield (
                Text(piece.joiner, (0, 0), True, plain=False) if isinstance(piece, Break) else piece
            )

    def tilde(self, parts: tuple[WordPart, ...], in_assignment: bool) -> tuple[WordPart, ...]:
        """Return the parts of a word, with a `~` at the start as a separate part.

        With `in_assignment`, this also applies to a `~` after a colon.
        """
        if "~" not in self.source.text:
            return parts
        result: list[WordPart] = []
        for index, part in enumerate(parts):
            text = self.source.text_of(part)
            if part.kind != "text" or "~" not in text or (index and not in_assignment):
                result.append(part)
                continue
            # The name behind a tilde has to be literal to its end: the text part must not end
            # within it.
            pattern = r"(?:(?<=:)|^)~[^/:\s]*" if in_assignment else r"^~[^/]*"
            position, last = part.start, len(parts) == index + 1
            for match in re.finditer(pattern, text) if not index or in_assignment else ():
                whole = match.end() < len(text) or last
                if whole and (match.start() or not index):
                    result += (
                        [WordPart("text", position, part.start + match.start())]
                        if match.start()
                        else []
                    )
                    result.append(
                        WordPart("tilde", part.start + match.start(), part.start + match.end())
                    )
                    position = part.start + match.end()
            result += [WordPart("text", position, part.end)] if position < part.end else []
        return tuple(result)

    def unknown(
        self, part: WordPart | Word, why: str, in_quotes: bool, alone: str | None = None
    ) -> Unknown:
        """Return the piece for an expansion whose value is not known."""
        return Unknown(
            self.source.text_of(part),
            self.place(part),
            self.source.line(part.start),
            why,
            in_quotes,
            alone=alone,
        )

    def place(self, part: WordPart | Word) -> Span:
        return self.source.place(part.start, part.end)

    def make_text(self, part: WordPart, text: str, in_quotes: bool) -> Text:
        return Text(text, self.place(part), in_quotes, plain=False, splits=not in_quotes)

    def lack(self, error: str = "") -> str:
        """Return why an expression has no known value, as far as that is due to variables that nothing sets."""
        reasons = list(dict.fromkeys(self.lacking))
        names = dict.fromkeys(re.findall(r"--env (\w+)=", " ".join(reasons)))
        if (not error and len(reasons) == 1) or not names:
            return reasons[0]
        env_options = " ".join(f"--env {name}=..." for name in names)
        return f"{', '.join(names)} not set{error and ': '}{error}; set {env_options}"

    def is_unset(self, subject: Subject) -> bool:
        """Return whether a variable is known to be unset."""
        return (subject.element or self.scope.is_unset(subject.name)) and not self.scope.may(
            "nounset"
        )

    def unset(self, name: str) -> str:
        """Return the reason why a variable without a value counts as unknown."""
        if name.isdigit() and self.scope.arguments is None:
            return f"the value is an argument of the script; set --env {self.scope.outer(name)}=..."
        if self.scope.may("nounset") and self.scope.is_unset(name):
            return "the variable is not set, and set -u stops a shell here"
        if by := self.scope.overtaker(name):
            return f"{by} may set the variable; set --env {name}=..."
        line = self.runner.setter(name)
        if line and self.runner.sets(name):
            return (
                f"line {line} sets {name}, but this expansion does not see that value; "
                f"set --env {name}=..."
            )
        if line:
            hint = self.runner.options_for_line(line) or f"; set --env {name}=..."
            return f"the script sets {name} only on line {line}, which is not reached before this line{hint}"
        hint = nearest(name, self.scope.variables) or f"; set --env {name}=..."
        return f"the script sets {name} nowhere{hint}"

    def spread(self, subject: Subject, part: WordPart, in_quotes: bool) -> Expanded:
        """Return the elements of a variable without an operator."""
        if subject.elements is None and not subject.joined:
            if self.is_unset(subject):
                return [self.make_text(part, "", in_quotes)]
            absent = not self.scope.overtaker(subject.name) and not self.scope.may("nounset")
            if self.scope.may("nounset"):
                self.runner.doubt(self.source.line(part.start))
            return [self.unknown(part, self.unset(subject.name), in_quotes, "" if absent else None)]
        if subject.elements is None and not self.is_unset(subject):
            unknown = self.unknown(
                part,
                self.unset(subject.name),
                in_quotes,
                None if self.scope.overtaker(subject.name) else "",
            )
            return [
                replace(
                    unknown,
                    loose=bool(self.scope.overtaker(subject.name)) and subject.joined == "@",
                )
            ]
        self.solid |= bool(subject.joined and subject.words)
        return self.list_pieces(subject.words, subject.joined, part, in_quotes, plain=True)

    def list_pieces(
        self,
        elements: Sequence[Pieces],
        joiner: str,
        part: WordPart,
        in_quotes: bool,
        plain: bool = False,
    ) -> Expanded:
        pieces: Expanded = []
        for position, word in enumerate(elements):
            if position:
                pieces.append(self._between(joiner, part, in_quotes, plain))
            pieces += self._used(word, part, in_quotes) or [self.make_text(part, "", in_quotes)]
        if not elements and joiner == "*" and in_quotes:
            return [self.make_text(part, "", in_quotes)]
        return pieces

    def check_joiner(self, joiner: str, in_quotes: bool) -> None:
        """Raise `Unread` for an unquoted `[*]` if IFS is empty: bash then joins elements in different ways."""
        if joiner == "*" and not in_quotes and self.scope.separators == "":
            raise Unread("[*] is not supported here while IFS is empty")

    def _between(self, joiner: str, part: WordPart, in_quotes: bool, plain: bool) -> Piece | Break:
        """Return the separator between two elements of a list.

        It is a space for `[@]`. It is the first character of IFS for `[*]`, and for a quoted `[@]`
        with an operator.
        """
        if joiner != "*" and in_quotes and plain:
            return Break()
        separators = self.scope.separators
        if separators is None:
            raise Unread("IFS is not known")
        first = separators[:1]
        if joiner != "*" and in_quotes:
            if not first:
                raise Unread("[@] without word splitting is not supported while IFS is empty")
            return Break(first, made=True)
        if in_quotes:
            return Text(first, self.place(part), True, plain=False)
        return Break(first if joiner == "*" else " ", first.strip(DEFAULT_IFS))

    def _used(self, pieces: Pieces, part: WordPart, in_quotes: bool) -> list[Piece]:
        place, copies = self.place(part), list[Piece]()
        for piece in pieces:
            if isinstance(piece, Text):
                copies.append(piece.used(place, in_quotes))
            elif piece.line:
                copies.append(replace(piece, quoted=in_quotes, uses=(place, *piece.uses)))
            else:
                line, spelling = self.source.line(part.start), self.source.text_of(part)
                copies.append(
                    replace(piece, quoted=in_quotes, span=place, line=line, spelling=spelling)
                )
        return copies

    def chars(self, pieces: Iterable[Piece]) -> list[Char]:
        """Return the characters of a pattern. Brackets form groups only under `extglob`."""
        pattern_chars = active(pieces)
        if not any(special and char == "(" for char, special in pattern_chars) or self.scope.on(
            "extglob"
        ):
            return pattern_chars
        return [(char, special and char != "(") for char, special in pattern_chars]

    def operand(
        self, part: WordPart, start: int, single: bool, in_quotes: bool = False
    ) -> Expanded:
        """Return the expansion of the word after an operator, such as `text` in `${NAME:-text}`."""
        return self.parts(
            self.tilde(self.source.operand(start, part.end - 1, single), False), in_quotes
        )

    def plain(self, pieces: Iterable[Piece | Break]) -> Expanded:
        """Return the pieces of an expression.

        Unset variables are empty, unless `set -u` may stop the shell.
        """
        items = list(pieces)
        if self.scope.may("nounset"):
            return items
        self.lacking += [
            piece.why for piece in items if isinstance(piece, Unknown) and piece.alone is not None
        ]
        return emptied(items)

    @abstractmethod
    def parts(self, parts: Iterable[WordPart], in_quotes: bool) -> Expanded:
        """Return the pieces that parts expand to, before word splitting."""

    @abstractmethod
    def text_of(self, name: str, index: str | None) -> str:
        """Return the value of a variable for arithmetic; empty if the variable is not set."""

    @abstractmethod
    def assign(self, name: str, index: str | None, number: int) -> None:
        """Assign the value of an expression to a variable."""
