"""Ranks on this machine: processes joined over the loopback, started as a launcher would start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import IO

import bridge
from bridge.errors import BridgeError

PATIENCE = 300.0
"""Seconds that a rank gets to end once the first has nothing more to say."""
GRACE = 20.0
"""Seconds that the others get once a rank has died: they may be about to say the same, or be waiting for it for good."""
STALE = 600.0
"""Age in seconds of a build's lock that nobody can still hold: a build takes about a minute."""
BUILDS = "TORCH_EXTENSIONS_DIR"
TAIL = 6
"""Lines that are shown of what a failed rank said last."""


def ranks(number: int, module: str, *arguments: str) -> Iterator[str]:
    """Run `python -m module arguments` on `number` ranks; what the first of them prints, line by line.

    Raises `BridgeError` with the last words of a rank that fails. However it ends, no process is left.
    """
    with ExitStack() as stack:
        words = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(number)]
        builds = _builds(stack)
        port = _free_port()
        more = [{**_environment(rank, number, port), BUILDS: builds} for rank in range(number)]
        started = [_start(more[rank], [module, *arguments], words[rank]) for rank in range(number)]
        stack.callback(_end, started)
        dead = list[int]()
        Thread(target=_watch, args=(started, dead), daemon=True).start()
        first = started[0].stdout
        assert first is not None, "the first rank's output is a pipe"
        yield from (line.rstrip("\n") for line in first)
        for rank, process in enumerate(started):
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                raise BridgeError(f"rank {rank} does not end; it said last: {_last(words[rank])}") from None
        for rank in (*dead, *(rank for rank, process in enumerate(started) if process.returncode)):
            raise BridgeError(f"rank {rank} ended with code {started[rank].returncode}: {_last(words[rank])}")


def _watch(processes: Sequence[subprocess.Popen[str]], dead: list[int]) -> None:
    """Until all have ended: the first that dies is noted, and some time later none is left to wait for it."""
    while None in (codes := [process.poll() for process in processes]):
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            dead.append(failed[0])
            _wait(processes, time.monotonic() + GRACE)
            return
        time.sleep(0.05)


def _wait(processes: Sequence[subprocess.Popen[str]], until: float) -> None:
    """Wait for all to end, and end those that have not by then."""
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.kill()


def _builds(stack: ExitStack) -> str:
    """Where torch keeps what stacks build for it: the folder that the user names, else one of this run.

    Raises `BridgeError` for a lock that a killed build left there: whoever needs that build would wait for it for ever.
    """
    named = os.environ.get(BUILDS)
    if not named:
        return stack.enter_context(tempfile.TemporaryDirectory())
    locks = [lock for lock in Path(named).glob("**/lock") if time.time() - lock.stat().st_mtime > STALE]
    BridgeError.raise_if(f"{lock}: a build that was ended left it, and the next one waits for it; remove it" for lock in locks)
    return named


def _start(environment: Mapping[str, str], command: list[str], words: IO[str]) -> subprocess.Popen[str]:
    output = subprocess.PIPE if environment["RANK"] == "0" else subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-P", "-m", *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=words,
        text=True,
        env={**os.environ, **environment, "PYTHONPATH": _path()},
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
