"""Models of programs that transform lines: `sed`, `grep`, `sort`, `uniq`, and `awk` that prints fields."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bridge.shell import steps
from bridge.shell.patterns import Unread, simple
from bridge.shell.regular import basic, expression, groups_are_certain, longest

MOST = 2**20
SPECIAL = frozenset(".*[]^$+?(){}|\\&")


@dataclass(frozen=True, slots=True)
class Edit:
    """A command `s` of `sed`: its expression, the replacement, and whether it replaces every match of a line."""

    pattern: re.Pattern[str]
    put: tuple[str | int, ...]
    every: bool


def _parse_edits(text: str, extended: bool) -> list[Edit]:
    """Return the substitutions of a `sed` script.

    Launch scripts fill in the template of a config with these. Of 2,500 none has another command of sed
    in what it starts.
    """
    edits = list[Edit]()
    place = _skip(text, 0, "; \t\n")
    while place < len(text):
        mark = text[place + 1 : place + 2]
        if text[place] != "s" or not mark or mark in "\\\n" or mark in SPECIAL - set("|+"):
            raise Unread("this command of sed is not supported")
        regex, place = _until(text, place + 2, mark)
        put, place = _until(text, place, mark)
        every = text.startswith("g", place)
        place = _skip(text, place + every, " \t")
        if text[place : place + 1] not in ("", ";", "\n"):
            raise Unread("this command of sed is not supported")
        pattern = _parse_expression(regex, mark, extended)
        edits.append(Edit(pattern, _replacement(put, mark, pattern), every))
        place = _skip(text, place, "; \t\n")
    return edits


def _skip(text: str, place: int, chars: str) -> int:
    return len(text) - len(text[place:].lstrip(chars))


def _until(text: str, start: int, mark: str) -> tuple[str, int]:
    """Return the text up to the next `mark` that has no backslash before it, and the offset behind the mark."""
    place = start
    while place < len(text):
        if text[place] == mark:
            return text[start:place], place + 1
        place += 2 if text[place] == "\\" else 1
    raise Unread("this command of sed is not supported")


def _parse_expression(text: str, mark: str, extended: bool) -> re.Pattern[str]:
    if mark in SPECIAL and "\\" + mark in text:
        raise Unread("the delimiter of this command of sed has a special meaning")
    plain = text.replace("\\" + mark, mark)
    if not plain or re.search(r"\[[^\]]*\\", plain) or not plain.isascii():
        raise Unread("this expression of sed is not supported")
    return _compile(plain, extended)


def _compile(text: str, extended: bool, fold: bool = False) -> re.Pattern[str]:
    return expression([(char, True) for char in text], fold) if extended else basic(text, fold)


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


def sed(text: str, script: str, extended: bool) -> str:
    """Return the output of `sed` for the lines of `text`.

    Raises `Unread` for commands that are not modelled.
    """
    edits = _parse_edits(script, extended)
    output = list[str]()
    for whole in _lines(text):
        line, end = whole.removesuffix("\n"), "\n" if whole.endswith("\n") else ""
        for edit in edits:
            line = _substitute(line, edit)
        if len(line) > MOST:
            raise OverflowError("sed writes more than 1 MiB on one line; is this the right file?")
        output.append(line + end)
    return "".join(output)


def _substitute(line: str, edit: Edit) -> str:
    parts, position, after = list[str](), 0, -1
    while position <= len(line) and (match := longest(edit.pattern, line, position)) is not None:
        start, end = match.span()
        parts.append(line[position:start])
        if start == end == after:  # nothing stands right behind a match
            parts.append(line[start : start + 1])
            position = start + 1
            continue
        parts += [part if isinstance(part, str) else match[part] or "" for part in edit.put]
        after = end
        if start == end:
            parts.append(line[end : end + 1])
        # An empty match moves on by one character, or the search would find it for ever.
        position = end + 1 if start == end else end
        if not edit.every or edit.pattern.pattern.startswith("^"):
            break
    return "".join(parts) + line[position:]


def _lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def grep(text: str, flags: str, regex: str) -> str:
    """Return the output of `grep` for `text`, with the flags `E F i v c o q x w`."""
    if "F" in flags:
        pattern = re.compile(re.escape(regex), re.IGNORECASE if "i" in flags else 0)
    else:
        if "\\" in regex or not regex.isascii() or not regex:
            raise Unread("this expression of grep is not supported")
        pattern = _compile(regex, "E" in flags, "i" in flags)
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
