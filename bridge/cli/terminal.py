"""Printing on the command line: reports, notes, errors and JSON, without secrets and control
characters.
"""

from __future__ import annotations

import codecs
import json
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from bridge.files.printable import brief, clean, clean_block, escape_character
from bridge.files.secrets import HIDDEN, hide

PLAIN = {"─": "-", "━": "-", "│": "|", "→": "->", "…": "...", "·": "."}
"""What stands for characters of our own where the encoding of an output lacks them."""


def accept_all_characters() -> None:
    """Make stdout and stderr take every character, whatever their encoding is.

    A character that the encoding lacks is printed as `PLAIN` says, else as an escape.
    """
    codecs.register_error(accept_all_characters.__name__, _replacement)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=accept_all_characters.__name__)


def _replacement(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(PLAIN.get(letter) or escape_character(letter) for letter in lacking), error.end


def say(line: str, stream: Any = None) -> None:
    """Print one line; by default on stdout."""
    print(hide(clean(line)), file=stream or sys.stdout, flush=True)


def note(line: str) -> None:
    """Print one line on stderr."""
    say(line, sys.stderr)


def complain(problems: Iterable[str]) -> None:
    """Print errors on stderr, one on each line."""
    for line in complaints(problems):
        print(line, file=sys.stderr, flush=True)


def complaints(problems: Iterable[str]) -> list[str]:
    """Return the lines in which errors are printed."""
    return [brief(hide(clean(f"error: {problem}"))) for problem in problems]


def print_json(content: Mapping[str, object], lines: bool = True) -> None:
    """Print one JSON object, on one line or indented.

    Infinite numbers and NaN, which JSON does not have, are written as text.
    """
    print(
        json.dumps(_finite(HIDDEN.within(content)), indent=2 if lines else None, allow_nan=False),
        flush=not lines,
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def content(text: str) -> None:
    """Write a converted file to stdout, with its secrets hidden, and on a terminal without control characters."""
    hidden = HIDDEN.hide(text)
    # Into a pipe the file goes byte for byte, in UTF-8 as every stack reads it; a terminal would act upon control characters.
    sys.stdout.flush()
    raw = getattr(sys.stdout, "buffer", None)
    if sys.stdout.isatty() or raw is None:
        sys.stdout.write(clean_block(hidden) if sys.stdout.isatty() else hidden)
    else:
        raw.write(hidden.encode())
    sys.stdout.flush()
    if hidden != text:
        note("note: secrets of the file are hidden here; -o OUT writes them")
