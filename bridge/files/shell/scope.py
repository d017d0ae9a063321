"""What a shell knows at one point of a script: variables, functions, files written; and what branches leave of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

from bridge.files.shell.pieces import NOWHERE, Pieces, Text, Unknown, known, same, shared

if TYPE_CHECKING:
    from tree_sitter import Node

    from bridge.files.shell.source import Source

LONGEST = 20_000
"""Parts of one value; only doubling gets there."""


@dataclass(frozen=True, slots=True)
class Value:
    """A variable: its words, one for a plain variable."""

    words: tuple[Pieces, ...]
    array: bool = False

    @property
    def pieces(self) -> Pieces:
        """A plain variable's text; the first element of an array."""
        return self.words[0] if self.words else ()


@dataclass
class Scope:
    """The state of a shell.

    `outside` is what is known of the variables and arguments that the script is started with; `ended` says which statement
    ended this path (`exit`, `return`), if one did.
    """

    outside: Mapping[str, str]
    variables: dict[str, Value] = field(default_factory=dict)
    functions: dict[str, tuple[Source, Node]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    files: dict[str, Pieces] = field(default_factory=dict)
    arguments: tuple[Pieces, ...] | None = None
    ended: str = ""

    def get(self, name: str) -> Value | None:
        """The value of a variable or of a numbered argument; None if the script sets none."""
        if name.isdigit():
            return self._argument(int(name))
        found = self.variables.get(name)
        return found if found is not None or name not in self.outside else _told(self.outside[name])

    def _argument(self, number: int) -> Value | None:
        if self.arguments is None:
            return _told(self.outside[str(number)]) if str(number) in self.outside else None
        return Value((self.arguments[number - 1],)) if 0 < number <= len(self.arguments) else None

    def set(self, name: str, value: Value) -> None:
        """Give a variable its value."""
        if sum(map(len, value.words)) > LONGEST:
            raise OverflowError(f"{name} grows beyond {LONGEST:,} parts; is this the right file?")
        self.variables[name] = value

    def copy(self) -> Scope:
        """A scope of its own, for a branch or a subshell."""
        return Scope(
            self.outside,
            dict(self.variables),
            dict(self.functions),
            set(self.exported),
            dict(self.files),
            self.arguments,
            self.ended,
        )

    def take(self, branches: Sequence[Scope], line: int) -> None:
        """Go on with what all `branches` of the statement at `line` agree on; the rest is not known."""
        running = [branch for branch in branches if not branch.ended]
        if not running:
            self.ended = branches[0].ended
            return
        names = dict.fromkeys(name for branch in running for name in branch.variables)
        found = {name: [branch.variables.get(name) for branch in running] for name in names}
        self.variables = {name: _agreed_on(values, line, name) for name, values in found.items()}
        for branch in running:
            self.functions |= branch.functions
            self.exported |= branch.exported
            self.files |= branch.files


def _agreed_on(values: Sequence[Value | None], line: int, name: str) -> Value:
    return reduce(lambda one, other: _merged(one, other, line, name), values) or Value(())


def _told(text: str) -> Value:
    return Value(((Text(text, NOWHERE, plain=False),),))


def _merged(one: Value | None, other: Value | None, line: int, name: str) -> Value | None:
    """What two branches agree on: where they part, it is not known."""
    first, second = one or Value(()), other or Value(())
    undecided = Unknown(f"${name}", NOWHERE, line, f"a branch decides it (line {line})")
    if first.array or second.array:
        words = _agreed(first.words, second.words)
        rest = () if len(words) == len(first.words) == len(second.words) else ((undecided,),)
        return Value((*words, *rest), True)
    if one is not None and other is not None and same(first.pieces, second.pieces):
        return one
    return Value(((*shared(first.pieces, second.pieces), undecided),))


def _agreed(one: tuple[Pieces, ...], other: tuple[Pieces, ...]) -> tuple[Pieces, ...]:
    pairs = zip(one, other, strict=False)
    length = next((index for index, (left, right) in enumerate(pairs) if not same(left, right)), min(len(one), len(other)))
    return one[:length]


def number(value: Value | None) -> int | None:
    """The whole number that a variable holds; unset ones count as 0, as in shell arithmetic."""
    text = "0" if value is None else known(value.pieces)
    try:
        return int((text or "").strip() or "0") if text is not None else None
    except ValueError:
        return None
