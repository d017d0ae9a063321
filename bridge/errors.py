"""Errors: one root that every deliberate failure is, with all problems of a config collected in one message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from bridge import limits


class BridgeError(Exception):
    """Root of everything raised on purpose.

    `problems` holds one line each: where, what was found, what was expected, what to do. `words` are options that, added to the
    command that was refused, say what lacks; what only its user knows stands there in capitals. `part` is what could be read of
    a source all the same, where that is known. A command that was to print an object prints the error `as_object` too.
    """

    words: tuple[str, ...] = ()
    part: Any = None
    as_object: bool = False

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))

    @classmethod
    def raise_if(cls, problems: Iterable[str]) -> None:
        """Raise one error that lists all `problems`, if there are any; beyond `limits.PROBLEMS` that there are more."""
        found = tuple(dict.fromkeys(islice(problems, limits.PROBLEMS + 1)))
        if len(found) > limits.PROBLEMS:
            found = (*found[:-1], f"more than {limits.PROBLEMS} problems; is this the right file?")
        if found:
            raise cls(*found)


class SourceError(BridgeError):
    """The source cannot be read: missing, binary, too large, malformed."""


class UnrecognisedError(SourceError):
    """No stack recognises a source."""


class ConfigError(BridgeError):
    """A config is not valid for its stack and release."""


class VersionError(BridgeError):
    """A release is unknown, or not the one installed."""


class TranslationError(BridgeError):
    """A config cannot be expressed in the other dialect."""


FEW = 5
"""Problems of one kind that are listed: a file with more of them is not the right file."""


def few(problems: Sequence[str], what: str) -> list[str]:
    """The first of `problems`, and how many more `what` there are."""
    more = len(problems) - FEW
    return [*problems[:FEW], *([f"{more:,} more {what}; is this the right file?"] if more > 0 else [])]


def nearest(name: str, known: Iterable[str], before: int = 0) -> str:
    """`"; did you mean X?"` for the known name closest to `name`, or an empty string.

    `before` counts what was said of the same file already: nobody reads more than `limits.PROBLEMS`.
    """
    if len(name) > limits.NAME or before > limits.PROBLEMS:
        return ""
    spelled = {word.lower(): word for word in known}
    match = difflib.get_close_matches(name.lower(), list(spelled), n=1, cutoff=0.7)
    return f"; did you mean {spelled[match[0]]}?" if match else ""
