"""Operators of `${NAME...}` on known text: substrings, trimming, replacement, letter case, quotes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from bridge.shell.patterns import Char, Pattern, Unread, simple

ESCAPE = re.compile(
    r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|c(.)|(.))",
    re.DOTALL,
)
SIMPLE: Mapping[str, str] = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "e": "\x1b",
    "E": "\x1b",
    "f": "\f",
    "v": "\v",
    "'": "'",
    '"': '"',
    "\\": "\\",
    "?": "?",
}

LETTERS = {char: f"\\{letter}" for letter, char in SIMPLE.items() if letter not in 'e"?'}
"""How `$'...'` spells an unprintable character, a quote and a backslash."""


def decode_escapes(text: str) -> str:
    """Return the text of `$'...'` with escapes decoded. A NUL ends the text."""
    return ESCAPE.sub(_escape, text).partition("\0")[0]


def _escape(match: re.Match[str]) -> str:
    octal, short, four, eight, control, simple = match.groups()
    if octal or short:
        code = int(octal, 8) & 0xFF if octal else int(short, 16)
        if code > 127:  # a byte, and maybe only a part of a character
            raise Unread("bytes beyond ASCII are not supported")
        return chr(code)
    if four or eight:
        return chr(int(four or eight, 16))
    if control:
        return chr(ord(control.upper()) & 0x1F)  # `\cA` is the first control character
    return SIMPLE.get(simple, match[0])


def quote_text(text: str) -> str:
    """Return `text` quoted for a shell, as `${NAME@Q}` does."""
    if any(not char.isprintable() for char in simple(text)):
        return (
            "$'"
            + "".join(
                LETTERS.get(char) or (char if char.isprintable() else f"\\{ord(char):03o}")
                for char in text
            )
            + "'"
        )
    if text == "'":
        return "\\'"
    return "'" + text.replace("'", "'\\''") + "'"


def trim_match(text: str, operator: str, pattern: Sequence[Char]) -> str:
    """Return `text` without the match of a pattern at its start (`#`, `##`) or at its end (`%`, `%%`)."""
    matcher = Pattern(pattern)
    longest = len(operator) == 2
    if operator[0] == "#":
        ends = matcher.ends(text, 0)
        return text[(max if longest else min)(ends) :] if ends else text
    starts = [place for place in range(len(text) + 1) if len(text) in matcher.ends(text, place)]
    return text[: (min if longest else max)(starts)] if starts else text


def replace_match(
    text: str, operator: str, pattern: Sequence[Char], put: str, fold: bool = False
) -> str:
    """Return `text` with the first match of a pattern (`/`) or all matches (`//`) replaced.

    A pattern that begins with `#` or `%` matches only at the start or the end. With `fold`, letter
    case is ignored.
    """
    if operator == "/" and pattern[:1] in ([("#", True)], [("%", True)]):
        return _replace_at_bound(text, pattern[0][0], pattern[1:], put, fold)
    if pattern[:1] == [("(", True)]:
        raise Unread("a shell puts * before this pattern and reads the result as a group")
    matcher, position, parts = Pattern(pattern, fold), 0, list[str]()
    if not pattern:
        return text
    while position <= len(text):
        ends = matcher.ends(text, position)
        # An empty match replaces something only in an empty text.
        if ends and (max(ends) > position or not text):
            parts += [put]
            position = max(ends)
            if operator == "/" or not text:
                break
        else:
            parts += text[position : position + 1]
            position += 1
    return "".join(parts) + text[position:]


def _replace_at_bound(text: str, side: str, pattern: Sequence[Char], put: str, fold: bool) -> str:
    matcher = Pattern(pattern, fold)
    if side == "#":
        ends = matcher.ends(text, 0)
        return put + text[max(ends) :] if ends else text
    if pattern[:1] == [("(", True)]:
        raise Unread("a shell puts * before this pattern and reads the result as a group")
    starts = [place for place in range(len(text) + 1) if len(text) in matcher.ends(text, place)]
    return text[: min(starts)] + put if starts else text


def change_case(text: str, operator: str, pattern: Sequence[Char]) -> str:
    """Return `text` in upper case (`^`, `^^`) or lower case (`,`, `,,`)."""
    change = str.upper if operator[0] == "^" else str.lower
    fits = Pattern(pattern).matches if pattern else lambda _: True
    size = len(simple(text)) if len(operator) == 2 else len(simple(text[:1]))
    return "".join(
        change(char) if index < size and fits(char) else char for index, char in enumerate(text)
    )


def slice_text(text: str, first: int, count: int | None) -> str:
    """`${NAME:first:count}`."""
    simple(text)
    begin = first if first >= 0 else len(text) + first
    if begin < 0 or begin > len(text):
        return ""
    if count is None:
        return text[begin:]
    end = begin + count if count >= 0 else len(text) + count
    if end < begin:
        raise Unread("the length of a substring is below 0")
    return text[begin:end]


TURNED: Mapping[str, Callable[[str], str]] = {
    "Q": quote_text,
    "U": lambda text: simple(text).upper(),
    "L": lambda text: simple(text).lower(),
    "u": lambda text: simple(text)[:1].upper() + text[1:],
    "E": decode_escapes,
}
"""`${NAME@letter}`."""
