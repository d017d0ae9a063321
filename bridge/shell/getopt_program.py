"""`getopt` of util-linux: it writes the words of a command line in a normal order, quoted for a shell."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bridge.shell.patterns import Unread

LONG = ("-l", "--long", "--longoptions")
SHORT = ("-o", "--options")
NAME = ("-n", "--name")


@dataclass
class _Told:
    """The arguments of `getopt`: option letters and option names, each with its colons, and the words to parse."""

    letters: Mapping[str, str]
    names: Mapping[str, str]
    words: list[str]
    stops: bool = False
    quotes: bool = True


def getopt_output(texts: Sequence[str]) -> tuple[str, int]:
    """Return the output and the status of `getopt`.

    Raises `Unread` for arguments that are not supported.
    """
    reading = _Reading(_parse_declaration(texts[1:]))
    reading.run()
    return f"{reading.text()}\n", int(reading.wrong)


def _parse_declaration(words: Sequence[str]) -> _Told:
    rest, short, names, quotes = list(words), None, dict[str, str](), True
    while rest and re.match(r"-.", rest[0]) and rest[0] != "--":
        option, tied, value = rest.pop(0).partition("=")
        if option in ("-u", "--unquoted"):
            quotes = False
            continue
        if option in ("-q", "--quiet"):
            continue
        # A short option may have its value attached, as in `-oab:`.
        if option[:2] in (*SHORT, *LONG, *NAME) and not option.startswith("--") and len(option) > 2:
            option, value, tied = option[:2], option[2:] + tied + value, "="
        if option not in (*SHORT, *LONG, *NAME) or (not tied and not rest):
            raise Unread("this option of getopt is not supported")
        value = value if tied else rest.pop(0)
        if option in SHORT:
            short = value
        elif option in LONG:
            names |= {
                name.rstrip(":"): ":" * name.count(":")
                for name in re.split(r"[,\s]+", value)
                if name
            }
    if rest[:1] == ["--"]:
        rest.pop(0)
    if short is None:
        if not rest:
            raise Unread("the arguments of getopt are not known")
        # The form of the first releases: the letters come first, and the output is not quoted.
        short, quotes = rest.pop(0), False
    if short.startswith("-"):
        raise Unread("a string of option letters that begins with - is not supported in getopt")
    letters = {match[1]: match[2] for match in re.finditer(r"([^:+])(:{0,2})", short)}
    return _Told(letters, names, rest, short.startswith("+"), quotes)


@dataclass
class _Reading:
    """Separates the options on a command line from the other words."""

    told: _Told
    found: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    wrong: bool = False

    def run(self) -> None:
        rest = self.told.words
        while rest:
            word = rest.pop(0)
            if word == "--":
                break
            if word.startswith("--"):
                self._long(word, rest)
            elif word.startswith("-") and word != "-":
                self._letters(word[1:], rest)
            else:
                self.others.append(word)
                if self.told.stops:
                    break
        self.others += rest

    def text(self) -> str:
        """Return the output of `getopt`: the options, `--`, and the other words."""
        return "".join(
            f" {part}" for part in (*self.found, "--", *map(self._quote_word, self.others))
        )

    def _quote_word(self, word: str) -> str:
        return "'" + word.replace("'", "'\\''") + "'" if self.told.quotes else word

    def _put(self, option: str, takes: str, value: str | None, rest: list[str]) -> None:
        if takes == ":" and value is None:
            if not rest:
                self.wrong = True
                return
            value = rest.pop(0)
        self.found += [option, self._quote_word(value or "")] if takes else [option]

    def _long(self, word: str, rest: list[str]) -> None:
        option_name, tied, value = word[2:].partition("=")
        # A name may be shortened as long as only one begins so.
        names = (
            [option_name]
            if option_name in self.told.names
            else [name for name in self.told.names if name.startswith(option_name)]
        )
        if len(names) != 1 or (tied and not self.told.names[names[0]]):
            self.wrong = True
            return
        self._put(f"--{names[0]}", self.told.names[names[0]], value if tied else None, rest)

    def _letters(self, letters: str, rest: list[str]) -> None:
        while letters:
            letter, letters = letters[0], letters[1:]
            takes = self.told.letters.get(letter)
            if takes is None:
                self.wrong = True
            elif takes:
                self._put(f"-{letter}", takes, letters if letters or takes == "::" else None, rest)
                return
            else:
                self._put(f"-{letter}", "", None, rest)
