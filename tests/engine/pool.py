"""A pool of real processes: started once for each world size, a timeout for each call, started anew
after a hang.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

PATIENCE = 3600.0
"""Seconds after which something hangs, on any machine; what waits for a dead rank gives up long before, in other words."""
AFTER_FAILURE = 10.0
"""Seconds that the other ranks get once one has failed: they may be waiting for it, or be about to say the same."""


Run = Callable[..., list[Any]]
"""`run(world, function, *arguments)`: the fixture of that name."""


class RankError(Exception):
    """A call failed on some ranks; the message holds their tracebacks."""


class Pool:
    """`world` processes joined in one process group over gloo, which have imported the modules `preload`
    of the first pool.
    """

    def __init__(self, world: int, *preload: str) -> None:
        self.world, self.preload = world, preload
        self._ranks: list[tuple[Any, Connection]] = []

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = PATIENCE
    ) -> list[Any]:
        """Call `function(rank, world, *arguments)` on every rank; the results in order of ranks."""
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send((function, arguments))
        answers = self._collect(timeout)
        failures = [
            f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(answers) if not good
        ]
        if failures:
            self.close()
            raise RankError("\n".join(failures))
        return [value for _, value in answers]

    def _show(self, silent: list[int]) -> None:
        """Have these ranks write to stderr where they are."""
        for rank in silent:
            process, _ = self._ranks[rank]
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.2)  # one after the other

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks = []

    def _start(self) -> None:
        context, port = multiprocessing.get_context("forkserver"), free_port()
        context.set_forkserver_preload(
            ["torch", "torch._dynamo", *self.preload]
        )  # which takes longer than most tests
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _collect(self, timeout: float) -> list[tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while len(answers) < self.world:
            failed = any(not good for good, _ in answers.values())
            open_ = [pipe for pipe, rank in pipes.items() if rank not in answers]
            ready = wait(open_, AFTER_FAILURE if failed else timeout)
            if not ready:
                silent = sorted(set(range(self.world)) - set(answers))
                told = "".join(
                    f"\nrank {rank}:\n{text}" for rank, (good, text) in answers.items() if not good
                )
                self._show(silent)
                self.close()
                raise RankError(f"ranks {silent} gave no answer within {timeout} s{told}")
            for pipe in ready:
                answers[pipes[pipe]] = _receive(pipe)  # type: ignore[index, arg-type]
        return [answers[rank] for rank in range(self.world)]


def _receive(pipe: Connection) -> tuple[bool, Any]:
    try:
        good, value = pipe.recv()
    except EOFError:
        return False, "the process died"
    return bool(good), value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(rank: int, world: int, port: int, pipe: Connection) -> None:
    import torch

    from bridge.engine.comm import connect

    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    connect(rank, world, f"127.0.0.1:{port}", "gloo")
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        torch.nn.functional.linear = (
            torch._C._nn.linear
        )  # an earlier call of the real DeepSpeed leaves its own
        try:
            pipe.send((True, function(rank, world, *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
