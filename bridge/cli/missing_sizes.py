"""Hints in errors about sizes: a config was copied without its code part (.code.json), which may
hold these sizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from bridge.errors import BridgeError
from bridge.stack.dialect import code_beside

SIZES = re.compile(
    r"\bworld size\b|\bagree on \d+ data-parallel ranks?\b|\branks share a batch\b|^parallel: "
)
"""Pattern of problems about the number of ranks or the size of the batch."""

_READ: ContextVar[list[Path] | None] = ContextVar("read", default=None)


def alone(file: Path) -> None:
    """Remember `file` for a later hint if its code part (.code.json) is missing."""
    read = _READ.get()
    if (
        read is not None
        and file.is_file()
        and not file.name.endswith(".code.json")
        and not code_beside(file).exists()
    ):
        read.append(file)


@contextmanager
def name_missing_code() -> Iterator[None]:
    """Return a context in which an error about sizes is extended: it also names the missing code
    parts of the files that were read.
    """
    before = _READ.set([])
    try:
        yield
    except BridgeError as error:
        lines = dict.fromkeys(map(_line, _READ.get() or ()))
        # An error that names the missing part already is left as it is.
        names_code = any(".code.json" in problem for problem in error.problems)
        if names_code or not lines or not any(SIZES.search(problem) for problem in error.problems):
            raise
        longer = type(error)(*error.problems, *lines)
        longer.words = error.words
        raise longer from None
    finally:
        _READ.reset(before)


def _line(file: Path) -> str:
    beside = code_beside(file)
    return (
        f"{beside}: not found; if {file.name} was copied, copy {beside.name} too: it holds the "
        "number of ranks that share a batch"
    )
