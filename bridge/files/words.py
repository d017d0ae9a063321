"""Command-line flags in a text file.

The text is split as a shell would split it, and nothing is expanded or run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from bridge.errors import SourceError
from bridge.files.document import TEXT, Document, Key, check_limits
from bridge.shell.word_pieces import Pieces, Text

# Possessive repetitions (`++`) do not go back, so that no text takes exponential time.
BLANK = re.compile(r"(?:\s|\\\n|#[^\n]*)+")
WORD = re.compile(r"""(?:[^\s'"\\]++|\\.|'[^']*+'|"(?:[^"\\]|\\.)*+")++""", re.DOTALL)
PART = re.compile(
    r"""\\(?P<bare>.)|'(?P<single>[^']*+)'|"(?P<double>(?:[^"\\]|\\.)*+)\"""", re.DOTALL
)


def load_words(text: str, name: str = TEXT) -> Document:
    r"""Split a text into flags.

    The text may have quotes, `\` at line ends, and `#` comments at the start of a word.
    """
    words: list[str] = []
    lines: dict[Key, int] = {(): 1}
    for _, line, word in _words(text, name):
        lines[(len(words),)] = line
        words.append(_unquote_word(word))
        check_limits(len(words), 1, name, line)
    if not words:
        raise SourceError(f"{name}: holds only comments; expected flags")
    return Document(words, lines, "flags", name=name)


def pieces(text: str, name: str = TEXT) -> list[Pieces]:
    """Return the words of `text` with their spans, for edits."""
    return [
        (Text(_unquote_word(word), (start, start + len(word)), plain=False),)
        for start, _, word in _words(text, name)
    ]


def _words(text: str, name: str) -> Iterator[tuple[int, int, str]]:
    position, line = 0, 1
    while position < len(text):
        match = BLANK.match(text, position) or WORD.match(text, position)
        if match is None:
            raise SourceError(
                f"{name}: line {line}: found an open quote, or a backslash at the end; close or remove it"
            )
        if not BLANK.fullmatch(match[0]):
            yield position, line, match[0]
        line += match[0].count("\n")
        position = match.end()


def _unquote_word(word: str) -> str:
    return PART.sub(_part, word)


def _part(match: re.Match[str]) -> str:
    if match["bare"] is not None:
        return match["bare"].removeprefix("\n")
    if match["single"] is not None:
        return match["single"]
    return re.sub(r'\\(["\\$`\n])', lambda escape: escape[1].removeprefix("\n"), match["double"])
