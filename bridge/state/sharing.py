"""Work shared by processes: forks of this one take numbers in turn, and tell how far they are; all end with the first error."""

from __future__ import annotations

import os
import signal
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress

from bridge.errors import BridgeError, SourceError

Told = Callable[[int, bool], None]
"""How many bytes more, and whether they are written now."""
RECORD = "<q?"
SIZE = struct.calcsize(RECORD)
NUMBERS = 4
"""Bytes of the number of a piece of work."""
LONGEST = 4096
"""Bytes of an error that are passed on."""


class UnwrittenError(SourceError):
    """A disk or a process failed, and nothing is wrong with the source: what is finished is of use to the next try."""


LOST = "\1"
"""What an error begins with that is one of the disk."""


def shared(processes: int, count: int, work: Callable[[int, Told], object], told: Told) -> None:
    """Call `work(number, told)` for each number below `count`, in so many processes; `told` is called in this one.

    Raises `SourceError` with what failed first, `UnwrittenError` if that was the disk. If this process is killed, the others end
    with their next word.
    """
    numbers = _numbered(count)
    words, said = os.pipe()
    wrong, error = os.pipe()
    children = [_started(numbers, said, error, (words, wrong), work) for _ in range(processes)]
    for descriptor in (numbers, said, error):
        os.close(descriptor)
    try:
        _listen(words, told)
        problem = os.read(wrong, LONGEST).decode(errors="replace")
        codes = _ended(children)
    finally:
        for child in children:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        os.close(words)
        os.close(wrong)
    if problem:
        raise (UnwrittenError if problem.startswith(LOST) else SourceError)(*problem.removeprefix(LOST).split("\0"))
    if any(codes):
        raise UnwrittenError("a process that wrote files was ended")


def _numbered(count: int) -> int:
    """A file without a name that holds the numbers; whoever reads it, from whichever process, gets the next."""
    with tempfile.TemporaryFile() as file:
        file.write(b"".join(number.to_bytes(NUMBERS, "little") for number in range(count)))
        file.seek(0)
        return os.dup(file.fileno())


def _listen(words: int, told: Told) -> None:
    """Pass on what the others say, until they have all ended."""
    rest = b""
    while content := os.read(words, SIZE * 512):
        rest += content
        whole = len(rest) // SIZE * SIZE
        for size, fresh in struct.iter_unpack(RECORD, rest[:whole]):
            told(size, fresh)
        rest = rest[whole:]


def _ended(children: list[int]) -> list[int]:
    codes = []
    while children:
        codes.append(os.waitpid(children.pop(), 0)[1])
    return codes


def _started(numbers: int, said: int, error: int, others: tuple[int, int], work: Callable[[int, Told], object]) -> int:
    """Fork a process that takes numbers until there are none; its identity."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        for descriptor in others:
            os.close(descriptor)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # nobody listens any more: the end
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _single()
        while number := os.read(numbers, NUMBERS):
            work(int.from_bytes(number, "little"), lambda size, fresh: _say(said, size, fresh))
        code = 0
    except BridgeError as problem:
        os.write(error, "\0".join(problem.problems).encode()[:LONGEST])
    except OSError as problem:
        os.write(error, f"{LOST}{problem.filename}: {problem.strerror}".encode()[:LONGEST])
    finally:
        os._exit(code)


def _single() -> None:
    """One thread: those of the process that this one was forked from are not here."""
    import torch

    torch.set_num_threads(1)


def _say(said: int, size: int, fresh: bool) -> None:
    os.write(said, struct.pack(RECORD, size, fresh))
