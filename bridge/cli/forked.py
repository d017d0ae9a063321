"""The process that local ranks come from: what all of them need is loaded once, and each rank is a fork of it."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from types import ModuleType


@dataclass(frozen=True)
class Order:
    """Which module's `main` each rank calls, and with what; open files for each rank's words and for how they ended; seconds that
    the others get once the first has ended well, and once one has died.

    What the module can load ahead is what its `warm` does, with the same arguments.
    """

    module: str
    arguments: tuple[str, ...]
    words: tuple[int, ...]
    said: int
    patience: float
    grace: float

    def text(self) -> str:
        """As one argument of a command."""
        return json.dumps(asdict(self))


@dataclass
class Ends:
    """How ranks ended: codes by rank in the order of their ends, and those that had to be ended."""

    codes: dict[int, int] = field(default_factory=dict)
    killed: list[int] = field(default_factory=list)


def main(text: str) -> None:
    """Fork the ranks and wait for them; in each of them, what it has to do."""
    order = Order(**json.loads(text))
    module, forks = import_module(order.module), _forks()
    if forks and hasattr(module, "warm"):
        module.warm(*order.arguments)
    gc.collect()
    gc.freeze()  # what is loaded lives as long as the process: no collection has to look through it
    started: dict[int, int] = {}
    mine = _fork(order, started)
    if mine is None:
        _attend(order, started)
    else:
        _be(mine, order, module if forks else None)


def _forks() -> bool:
    """Whether a fork can go on where its parent was: not with CUDA, nor with the system libraries of a Mac."""
    from torch.cuda import is_available

    return sys.platform == "linux" and not is_available()


def _fork(order: Order, started: dict[int, int]) -> int | None:
    """The rank that this process is; None in the one that all of them come from, which has them in `started`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    for rank in range(len(order.words)):
        process = os.fork()
        if process == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            return rank
        started[process] = rank
    return None


def _be(rank: int, order: Order, module: ModuleType | None) -> None:
    """Be a rank: in this process, or without a module in a new one."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.dup2(order.words[rank], 2)
    if rank:
        _silence()
    if module is None:
        os.execv(sys.executable, [sys.executable, "-P", "-m", order.module, *order.arguments])
    module.main(*order.arguments)


def _silence() -> None:
    """Let nothing more come out of this process: who reads would wait for its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _attend(order: Order, running: dict[int, int]) -> None:
    """Wait for all ranks and say how they ended; whoever ends this process ends them."""

    def leave(number: int, frame: object) -> None:
        _kill(running)
        for process in running:
            with suppress(ChildProcessError):
                os.waitpid(process, 0)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _silence()
    ends = _ends(order, running)
    os.write(order.said, json.dumps([list(ends.codes.items()), ends.killed]).encode())


def _ends(order: Order, running: dict[int, int]) -> Ends:
    ends, until = Ends(), float("inf")
    while running:
        for process, code in list(_ended(running)):
            rank = running.pop(process)
            ends.codes[rank] = code
            if code or rank == 0:
                until = min(until, time.monotonic() + (order.grace if code else order.patience))
        if running and time.monotonic() > until:
            ends.killed = sorted(running.values())
            _kill(running)
            until = float("inf")
        time.sleep(0.02)
    return ends


def _ended(running: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """The processes among these that have ended since, and with which code."""
    for process in running:
        if (found := os.waitpid(process, os.WNOHANG))[0]:
            yield process, os.waitstatus_to_exitcode(found[1])


def _kill(running: Mapping[int, int]) -> None:
    for process in running:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
