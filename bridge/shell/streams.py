"""Models of programs that transform lines: `sed`, `grep`, `sort`, `uniq`, and `awk` that prints fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bridge.shell import steps
from bridge.shell.patterns import Unread, simple
from bridge.shell.regular import basic, expression, groups_are_certain, longest

MOST = 2**20
ADDRESS = re.compile(r"(?P<number>\d{1,6})|(?P<last>\$)|(?P<slash>/)")
GAP = re.compile(r"[ \t]*")
SPECIAL = frozenset(".*[]^$+?(){}|\\&")
FLAGS = re.compile(r"(?:[gpI]|[1-9]\d{0,3})*")


@dataclass(frozen=True, slots=True)
class Address:
    """An address of `sed`: a line number (0 for the last line), or an expression."""

    number: int = 0
    fits: re.Pattern[str] | None = None

    def holds(self, number: int, last: bool, line: str) -> bool:
        """Return whether the address selects this line."""
        return (
            bool(longest(self.fits, line))
            if self.fits is not None
            else number == self.number or (last and not self.number)
        )


@dataclass(frozen=True, slots=True)
class Edit:
    """A command of `sed`: its addresses (from, to) and its letter; for `s` the expression, the replacement and the flags."""

    at: tuple[Address, ...]
    denied: bool
    letter: str
    pattern: re.Pattern[str] | None = None
    put: tuple[str | int, ...] = ()
    first: int = 1
    every: bool = False
    prints: bool = False


class _Edits:
    """Parser of a `sed` script."""

    def __init__(self, text: str, extended: bool) -> None:
        self.text, self.place, self.compile = text, 0, _compile_extended if extended else basic

    def all(self) -> list[Edit]:
        edits = []
        self._skip("; \t\n")
        while self.place < len(self.text):
            edits.append(self._edit())
            self._skip("; \t\n")
        return edits

    def _skip(self, chars: str) -> None:
        while self.text[self.place : self.place + 1] and self.text[self.place] in chars:
            self.place += 1

    def _edit(self) -> Edit:
        at = self._addresses()
        self._skip(" \t")
        negation = self.text.startswith("!", self.place)
        self.place += negation
        self._skip(" \t")
        letter = self.text[self.place : self.place + 1]
        self.place += 1
        if letter == "s":
            return self._substitute(at, negation)
        if letter not in ("d", "p", "q"):
            raise Unread("this command of sed is not supported")
        self._end()
        return Edit(at, negation, letter)

    def _addresses(self) -> tuple[Address, ...]:
        first = self._address()
        if first is None:
            return ()
        self._skip(" \t")
        if not self.text.startswith(",", self.place):
            return (first,)
        self.place += 1
        self._skip(" \t")
        # A range with an expression begins again behind its end, which would need a memory of lines
        # before.
        second = self._address()
        if second is None or first.fits is not None or second.fits is not None:
            raise Unread("this address of sed is not supported")
        return first, second

    def _address(self) -> Address | None:
        match = ADDRESS.match(self.text, self.place)
        if match is None:
            return None
        self.place = match.end()
        if match["slash"]:
            return Address(fits=self._expression(self._until("/"), "/"))
        if match["number"] and not int(match["number"]):
            raise Unread("this address of sed is not supported")
        return Address(int(match["number"] or 0))

    def _until(self, mark: str) -> str:
        """Return the text up to the next `mark` that has no backslash before it."""
        start = self.place
        while self.place < len(self.text):
            char = self.text[self.place]
            if char == mark:
                self.place += 1
                return self.text[start : self.place - 1]
            self.place += 2 if char == "\\" else 1
        raise Unread("this command of sed is not supported")

    def _substitute(self, at: tuple[Address, ...], negation: bool) -> Edit:
        mark = self.text[self.place : self.place + 1]
        if not mark or mark in "\\\n" or mark in SPECIAL - set("|+"):
            raise Unread("this command of sed is not supported")
        self.place += 1
        regex, put = self._until(mark), self._until(mark)
        flags = FLAGS.match(self.text, self.place)
        letters = flags[0] if flags else ""
        self.place += len(letters)
        pattern = self._expression(regex, mark, "I" in letters)
        self._end()
        number = re.search(r"\d+", letters)
        if number and "g" in letters:
            raise Unread("these flags of sed are not supported")
        return Edit(
            at,
            negation,
            "s",
            pattern,
            _replacement(put, mark, pattern),
            int(number[0]) if number else 1,
            "g" in letters,
            "p" in letters,
        )

    def _expression(self, text: str, mark: str, fold: bool = False) -> re.Pattern[str]:
        if mark in SPECIAL and "\\" + mark in text:
            raise Unread("the delimiter of this command of sed has a special meaning")
        plain = text.replace("\\" + mark, mark)
        if not plain or re.search(r"\[[^\]]*\\", plain) or not plain.isascii():
            raise Unread("this expression of sed is not supported")
        return self.compile(plain, fold)

    def _end(self) -> None:
        self._skip(" \t")
        if self.text[self.place : self.place + 1] not in ("", ";", "\n"):
            raise Unread("this command of sed is not supported")


def _compile_extended(text: str, fold: bool) -> re.Pattern[str]:
    return expression([(char, True) for char in text], fold)


def _replacement(text: str, mark: str, pattern: re.Pattern[str]) -> tuple[str | int, ...]:
    """Return the literal texts of a replacement, and the numbers of the groups between them (0 for the whole match)."""
    parts: list[str | int] = []
    for piece in re.findall(r"\\.|&|[^\\&]+|\\", text, re.DOTALL):
        if piece == "&":
            parts.append(0)
        elif not piece.startswith("\\"):
            parts.append(piece)
        elif piece[1:].isdigit():
            parts.append(int(piece[1:]))
        elif piece[1:] in ("n", "t"):
            parts.append({"n": "\n", "t": "\t"}[piece[1:]])
        elif not piece[1:] or piece[1:].isalnum() or not piece.isascii():
            raise Unread("this replacement of sed is not supported")
        else:
            parts.append(piece[1:])
    numbers = [number for number in parts if isinstance(number, int)]
    if max(numbers, default=0) > pattern.groups or (
        max(numbers, default=0) and not groups_are_certain(pattern.pattern)
    ):
        raise Unread("the text of a group of this expression is not certain")
    return tuple(parts)


def sed(text: str, script: str, extended: bool, quiet: bool) -> str:
    """Return the output of `sed` for the lines of `text`.

    Raises `Unread` for commands that are not modelled.
    """
    edits = _Edits(script, extended).all()
    lines, output = _lines(text), list[str]()
    for number, whole in enumerate(lines, 1):
        line, end = whole.removesuffix("\n"), "\n" if whole.endswith("\n") else ""
        result, extra_lines, over = _edit_line(line, edits, number, number == len(lines))
        new_lines = [*extra_lines, *([result] if result is not None and not quiet else [])]
        # Only the last of the lines that one line yields lacks a line end, if the input lacks it.
        output += [f"{one}\n" for one in new_lines[:-1]] + [
            new_lines[-1] + end for _ in new_lines[:1]
        ]
        if over:
            break
        if sum(map(len, output[-1:])) > MOST:
            raise OverflowError("sed writes more than 1 MiB on one line; is this the right file?")
    return "".join(output)


def _edit_line(
    line: str, edits: Sequence[Edit], number: int, last: bool
) -> tuple[str | None, list[str], bool]:
    """Return the edited line (None if it is deleted), the lines printed before it, and whether `sed` ends here."""
    extra_lines: list[str] = []
    for edit in edits:
        if _chosen(edit, line, number, last) is edit.denied:
            continue
        if edit.letter == "d":
            return None, extra_lines, False
        if edit.letter == "q":
            return line, extra_lines, True
        substitutes = True
        if edit.pattern is not None:
            line, substitutes = _substitute_match(line, edit, edit.pattern)
        if edit.letter == "p" or (edit.prints and substitutes):
            extra_lines.append(line)
    return line, extra_lines, False


def _chosen(edit: Edit, line: str, number: int, last: bool) -> bool:
    if len(edit.at) < 2:
        return all(address.holds(number, last, line) for address in edit.at)
    first, second = edit.at
    if not first.number:
        return last
    # A range whose end lies before its start holds its first line alone.
    return number >= first.number and (
        not second.number or number <= max(second.number, first.number)
    )


def _substitute_match(line: str, edit: Edit, pattern: re.Pattern[str]) -> tuple[str, bool]:
    parts, position, count, after = list[str](), 0, 0, -1
    while position <= len(line) and (match := longest(pattern, line, position)) is not None:
        start, end = match.span()
        parts.append(line[position:start])
        if start == end == after:  # nothing stands right behind a match
            parts.append(line[start : start + 1])
            position = start + 1
            continue
        count += 1
        replaces = count >= edit.first
        parts.append(
            "".join(part if isinstance(part, str) else match[part] or "" for part in edit.put)
            if replaces
            else match[0]
        )
        after = end
        if start == end:
            parts.append(line[end : end + 1])
        # An empty match moves on by one character, or the search would find it for ever.
        position = end + 1 if start == end else end
        if (replaces and not edit.every) or pattern.pattern.startswith("^"):
            break
    return "".join(parts) + line[position:], count >= edit.first


def _lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def grep(text: str, flags: str, regex: str) -> str:
    """Return the output of `grep` for `text`, with the flags `E F i v c o q x w`."""
    if "F" in flags:
        pattern = re.compile(re.escape(regex), re.IGNORECASE if "i" in flags else 0)
    else:
        compile_: Callable[[str, bool], re.Pattern[str]] = (
            _compile_extended if "E" in flags else basic
        )
        if "\\" in regex or not regex.isascii() or not regex:
            raise Unread("this expression of grep is not supported")
        pattern = compile_(regex, "i" in flags)
    lines = [line.removesuffix("\n") for line in _lines(text)]
    search = steps.fits if "x" in flags else steps.has_match
    fitting = [line for line in lines if search(pattern, simple(line)) is not ("v" in flags)]
    if "c" in flags:
        return f"{len(fitting)}\n"
    if "o" in flags:
        if "v" in flags or "x" in flags:
            raise Unread("these options of grep are not supported")
        fitting = [part for line in fitting for part in _parts(pattern, line)]
    return "" if "q" in flags else "".join(f"{line}\n" for line in fitting)


def _parts(pattern: re.Pattern[str], line: str) -> list[str]:
    parts, position = list[str](), 0
    while (match := longest(pattern, line, position)) is not None:
        parts += [match[0]] if match[0] else []
        # An empty match moves on by one character, or the search would find it for ever.
        position = match.end() if match[0] else match.end() + 1
        if pattern.pattern.startswith("^") or position > len(line):
            break
    return parts


def sort_lines(text: str, flags: str) -> str:
    """Return the output of `sort` with `-n`, `-r` and `-u`.

    Raises `Unread` if the order depends on the locale.
    """
    lines = [line.removesuffix("\n") for line in _lines(text)]
    if "n" in flags:
        if not all(re.fullmatch(r"0|-?[1-9]\d{0,14}", line, re.ASCII) for line in lines):
            raise Unread("sort -n gets a line that is no number")
        lines.sort(key=int)
    elif all(re.fullmatch(r"[0-9a-z]*", line) for line in lines) or all(
        re.fullmatch(r"[0-9A-Z]*", line) for line in lines
    ):
        lines.sort()
    else:
        raise Unread('the order of lines after "sort" depends on the locale of the machine')
    if "u" in flags:
        lines = list(dict.fromkeys(lines))
    return "".join(f"{line}\n" for line in (reversed(lines) if "r" in flags else lines))


def single(text: str) -> str:
    """Return the output of `uniq`: the first of neighbouring equal lines, and all other lines."""
    lines = [line.removesuffix("\n") for line in _lines(text)]
    return "".join(
        f"{line}\n" for index, line in enumerate(lines) if not index or line != lines[index - 1]
    )


def fields(text: str, program: str, mark: str | None) -> str:
    """Return the output of `awk '{print $1, $NF}'`: fields of each line.

    Raises `Unread` for any other program.
    """
    match = re.fullmatch(
        r"\s*(NR\s*==\s*(?P<row>\d{1,6}))?\s*\{\s*print\s*(?P<what>[$\w, \t]*?)\s*;?\s*\}\s*",
        program,
    )
    names = re.split(r"\s*,\s*", match["what"]) if match and match["what"] else ["$0"]
    if match is None or not all(re.fullmatch(r"\$(?:\d{1,3}|NF)|NF|NR", name) for name in names):
        raise Unread("this program of awk is not supported")
    if mark is not None and (len(mark) != 1 or mark in SPECIAL or mark == " "):
        raise Unread("this separator of awk is not supported")
    rows = []
    for number, whole in enumerate(_lines(text), 1):
        line = whole.removesuffix("\n")
        if match["row"] and number != int(match["row"]):
            continue
        parts = re.split(r"[ \t]+", line.strip(" \t")) if mark is None else line.split(mark)
        parts = parts if line.strip(" \t") or (mark is not None and line) else []
        # `$NF` of a line without fields is `$0`, and a field behind the last one is empty.
        values = {
            "NF": str(len(parts)),
            "NR": str(number),
            "$NF": parts[-1] if parts else line,
            "$0": line,
        }
        values |= {f"${place}": part for place, part in enumerate(parts, 1)}
        rows.append(
            " ".join(
                values.get(name if name in ("NF", "NR", "$NF") else f"${int(name[1:])}", "")
                for name in names
            )
        )
    return "".join(f"{line}\n" for line in rows)
