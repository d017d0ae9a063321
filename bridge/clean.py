"""Text for a terminal: what an input put into it is seen, and does nothing there."""

from __future__ import annotations

KEPT = {"line": " ", "block": " \n\t"}
"""What stands as it is beside printable characters: in one line, and in a text of several lines."""


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
