"""Ranks on this machine: processes joined over the loopback, with the environment that a launcher would give them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import bridge
from bridge.errors import BridgeError
from bridge.verify.forked_job import Ends, Order

MARK = "@stagebridge "
"""Prefix of our own output lines, as stacks print to the same stream."""
Fields = dict[str, Any]
"""A message of a rank."""
PATIENCE = 300.0
"""Seconds that the other ranks have to end after rank 0 has ended well."""
GRACE = 20.0
"""Seconds that the other ranks have to end after a rank has died.

They may be about to fail for the same reason, or may wait for the dead rank for ever.
"""
STALE = 600.0
"""Age in seconds from which a build's lock is taken as left over: a build takes about a minute."""
BUILDS = "TORCH_EXTENSIONS_DIR"
ENCODING = "utf-8"
"""Encoding of what ranks print, whatever the environment says."""
TAIL = 6
"""Number of last output lines that are shown of a failed rank."""
LEAKS = "^nanobind: leaked"
"""Pattern of a report that Triton's bindings print when a process ends, after its own last words."""


def run_ranks(number: int, module: str, *arguments: str) -> Iterator[str]:
    """Call `main(*arguments)` of a module on `number` ranks, and yield the lines that rank 0 prints.

    Raises `BridgeError` with the last output of a failed rank. Afterwards no process is left, also
    if an error is raised.
    """
    with ExitStack() as stack:
        files = [
            stack.enter_context(tempfile.TemporaryFile("w+", encoding=ENCODING, errors="replace"))
            for _ in range(number + 2)
        ]
        own, results, *words = files
        order = Order(
            module,
            arguments,
            tuple(file.fileno() for file in words),
            results.fileno(),
            PATIENCE,
            GRACE,
        )
        process = _start_ranks(
            order, {**_rank_environment(number), BUILDS: _builds_folder(stack)}, own
        )
        stack.callback(_end_ranks, process)
        assert process.stdout is not None, "stdout of the process was opened as a pipe"
        yield from (line.rstrip("\n") for line in process.stdout)
        if process.wait():
            raise BridgeError(f"the ranks did not start: {_last_line(own)}")
        results.seek(0)
        codes, kills = json.load(results)
        _judge_ends(Ends(dict(codes), kills), words)


def _judge_ends(ends: Ends, words: Sequence[IO[str]]) -> None:
    """Raise `BridgeError` about the first rank that died, or about a rank that had to be killed."""
    for rank in (rank for rank, code in ends.codes.items() if code and rank not in ends.killed):
        raise BridgeError(
            f"rank {rank} {_exit_text(ends.codes[rank])}: {_last_line(words[rank]) or 'it printed nothing'}"
        )
    for rank in ends.killed:
        raise BridgeError(f"rank {rank} does not end; its last output: {_last_line(words[rank])}")


def _exit_text(code: int) -> str:
    """Say in words how a process ended.

    The code -N means that signal N ended the process.
    """
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def _builds_folder(stack: ExitStack) -> str:
    """Return the folder where torch stores compiled extensions: the folder that the user's
    environment names, else a temporary one.

    Raises `BridgeError` for a lock that a killed build left in that folder, because a process that
    needs this build would wait for ever.
    """
    folder = os.environ.get(BUILDS)
    if not folder:
        return stack.enter_context(tempfile.TemporaryDirectory())
    locks = [
        lock for lock in Path(folder).glob("**/lock") if time.time() - lock.stat().st_mtime > STALE
    ]
    BridgeError.raise_if(
        f"{lock}: a killed build left this lock, and the next build would wait for it; remove the "
        "file"
        for lock in locks
    )
    return folder


def _start_ranks(
    order: Order, environment: Mapping[str, str], own: IO[str]
) -> subprocess.Popen[str]:
    # Entries that mean the current directory go: no file of the user's may be imported in place of ours. The exception is a
    # checkout that is not installed, from which this process imports too; it is named in full.
    folders = [
        entry
        for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if os.path.isabs(entry)
    ]
    home = str(Path(bridge.__file__).parents[1])
    in_path = home in map(os.path.abspath, sys.path)
    path = [*folders, home] if home == os.getcwd() and in_path and home not in folders else folders
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "bridge.verify.forked_job", order.text()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=own,
        encoding=ENCODING,
        errors="replace",
        pass_fds=(*order.words, order.said),
        env={
            **os.environ,
            **environment,
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONIOENCODING": ENCODING,
        },
    )


def _rank_environment(number: int) -> Mapping[str, str]:
    """Return the environment that torchrun would set for all ranks.

    Messages go over the loopback, and the machine's cores are divided among the ranks.
    """
    # Gloo would take the interface that the host's name stands for.
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // number))
    return {
        "WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": threads,
        **({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        # Port 0 asks for a free one. Another process may take it before rank 0 does; then the start fails.
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_ranks(process: subprocess.Popen[str]) -> None:
    """End the process from which the ranks were forked, and with it the ranks."""
    process.terminate()
    process.wait()
    if process.stdout:
        process.stdout.close()


def _last_line(words: IO[str]) -> str:
    words.seek(0)
    own, *_ = re.split(LEAKS, words.read(), maxsplit=1, flags=re.MULTILINE)
    return " | ".join(own.strip().splitlines()[-TAIL:])
