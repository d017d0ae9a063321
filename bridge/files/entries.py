"""Edits of single lines `key: value` in a YAML text; everything else stays byte for byte."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bridge.errors import TranslationError

ENTRY = re.compile(
    r"""(?P<key>\s*(?:"[^"]*"|'[^']*'|[^\s'"#][^:#]*?)\s*:)"""
    r"""(?P<value>(?:\s+(?:"[^"]*"|'[^']*'|[^#\n]*?))?)"""
    r"""(?P<rest>\s*(?:\s\#.*)?)"""
)
"""Pattern of one line: a key, a value on the same line, and a comment."""


def edit_entries(
    text: str, put: Mapping[int, str | None], insertions: Mapping[int, list[str]]
) -> str:
    """Return `text` with changed lines.

    `put` gives the new value for the line with each number, counted from 1, or None to remove that
    line. `insertions` gives new entries to insert after a line, with the indentation of that line.
    Raises `TranslationError` for a value that spans several lines.
    """
    # From the end, so that the numbers of the lines before stay right.
    lines = text.split("\n")
    for number in sorted({*put, *insertions}, reverse=True):
        line = lines[number - 1]
        new = (
            []
            if number in put and put[number] is None
            else [_with_value(line, put.get(number), number)]
        )
        indent = line[: len(line) - len(line.lstrip())]
        lines[number - 1 : number] = [
            *new,
            *(indent + entry for entry in insertions.get(number, ())),
        ]
    return "\n".join(lines)


def _with_value(line: str, value: str | None, number: int) -> str:
    if value is None:
        return line
    match = ENTRY.fullmatch(line)
    if match is None:
        raise TranslationError(
            f"line {number}: the value is not on the same line as its key, so it cannot be changed there"
        )
    return f"{match['key']} {value}{match['rest']}"
