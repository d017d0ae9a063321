"""Text for a terminal: what an input put into it is seen, and does nothing there."""

from __future__ import annotations

import re

KEPT = {"line": " ", "block": " \n\t"}
"""What stands as it is beside printable characters: in one line, and in a text of several lines."""

OVERLONG = re.compile(r"(\S{60})\S{340,}?([:;,.)]?)(?!\S)")
"""A word that no name, path or number is as long as."""


def clean(text: str, kept: str = KEPT["line"]) -> str:
    """`text` with control characters, line breaks, bidirectional overrides and half surrogates as escapes (`\\x1b`)."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in kept else escaped(letter) for letter in text)


def clean_block(text: str) -> str:
    """The same for a text of our own with several lines."""
    return clean(text, KEPT["block"])


def escaped(letter: str) -> str:
    """A character as Python escapes it; what is ASCII-clean already stands for itself."""
    return letter.encode("unicode_escape").decode("ascii")


def brief(text: str) -> str:
    """`text`, secrets hidden before, with words of more than 400 characters in part."""
    return OVERLONG.sub(r"\1…\2", text)
