"""Programs that are ended with all that they have started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


def _listen() -> None:
    """A shell cannot trap what was ignored when it started, as a program does that runs in the background."""
    for heard in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(heard, signal.SIG_DFL)


def run(
    command: Sequence[str], seconds: float, environment: Mapping[str, str], folder: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a program in a session of its own, of which nothing is left; raises `subprocess.TimeoutExpired`."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=folder,
        start_new_session=True,
        preexec_fn=_listen,
    ) as job:
        try:
            _, errors = job.communicate(timeout=seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, job.returncode, b"", errors)
