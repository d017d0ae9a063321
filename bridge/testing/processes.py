"""Runs programs and ends them with all their child processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


def _listen() -> None:
    """Reset signal handling.

    A background program ignores some signals, and a shell cannot trap ignored signals.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def run(
    command: Sequence[str],
    seconds: float,
    environment: Mapping[str, str],
    folder: Path | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program in a new session, and afterwards kill all processes of that session.

    Raises `subprocess.TimeoutExpired`.
    """
    # A script may leave programs in the background; they belong to its session, and end with it.
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=folder,
        start_new_session=True,
        # With a function to call, the whole of this process is copied for each program.
        preexec_fn=_listen if any(signal.getsignal(n) == signal.SIG_IGN for n in SIGNALS) else None,
    ) as job:
        try:
            _, errors = job.communicate(timeout=seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, job.returncode, b"", errors)
