"""Text for a terminal: control characters of an input are shown as escapes, so that the terminal
does not act on them.
"""

from __future__ import annotations

import re

KEPT = {"line": " ", "block": " \n\t"}
"""Characters that are allowed in addition to printable ones, in a single line and in a text of several
lines.
"""

OVERLONG = re.compile(r"(\S{60})\S{340,}?([:;,.)]?)(?!\S)")
"""Pattern of a word of at least 400 characters, longer than any name, path or number. The first 60
characters are kept, and the rest is cut.
"""


def clean(text: str, exceptions: str = KEPT["line"]) -> str:
    """`text` with control characters, line breaks, bidirectional overrides and half surrogates as escapes (`\\x1b`)."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in exceptions else escape_character(letter)
        for letter in text
    )


def clean_block(text: str) -> str:
    """Return `text` as `clean` does, but leave line breaks and tabs: for texts of our own with
    several lines.
    """
    return clean(text, KEPT["block"])


def escape_character(letter: str) -> str:
    """Return a character as Python escapes it. A printable ASCII character stays as it is."""
    return letter.encode("unicode_escape").decode("ascii")


def brief(text: str) -> str:
    """Return `text` with each word of at least 400 characters cut. Secrets must be hidden before
    this call, as a secret that is cut would not be found.
    """
    return OVERLONG.sub(r"\1…\2", text)
