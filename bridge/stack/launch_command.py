"""Commands that start a run: the split of ranks over nodes, words that a shell fills in, and
arguments from a file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

PER_NODE = 8
"""The largest number of ranks on a node that a launch command assumes."""


class Shell(str):
    """A word that the shell expands, so that the word is not quoted."""

    __slots__ = ()


HEAD = Shell('"$MASTER_ADDR:29500"')
"""The address at which the ranks of several nodes meet. All nodes run the same command, and
`MASTER_ADDR` must hold the address of the same node on all of them.
"""


def nodes(ranks: int) -> tuple[int, int]:
    """Return the number of nodes and the number of ranks on each node. All nodes have equally many
    ranks: the largest divisor of `ranks` that is at most `PER_NODE`.
    """
    each = max(number for number in range(1, PER_NODE + 1) if ranks % number == 0)
    return ranks // each, each


def torchrun(ranks: int | None, *command: str) -> tuple[str, ...]:
    """Return the command that runs `command` with torchrun on `ranks` ranks. None leaves the number
    of ranks to torchrun.
    """
    if ranks is None:
        return ("torchrun", *command)
    count, each = nodes(ranks)
    meeting = (
        ("--nnodes", str(count), "--rdzv-backend", "c10d", "--rdzv-endpoint", HEAD)
        if count > 1
        else ()
    )
    return ("torchrun", *meeting, "--nproc-per-node", str(each), *command)


COMMENT = re.compile(r"(^|[ \t])#.*$", re.MULTILINE)


def fed(command: Sequence[str], file: str, text: str) -> tuple[str, ...]:
    """Return `command` followed by the arguments in a file, which xargs reads. Return an empty
    command if xargs would read other arguments than a shell.
    """
    # xargs splits and quotes as a shell does, but it knows no comments. Those are cut by a sed with
    # the same pattern as COMMENT, which is right only if the words are the same either way: a #
    # inside quotes, say, is no comment.
    bare = COMMENT.sub("", text)
    if not text or _words(text, True) != _words(bare, False):
        return ()
    source = (
        file if bare == text else Shell(f"<(sed -E 's/(^|[[:blank:]])#.*//' {shlex.quote(file)})")
    )
    return ("xargs", "-a", source, *command)


def _words(text: str, comments: bool) -> list[str] | None:
    """Split a text into words as a shell does. With `comments`, comments are left out. Return None
    if a quote is not closed.
    """
    try:
        return shlex.split(text, comments)
    except ValueError:
        return None


def line(words: Iterable[str]) -> str:
    """`words` as one line for a shell, with quotes where a word needs them."""
    return " ".join(word if isinstance(word, Shell) else shlex.quote(word) for word in words)
