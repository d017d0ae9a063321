"""Ranks on this machine: processes joined over the loopback, started as a launcher would start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import bridge
from bridge.errors import BridgeError

PATIENCE = 300.0
"""Seconds that a rank gets to end once the first has nothing more to say."""
TAIL = 6
"""Lines that are shown of what a failed rank said last."""


def ranks(number: int, module: str, *arguments: str) -> Iterator[str]:
    """Run `python -m module arguments` on `number` ranks; what the first of them prints, line by line.

    Raises `BridgeError` with the last words of a rank that fails. However it ends, no process is left.
    """
    with ExitStack() as stack:
        words = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(number)]
        port = _free_port()
        started = [_start(rank, number, port, [module, *arguments], words[rank]) for rank in range(number)]
        stack.callback(_end, started)
        first = started[0].stdout
        assert first is not None, "the first rank's output is a pipe"
        yield from (line.rstrip("\n") for line in first)
        for rank, process in enumerate(started):
            try:
                code = process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                raise BridgeError(f"rank {rank} does not end; it said last: {_last(words[rank])}") from None
            if code:
                raise BridgeError(f"rank {rank} ended with code {code}: {_last(words[rank])}")


def _start(rank: int, number: int, port: int, command: list[str], words: IO[str]) -> subprocess.Popen[str]:
    output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-P", "-m", *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=words,
        text=True,
        env={**os.environ, **_environment(rank, number, port), "PYTHONPATH": _path()},
    )


def _path() -> str:
    """PYTHONPATH without the entries that mean the current directory; where our package itself lies there, as in a checkout
    that is not installed, it is named.
    """
    named = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(entry)]
    home = str(Path(bridge.__file__).parents[1])
    return os.pathsep.join([*named, *([home] if home == os.getcwd() and home not in named else [])])


def _environment(rank: int, number: int, port: int) -> Mapping[str, str]:
    """What torchrun sets, with the loopback for messages and the machine's cores shared out."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // number))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": threads,
        **({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def _last(words: IO[str]) -> str:
    words.seek(0)
    return " | ".join(words.read().strip().splitlines()[-TAIL:])
