"""Edits of single lines `key: value` in a YAML text: comments, order and everything else stay byte for byte."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bridge.errors import TranslationError

ENTRY = re.compile(
    r"""(?P<key>\s*(?:"[^"]*"|'[^']*'|[^\s'"#][^:#]*?)\s*:)"""
    r"""(?P<value>(?:\s+(?:"[^"]*"|'[^']*'|[^#\n]*?))?)"""
    r"""(?P<rest>\s*(?:\s\#.*)?)"""
)
"""One line: a key, a value on the same line, and a comment."""


def edit_entries(text: str, put: Mapping[int, str | None], added: Mapping[int, list[str]]) -> str:
    """`text` with new values on the lines of `put` (None removes the line) and new entries after
    the lines of `added`.

    Lines count from 1. New entries are indented as the line before them. Raises `TranslationError`
    for a value that spans several lines.
    """
    # From the end, so that the numbers of the lines before stay right.
    lines = text.split("\n")
    for number in sorted({*put, *added}, reverse=True):
        line = lines[number - 1]
        new = (
            []
            if number in put and put[number] is None
            else [_with_value(line, put.get(number), number)]
        )
        indent = line[: len(line) - len(line.lstrip())]
        lines[number - 1 : number] = [*new, *(indent + entry for entry in added.get(number, ()))]
    return "\n".join(lines)


def _with_value(line: str, value: str | None, number: int) -> str:
    if value is None:
        return line
    found = ENTRY.fullmatch(line)
    if found is None:
        raise TranslationError(
            f"line {number}: the value is not on the same line as its key, so it cannot be changed there"
        )
    return f"{found['key']} {value}{found['rest']}"
