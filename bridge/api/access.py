"""Access of a use case to files: what a source may open, where a copy of it lies, and what is missing beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

from bridge.api.source import STDIN, Source
from bridge.errors import BridgeError
from bridge.files import as_private_as, reaching
from bridge.files.commits import at_hand
from bridge.files.notes import gather_notes, has_listeners, note
from bridge.stack import registry
from bridge.stack.dialect import code_beside

SIZES = re.compile(
    r"\bworld size\b|\bagree on \d+ data-parallel ranks?\b|\branks share a batch\b|^parallel: "
)
"""Pattern of problems about the number of ranks or the size of the batch."""
_READ: ContextVar[list[Path] | None] = ContextVar("read", default=None)


@contextmanager
def open_source(source: Source) -> Iterator[list[str]]:
    """Context in which a use case works on a source, with the list of its notes."""
    is_heard = has_listeners()
    with gather_notes() as notes, limit_access(source):
        # A command says this once, whatever it does.
        for fault in () if is_heard else registry.faults():
            note(f"note: {fault}")
        yield notes


@contextmanager
def place_source(source: Source) -> Iterator[Source]:
    """Context in which a source can be read; that of a commit is a copy, which is gone afterwards."""
    with at_hand(source.file) as place:
        here = source if place == source.file else replace(source, file=place)
        with limit_access(here):
            yield here


@contextmanager
def limit_access(source: Source) -> Iterator[None]:
    """Return a context that limits access to files.

    Files named in the source's file are opened only in its folder, in the folder where the command was
    started, or below a path of `allow`. Files that are written get no wider permissions than the source's
    file has.
    """
    standard = source.file == STDIN
    folder, file = (Path(), None) if standard else (Path(source.file).parent, source.file)
    # What lies below the folder where a person starts the command is that person's own; below the root lies everything.
    here = (Path(),) if Path().resolve() != Path(Path().resolve().anchor) else ()
    lent = [Path(name).parent for name in source.launchers]
    with reaching(folder, (*here, *source.allow, *lent)), as_private_as(file), _name_missing_code():
        yield


def note_file(file: Path) -> None:
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
def _name_missing_code() -> Iterator[None]:
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
        if not names_code and any(SIZES.search(problem) for problem in error.problems):
            error.reword((*error.problems, *lines))
        raise
    finally:
        _READ.reset(before)


def _line(file: Path) -> str:
    beside = code_beside(file)
    return (
        f"{beside}: not found; if {file.name} was copied, copy {beside.name} too: it holds the "
        "number of ranks that share a batch"
    )
