"""Errors: one root class for every deliberate failure, and all problems of a config in
one message.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from bridge import limits


class BridgeError(Exception):
    """Base class of all errors that are raised on purpose.

    `problems` holds one line for each problem: where, what was found, what was expected, what to
    do. `words` are arguments that complete the refused command; words in capitals stand for values
    that only the user knows. `part` is the part of a source that could be read, or None.
    `as_object` is true if the command was to print a JSON object; then the error is printed as a
    JSON object too.
    """

    words: tuple[str, ...] = ()
    part: Any = None
    as_object: bool = False

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))

    def reword(self, problems: Iterable[str]) -> None:
        """Say `problems` in place of those that the error was made with."""
        self.problems = tuple(problems)
        self.args = ("\n".join(self.problems),)

    @classmethod
    def raise_if(cls, problems: Iterable[str]) -> None:
        """Raise one error that lists all `problems`, if there are any; at most `limits.PROBLEMS`
        are listed.
        """
        # One more than is listed tells whether there are more; the rest of a long iterator is never
        # computed.
        unique = tuple(dict.fromkeys(islice(problems, limits.PROBLEMS + 1)))
        if len(unique) > limits.PROBLEMS:
            unique = (
                *unique[:-1],
                f"more than {limits.PROBLEMS} problems; is this the right file?",
            )
        if unique:
            raise cls(*unique)


class SourceError(BridgeError):
    """Raised if a source cannot be read: it is missing, binary, too large, or malformed."""


class UnrecognisedError(SourceError):
    """Raised if no stack recognises a source."""


class ConfigError(BridgeError):
    """Raised if a config is not valid for the stack and release."""


class VersionError(BridgeError):
    """Raised if a release is unknown, or is not the installed one."""


class TranslationError(BridgeError):
    """Raised if a config cannot be expressed in the other dialect."""


FEW = 5
"""The most problems of one kind that are listed. A file with more of them is probably the wrong
file.
"""


def few(problems: Sequence[str], what: str) -> list[str]:
    """Return the first `FEW` of `problems`, and a line with the number of the remaining ones.
    `what` is a noun in the plural for the problems.
    """
    more = len(problems) - FEW
    return [
        *problems[:FEW],
        *([f"{more:,} more {what}; is this the right file?"] if more > 0 else []),
    ]


def nearest(name: str, names: Iterable[str], before: int = 0) -> str:
    """`"; did you mean X?"` for the known name closest to `name`, or an empty string.

    `before` is the number of problems of the same file so far. If it is above `limits.PROBLEMS`, no
    name is suggested.
    """
    # The search takes time with the length of the name and the number of names; a hostile file has
    # both.
    if len(name) > limits.NAME or before > limits.PROBLEMS:
        return ""
    from difflib import get_close_matches  # late: most commands make no mistake

    by_lower = {word.lower(): word for word in names}
    close = get_close_matches(name.lower(), list(by_lower), n=3, cutoff=0.7)
    match = next((word for word in close if _alike(name.lower(), word)), None)
    return f"; did you mean {by_lower[match]}?" if match else ""


def _alike(name: str, word: str) -> bool:
    """Return whether two names are similar. Words that both names have do not count, because
    `--enable-` alone would make `--enable-msc` similar to `--enable-gpt-oss`.
    """
    from difflib import SequenceMatcher

    one, other = (Counter(re.split(r"[-_.]", each)) for each in (name, word))
    left, right = "".join((one - other).elements()), "".join((other - one).elements())
    return not (left and right) or SequenceMatcher(None, left, right).ratio() >= 0.6
