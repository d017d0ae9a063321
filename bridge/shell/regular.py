"""POSIX regular expressions, extended and basic: the leftmost longest match and its groups."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from bridge.shell import steps
from bridge.shell.patterns import Char, Unread, simple
from bridge.shell.steps import endless

LONGEST = 4_000
RANGES: Mapping[str, str] = {
    "alpha": "a-zA-Z",
    "digit": "0-9",
    "alnum": "a-zA-Z0-9",
    "upper": "A-Z",
    "lower": "a-z",
    "space": r"\s",
    "blank": r" \t",
    "xdigit": "0-9a-fA-F",
    "punct": r"!-/:-@\[-`{-~",
}
"""Character classes, as ranges of a regular expression."""
QUANTIFIERS = "*+?{"
BASIC = {"(": "(", ")": ")", "|": "|", "+": "+", "?": "?", "{": "{", "}": "}", "n": "\n", "t": "\t"}
"""Meaning of characters after a backslash in GNU's basic expressions."""
EDGES = re.compile(r"(?<!\\)(?:\\\\)*\\[bB]")


def expression(chars: Sequence[Char], fold: bool = False) -> re.Pattern[str]:
    """Compile a POSIX extended regular expression for Python.

    Raises `Unread` if Python may read the expression differently.
    """
    position, parts = 0, list[str]()
    while position < len(chars):
        text, position = _regular(chars, position, bool(parts))
        parts.append(text)
    pattern = "".join(parts)
    try:
        return re.compile(pattern, re.DOTALL | re.ASCII | (re.IGNORECASE if fold else 0))
    except re.error:
        raise Unread("the pattern is no valid regular expression") from None


def _regular(chars: Sequence[Char], position: int, has_part: bool) -> tuple[str, int]:
    char, special = chars[position]
    after = "".join(
        letter if plain else "\0" for letter, plain in chars[position + 1 : position + 12]
    )
    if not special:
        return re.escape(char), position + 1
    if char == "[":
        return _regular_bracket(chars, position + 1)
    if char == "\\":
        return _regular_escape(after), position + 2
    if char in "*+?}" and (not has_part or after[:1] in ("*", "+", "?", "{")):
        raise Unread("this repetition is not supported")
    if (char == "{" and not re.match(r"\d+(,\d*)?\}", after)) or (
        char in "(|" and after[:1] in ("*", "+", "?", "{", ")", "|")
    ):
        raise Unread("this part of a regular expression is not supported")
    # `$` of Python fits before a line end at the end, too.
    return {"$": r"\Z", "^": "^"}.get(char, char), position + 1


def _regular_escape(after: str) -> str:
    if after[:1] in ("w", "W", "s", "S", "b", "B"):
        return "\\" + after[0]
    if not after or after[0] == "\0" or after[0].isalnum() or after[0] in "<>`'":
        raise Unread("this escape of a regular expression is not supported")
    return re.escape(after[0])


def _regular_bracket(chars: Sequence[Char], position: int) -> tuple[str, int]:
    text = "".join(char for char, _ in chars)
    match = re.compile(r"(\^?)(\]?(?:\[:\w+:\]|[^\]])*)\]").match(text, position)
    if match is None or re.search(r"\[[.=]", match[2]):
        raise Unread("this bracket of a regular expression is not supported")
    if any(not special for _, special in chars[position : match.end()]) and re.search(
        r"[-\\\]^]", match[2]
    ):
        raise Unread("quotes in this bracket of a regular expression are not supported")
    # Texts and names of classes in turn.
    parts = re.split(r"\[:(\w+):\]", match[2])
    if any(name not in RANGES for name in parts[1::2]):
        raise Unread("this class of characters is not supported")
    inside = "".join(
        RANGES[part] if index % 2 else re.sub(r"([\\\[\]&~|^])", r"\\\1", part)
        for index, part in enumerate(parts)
    )
    if re.search(r"--|^-.*-$", match[2]):
        raise Unread("this bracket of a regular expression is not supported")
    return f"[{match[1]}{inside}]", match.end()


def basic(text: str, fold: bool = False) -> re.Pattern[str]:
    """Compile a basic regular expression with GNU's extensions for Python.

    Raises `Unread` if Python may read the expression differently.
    """
    position, parts = 0, list[str]()
    while position < len(text):
        part, position = _basic(text, position, "".join(parts))
        parts.append(part)
    pattern = "".join(parts)
    if re.search(r"(?<!\\)[*+?}][*+?{]", pattern):
        raise Unread("this repetition is not supported")
    try:
        return re.compile(pattern, re.DOTALL | re.ASCII | (re.IGNORECASE if fold else 0))
    except re.error:
        raise Unread("the pattern is no valid regular expression") from None


def _basic(text: str, position: int, before: str) -> tuple[str, int]:
    # In a basic expression `*` and `^` are literal or not by their place: at the start of a branch
    # or group, or elsewhere.
    char, after = text[position], text[position + 1 : position + 2]
    starts = before in ("", "^") or (
        before.endswith(("(", "|")) and not before.endswith(("\\(", "\\|"))
    )
    if char == "\\":
        return _basic_escape(after, starts), position + 2
    if char == "[":
        return _regular_bracket([(letter, True) for letter in text], position + 1)
    if char == "*":
        return ("\\*" if starts else "*"), position + 1
    if char == "^":
        return ("^" if starts and not before.endswith("^") else "\\^"), position + 1
    if char == "$":
        return (r"\Z" if text[position + 1 :][:2] in ("", "\\)", "\\|") else "\\$"), position + 1
    return ("." if char == "." else re.escape(char)), position + 1


def _basic_escape(after: str, starts: bool) -> str:
    if after in BASIC:
        if starts and after in QUANTIFIERS:
            raise Unread("this repetition is not supported")
        return BASIC[after]
    if after in ("w", "W", "s", "S"):
        return "\\" + after
    if not after or after.isalnum() or after in "<>`'":
        raise Unread("this escape of a regular expression is not supported")
    return re.escape(after)


def longest(pattern: re.Pattern[str], text: str, start: int = 0) -> re.Match[str] | None:
    """Return the leftmost longest match, as POSIX defines it. Raises `Unread` if the match is not certain."""
    if endless(pattern, len(text)):
        simple(text)
        if len(text) > LONGEST:
            raise Unread("this expression is not supported")
        return steps.first(
            pattern, text, start, bool(pattern.groups) and groups_are_certain(pattern.pattern)
        )
    first = pattern.search(text, start)
    if first is None or LITERAL.fullmatch(pattern.pattern):
        return first
    simple(text)
    if len(text) > LONGEST or EDGES.search(pattern.pattern):
        raise Unread("this expression is not supported")
    # An expression that is bound to the end has only one end, so that the first match is the
    # longest.
    if r"\Z" in pattern.pattern:
        if re.search(r"\\Z(?!$)", pattern.pattern) or "|" in pattern.pattern:
            raise Unread("this expression is not supported")
        return first
    # No match begins further left than Python's first one. From there the longest is looked for,
    # from the end on.
    ends = range(len(text), first.end(), -1)
    return next(
        (match for end in ends if (match := pattern.fullmatch(text, first.start(), end))), first
    )


LITERAL = re.compile(r"(?:[^\\.\[\](){}*+?|^$]|\\[^A-Za-z0-9])*")
GROUP = re.compile(r"\(((?:\\.|\[[^\]]*\]|[^()\\\[])*)\)(?![*+?{])")


def groups_are_certain(pattern: str) -> bool:
    """Return whether the groups of a match are certain.

    They are if no group is nested or repeated, and all alternatives are plain words.
    """
    outside = GROUP.sub("", pattern)
    if re.search(r"(?<!\\)[(|)]", re.sub(r"\[[^\]]*\]", "", outside)):
        return False
    return all(_plain(content) for content in GROUP.findall(pattern))


def _plain(content: str) -> bool:
    choices = re.sub(r"\[[^\]]*\]", "", content).split("|")
    if len(choices) == 1:
        return True
    # With one alternative the beginning of another, POSIX and Python may choose different ones.
    words = content.split("|")
    return all(word.isalnum() for word in words) and not any(
        one != other and other.startswith(one) for one in words for other in words
    )
