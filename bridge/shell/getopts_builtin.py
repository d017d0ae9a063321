"""`getopts`: returns the next option on each call, with its argument."""

from __future__ import annotations

from collections.abc import Sequence

from bridge.shell import variables
from bridge.shell.scope import COUNTER, Value, leading_number, several
from bridge.shell.state import ShellState
from bridge.shell.word_pieces import NOWHERE, Pieces, Text, text_if_known

LARGEST = 2**31
"""Value of OPTIND from which on the C library's conversion to a number overflows."""


def step(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model one call of `getopts`."""
    texts = [
        None if several(word) else text_if_known(word)
        for word in (argv[3:] or reader.scope.positional_arguments)
    ]
    optstring, name = (
        text_if_known(argv[1]) if len(argv) > 1 else None,
        text_if_known(argv[2]) if len(argv) > 2 else None,
    )
    if optstring is None or name is None or None in texts:
        for word in (argv[2] if len(argv) > 2 else (), *map(_text, ("OPTARG", COUNTER))):
            reader.overtake(place, word)
        reader.scope.status = None
        return
    options = _Options(reader, place, optstring, [str(text) for text in texts])
    option, argument = options.next()
    variables.assign(reader, name, None, Value((_text(option),)), False)
    reader.scope.variables["OPTARG"] = None if argument is None else Value((_text(argument),))
    reader.scope.status = int(options.over)


def _text(text: str) -> Pieces:
    return (Text(text, NOWHERE, True, plain=False),)


class _Options:
    """One call of `getopts` on `texts`.

    The call continues at the word with the index OPTIND and at the letter that the shell remembers.
    `over` is true once all options were returned.
    """

    def __init__(
        self, reader: ShellState, place: int, optstring: str, texts: Sequence[str]
    ) -> None:
        self.scope, self.told, self.texts, self.over = reader.scope, optstring, texts, False
        value = self.scope.get(COUNTER)
        number, letter = leading_number(value), self.scope.letter
        if number is None or letter is None or abs(number) >= LARGEST:
            raise reader.refuse(place, "the next word for getopts is not known")
        self.index, self.letter = (
            min(max(number, 1), len(texts) + 1),
            max(letter, 0) if value is not None else 0,
        )

    def next(self) -> tuple[str, str | None]:
        """Return the values for the option variable and for OPTARG."""
        text = self.texts[self.index - 1] if self.index <= len(self.texts) else ""
        if not self.letter:
            if not text.startswith("-") or text in ("-", "--"):
                self.over = True
                self._save(0, text == "--")
                return "?", None
            self.letter = 1
        # A letter with a colon behind it takes an argument. A colon at the very start tells the
        # shell to report nothing itself.
        letter, last = text[self.letter], self.letter + 1 >= len(text)
        place = self.told.find(letter)
        if place >= 0 and letter != ":" and self.told[place + 1 : place + 2] == ":":
            return self._value_of_letter(text, letter)
        self._save(0 if last else self.letter + 1, last)
        if place < 0 or letter == ":":
            return "?", letter if self.told.startswith(":") else None
        return letter, None

    def _value_of_letter(self, text: str, letter: str) -> tuple[str, str | None]:
        # The argument is the rest of the word, or else the next word.
        rest = text[self.letter + 1 :]
        self._save(0, True)
        if rest:
            return letter, rest
        if self.index <= len(self.texts):
            argument = self.texts[self.index - 1]
            self._save(0, True)
            return letter, argument
        return (":", letter) if self.told.startswith(":") else ("?", None)

    def _save(self, letter: int, more: bool) -> None:
        self.index += more
        self.scope.variables[COUNTER] = Value((_text(str(self.index)),))
        self.scope.letter = letter
