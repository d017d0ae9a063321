"""The process from which local ranks are forked: it loads the modules that all ranks need, once."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from types import ModuleType


@dataclass(frozen=True)
class Order:
    """The work of the ranks.

    Each rank calls `main(*arguments)` of `module`; before the fork, `warm(*arguments)` of that
    module loads what all ranks need. `words` are the file descriptors for the ranks' stderr, one
    for each rank, and `said` is the descriptor for the exit codes. When rank 0 has ended well, the
    other ranks get `patience` seconds to end; when a rank has died, they get `grace` seconds.
    """

    module: str
    arguments: tuple[str, ...]
    words: tuple[int, ...]
    said: int
    patience: float
    grace: float

    def text(self) -> str:
        """Return the order as JSON text, which is one argument of the command that starts the ranks."""
        return json.dumps(asdict(self))


@dataclass
class Ends:
    """How ranks ended: exit codes by rank in the order in which they ended, and the ranks that had
    to be killed.
    """

    codes: dict[int, int] = field(default_factory=dict)
    killed: list[int] = field(default_factory=list)


def main(text: str) -> None:
    """Fork the ranks of the order in `text`, which is JSON.

    Each fork runs as one rank, and this process waits for all of them.
    """
    order = Order(**json.loads(text))
    module = import_module(order.module)
    from torch.cuda import is_available

    # A fork cannot use CUDA that its parent has begun to use, nor the system libraries of a Mac.
    forks = sys.platform == "linux" and not is_available()
    if forks and hasattr(module, "warm"):
        module.warm(*order.arguments)
    gc.collect()
    gc.freeze()  # what is loaded lives as long as the process: no collection has to look through it
    ranks: dict[int, int] = {}
    mine = _fork_ranks(order, ranks)
    if mine is None:
        _wait_for_ranks(order, ranks)
    else:
        _run_rank(mine, order, module if forks else None)


def _fork_ranks(order: Order, ranks: dict[int, int]) -> int | None:
    """Fork the ranks. In a fork, return the rank that the fork runs.

    In the parent, return None after `ranks` has the rank of each process.
    """
    # SIGTERM waits until all ranks are known: now it would leave those that are started to themselves.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    for rank in range(len(order.words)):
        process = os.fork()
        if process == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            return rank
        ranks[process] = rank
    return None


def _run_rank(rank: int, order: Order, module: ModuleType | None) -> None:
    """Run as a rank: in this process, or, if `module` is None, in a new Python interpreter."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    # Stderr of its own, so that the last words of the rank that died first can be shown.
    os.dup2(order.words[rank], 2)
    # Only rank 0 reports; the pipe behind stdout is its own.
    if rank:
        _silence_stdout()
    if module is None:
        os.execv(sys.executable, [sys.executable, "-P", "-m", order.module, *order.arguments])
    module.main(*order.arguments)


def _silence_stdout() -> None:
    """Redirect stdout of this process to `os.devnull`, because whoever reads the pipe of rank 0 sees
    its end only after every process has closed the pipe.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _wait_for_ranks(order: Order, running: dict[int, int]) -> None:
    """Wait for all ranks and write down how they ended. SIGTERM to this process ends the ranks
    first.
    """

    def leave(number: int, frame: object) -> None:
        _kill_ranks(running)
        for process in running:
            with suppress(ChildProcessError):
                os.waitpid(process, 0)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _silence_stdout()
    ends = _exit_records(order, running)
    os.write(order.said, json.dumps([list(ends.codes.items()), ends.killed]).encode())


def _exit_records(order: Order, running: dict[int, int]) -> Ends:
    ends, until = Ends(), float("inf")
    while running:
        for process in list(running):
            pid, status = os.waitpid(process, os.WNOHANG)
            if not pid:
                continue
            rank, code = running.pop(process), os.waitstatus_to_exitcode(status)
            ends.codes[rank] = code
            # Rank 0 has the results: after its end nothing is left to wait for but the others' ends. After a death the others
            # may wait in a collective for good.
            if code or rank == 0:
                until = min(until, time.monotonic() + (order.grace if code else order.patience))
        if running and time.monotonic() > until:
            ends.killed = sorted(running.values())
            _kill_ranks(running)
            until = float("inf")  # once is enough: their ends come in as the others' did
        time.sleep(0.02)
    return ends


def _kill_ranks(running: Mapping[int, int]) -> None:
    for process in running:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
