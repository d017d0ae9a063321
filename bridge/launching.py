"""Commands that start a run: nodes with so many ranks each, words that a shell fills in, and arguments out of a file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

PER_NODE = 8
"""Ranks that a node is taken to have at most."""


class Shell(str):
    """A word that the shell fills in; all others are quoted for it."""

    __slots__ = ()


HEAD = Shell('"$MASTER_ADDR:29500"')
"""Where the ranks of several nodes meet: the same command starts on each of these, and the variable names one of them."""


def nodes(ranks: int) -> tuple[int, int]:
    """How many nodes, and how many ranks on each: as many as a node has, and on all as many."""
    each = max(number for number in range(1, PER_NODE + 1) if ranks % number == 0)
    return ranks // each, each


def torchrun(ranks: int | None, *command: str) -> tuple[str, ...]:
    """`command` on so many ranks."""
    if ranks is None:
        return ("torchrun", *command)
    count, each = nodes(ranks)
    meeting = ("--nnodes", str(count), "--rdzv-backend", "c10d", "--rdzv-endpoint", HEAD) if count > 1 else ()
    return ("torchrun", *meeting, "--nproc-per-node", str(each), *command)


COMMENT = re.compile(r"(^|[ \t])#.*$", re.MULTILINE)


def fed(command: Sequence[str], file: str, text: str) -> tuple[str, ...]:
    """`command` with the words of a file behind it, quoted ones whole; nothing if no command reads them as they are meant."""
    bare = COMMENT.sub("", text)
    if not text or _words(text, True) != _words(bare, False):
        return ()
    source = file if bare == text else Shell(f"<(sed -E 's/(^|[[:blank:]])#.*//' {shlex.quote(file)})")
    return ("xargs", "-a", source, *command)


def _words(text: str, comments: bool) -> list[str] | None:
    """The words of a text, with or without what looks like comments; None where a quote stays open."""
    try:
        return shlex.split(text, comments)
    except ValueError:
        return None


def line(words: Iterable[str]) -> str:
    """A command as a shell reads it."""
    return " ".join(word if isinstance(word, Shell) else shlex.quote(word) for word in words)
