"""Sharing of work between forked processes. Each fetches numbers of tasks until none is left, and
reports progress. The first error ends all processes.
"""

from __future__ import annotations

import os
import signal
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress

from bridge.errors import BridgeError, SourceError

Told = Callable[[int, bool], None]
"""Function that is told of progress: a number of bytes, and whether they were written now (true)
or by an earlier run of the command.
"""
RECORD = "<q?"
SIZE = struct.calcsize(RECORD)
NUMBERS = 4
"""Number of bytes of a task's number in the file from which processes fetch the numbers."""
LONGEST = 4096
"""Maximum number of bytes of an error message that a process passes on. The system never splits a
write of this size into a pipe (POSIX: PIPE_BUF on Linux).
"""


class UnwrittenError(SourceError):
    """Raised if the cause is a disk or a process, and not a damaged source checkpoint. The files
    that are finished can be used when the command is repeated.
    """


LOST = "\1"
"""First character of an error message between processes if the disk failed."""


def share_work(
    processes: int, count: int, work: Callable[[int, Told], object], report: Told
) -> None:
    """Call `work(number, told)` in forked processes, once for each number below `count`. What they
    report is passed to `report` in this process.

    Raises `SourceError` with the first error, or `UnwrittenError` if a disk or a process failed. If
    this process is killed, the forked ones end at their next report, because nobody reads the pipe
    any more.
    """
    numbers = _number_file(count)
    words, reports = os.pipe()
    wrong, error = os.pipe()
    children = [
        _start_worker(numbers, reports, error, (words, wrong), work) for _ in range(processes)
    ]
    # A pipe ends for its reader when the last writer closes it, and this process is one until it
    # closes its own copies.
    for descriptor in (numbers, reports, error):
        os.close(descriptor)
    try:
        _pass_reports(words, report)
        problem = os.read(wrong, LONGEST).decode(errors="replace")
        codes = _wait_for_children(children)
    finally:
        for child in children:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        os.close(words)
        os.close(wrong)
    if problem:
        raise (UnwrittenError if problem.startswith(LOST) else SourceError)(
            *problem.removeprefix(LOST).split("\0")
        )
    if any(codes):
        raise UnwrittenError("a process that wrote files was killed")


def _number_file(count: int) -> int:
    """Return the descriptor of a file without a name that holds the numbers of all tasks. Forked
    processes share the position in the file, so that each read returns the next number.
    """
    with tempfile.TemporaryFile() as file:
        file.write(b"".join(number.to_bytes(NUMBERS, "little") for number in range(count)))
        file.seek(0)
        return os.dup(file.fileno())


def _pass_reports(words: int, report: Told) -> None:
    """Pass the reports of the forked processes to `report`, until all of these processes have ended."""
    rest = b""
    while content := os.read(words, SIZE * 512):
        rest += content
        whole = len(rest) // SIZE * SIZE
        for size, fresh in struct.iter_unpack(RECORD, rest[:whole]):
            report(size, fresh)
        rest = rest[whole:]


def _wait_for_children(children: list[int]) -> list[int]:
    codes = []
    while children:
        codes.append(os.waitpid(children.pop(), 0)[1])
    return codes


def _start_worker(
    numbers: int,
    reports: int,
    error: int,
    others: tuple[int, int],
    work: Callable[[int, Told], object],
) -> int:
    """Fork a process that runs tasks until none is left. Returns the id of the process."""
    child = os.fork()
    if child:
        return child

    def say(size: int, fresh: bool) -> None:
        os.write(reports, struct.pack(RECORD, size, fresh))

    code = 1
    try:
        import torch

        for descriptor in others:
            os.close(descriptor)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # nobody listens any more: the end
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)  # a fork has none of its parent's threads
        while number := os.read(numbers, NUMBERS):
            work(int.from_bytes(number, "little"), say)
        code = 0
    except BridgeError as problem:
        os.write(error, "\0".join(problem.problems).encode()[:LONGEST])
    except OSError as problem:
        os.write(error, f"{LOST}{problem.filename}: {problem.strerror}".encode()[:LONGEST])
    finally:
        # Not `sys.exit`: exit handlers and open buffers belong to the process that this one is a
        # copy of.
        os._exit(code)
