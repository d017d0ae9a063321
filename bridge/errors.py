"""Errors: one root that every deliberate failure is, with all problems of a config collected in one message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BridgeError(Exception):
    """Root of everything raised on purpose.

    `problems` holds one line each: where, what was found, what was expected, what to do.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))

    @classmethod
    def raise_if(cls, problems: Iterable[str]) -> None:
        """Raise one error that lists all `problems`, if there are any."""
        found = tuple(dict.fromkeys(problems))
        if found:
            raise cls(*found)


class SourceError(BridgeError):
    """The source cannot be read: missing, binary, too large, malformed."""


class ConfigError(BridgeError):
    """A config is not valid for its stack and release."""


class VersionError(BridgeError):
    """A release is unknown, or not the one installed."""


class TranslationError(BridgeError):
    """A config cannot be expressed in the other dialect."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean X?"` for the known name closest to `name`, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {match[0]}?" if match else ""
