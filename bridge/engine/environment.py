"""The environment that a launcher sets: the rank and the number of ranks, from torchrun, the
deepspeed launcher or SLURM. Without a launcher there is a single rank.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Environment:
    """One process of those that a launcher started. `address` is the address of the process with
    rank 0, as host:port.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    address: str = ""
    launcher: str = "none"


def detect(variables: Mapping[str, str] | None = None) -> Environment:
    """Return the process that the environment `variables` describe (default: the environment of
    this process). Raises `ConfigError` if they are incomplete.
    """
    environ = os.environ if variables is None else variables
    # First torchrun: within a job of SLURM it starts several ranks in one task, and SLURM's
    # variables count tasks.
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _torch(environ)
    # A single task is a shell or a script in an allocation; it is no rank among others.
    if int(environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environ:
        return _slurm(environ)
    return Environment()


def local_rank(variables: Mapping[str, str] | None = None) -> int:
    """Return the number of this process on its machine, from whichever launcher set it, or 0."""
    environ = os.environ if variables is None else variables
    return int(environ.get("LOCAL_RANK") or environ.get("SLURM_LOCALID") or 0)


def neighbours() -> dict[int, int]:
    """Return the process ids of the ranks on this machine, by rank; empty on a system without
    /proc.
    """
    mine = os.environ.get("MASTER_PORT")
    processes = (
        ((_variables(path), int(path.name)) for path in Path("/proc").glob("[0-9]*"))
        if mine
        else ()
    )
    return {
        int(environ["RANK"]): number
        for environ, number in processes
        if environ.get("MASTER_PORT") == mine and environ.get("RANK")
    }


GRACE = 1.0
"""Seconds that a process may take to end after its connections were closed."""


def find_dead_ranks(processes: Mapping[int, int]) -> tuple[int, ...]:
    """Return the ranks in `processes` (process ids by rank) that have ended, or that end within
    `GRACE` seconds.
    """
    until = time.monotonic() + GRACE
    while True:
        # Z: ended, but its parent has not asked yet; X: dead.
        dead = tuple(
            rank for rank, number in sorted(processes.items()) if _state(number) in ("", "Z", "X")
        )
        if dead or time.monotonic() > until:
            return dead
        time.sleep(GRACE / 50)


def _variables(process: Path) -> dict[str, str]:
    """Return the environment with which a process was started, or an empty one if it cannot be
    read.
    """
    try:
        text = (process / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)


def _state(process: int) -> str:
    """Return the state of a process as a letter, as /proc shows it, or "" if there is no such
    process.
    """
    try:
        # The name of the program, in parentheses, may itself hold spaces and parentheses. The state
        # follows the last one.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _torch(variables: Mapping[str, str]) -> Environment:
    """Return the rank, the number of ranks and the address from the variables of torchrun. The
    deepspeed launcher sets the same variables, and some more.
    """
    launcher = (
        "torchrun"
        if "TORCHELASTIC_RUN_ID" in variables
        else "deepspeed"
        if "CROSS_RANK" in variables
        else "environment"
    )
    rank, world = _whole(variables, "RANK"), _whole(variables, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise ConfigError(
            f"RANK: found {rank}, expected 0 to WORLD_SIZE - 1 ({world - 1}); start with torchrun"
        )
    address = (
        f"{_text(variables, 'MASTER_ADDR')}:{_whole(variables, 'MASTER_PORT')}" if world > 1 else ""
    )
    return Environment(rank, world, int(variables.get("LOCAL_RANK", rank)), address, launcher)


def _slurm(variables: Mapping[str, str]) -> Environment:
    host = variables.get("SLURM_LAUNCH_NODE_IPADDR") or _first_host(
        _text(variables, "SLURM_NODELIST")
    )
    # All tasks have to choose the same port without a word between them; jobs that share a machine
    # should not choose the same.
    port = int(
        variables.get("MASTER_PORT", 20_000 + int(variables.get("SLURM_JOB_ID", "0")) % 20_000)
    )
    address = f"{variables.get('MASTER_ADDR', host)}:{port}"
    local = int(variables.get("SLURM_LOCALID", "0"))
    return Environment(
        _whole(variables, "SLURM_PROCID"),
        _whole(variables, "SLURM_NTASKS"),
        local,
        address,
        "slurm",
    )


def _first_host(nodes: str) -> str:
    """Return the first host of a SLURM list such as `a[03-07,9],b1`."""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    if match is None:
        raise ConfigError(
            f"SLURM_NODELIST: found {nodes!r}, expected a list of hosts; set MASTER_ADDR instead"
        )
    return match[1] + (match[2] or "")


def _text(variables: Mapping[str, str], name: str) -> str:
    if not variables.get(name):
        raise ConfigError(
            f"{name}: not set, although other variables of a launcher are set; start with torchrun or deepspeed"
        )
    return variables[name]


def _whole(variables: Mapping[str, str], name: str) -> int:
    text = _text(variables, name)
    if not text.isdecimal():
        raise ConfigError(
            f"{name}: found {text!r}, expected a whole number; start with torchrun or deepspeed"
        )
    return int(text)


def end_process(world: int) -> None:
    """End the process of a rank at once, after all output is written and the process group is left.

    Otherwise threads of gloo could abort the process at interpreter exit, and the launcher would
    report a failed job.
    """
    if world > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
