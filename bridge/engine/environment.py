"""The launcher's environment: rank and world from torchrun, the deepspeed launcher or SLURM; one process
without any.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from bridge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Environment:
    """One process among those that a launcher started; `address` is host:port of the first."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    address: str = ""
    launcher: str = "none"


def detect(variables: Mapping[str, str] | None = None) -> Environment:
    """What the environment `variables` (default: this process's) say. Raises `ConfigError` if they are
    incomplete.
    """
    found = os.environ if variables is None else variables
    if "RANK" in found or "WORLD_SIZE" in found:
        return _torch(found)
    if int(found.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in found:
        return _slurm(found)
    return Environment()


def _torch(found: Mapping[str, str]) -> Environment:
    """torchrun and the deepspeed launcher set the same variables; the latter adds its own."""
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in found else "deepspeed" if "CROSS_RANK" in found else "environment"
    rank, world = _whole(found, "RANK"), _whole(found, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise ConfigError(f"RANK: found {rank}, expected 0 to WORLD_SIZE - 1 ({world - 1}); start with torchrun")
    address = f"{_text(found, 'MASTER_ADDR')}:{_whole(found, 'MASTER_PORT')}" if world > 1 else ""
    return Environment(rank, world, int(found.get("LOCAL_RANK", rank)), address, launcher)


def _slurm(found: Mapping[str, str]) -> Environment:
    host = found.get("SLURM_LAUNCH_NODE_IPADDR") or _first_host(_text(found, "SLURM_NODELIST"))
    port = int(found.get("MASTER_PORT", 20_000 + int(found.get("SLURM_JOB_ID", "0")) % 20_000))
    address = f"{found.get('MASTER_ADDR', host)}:{port}"
    local = int(found.get("SLURM_LOCALID", "0"))
    return Environment(_whole(found, "SLURM_PROCID"), _whole(found, "SLURM_NTASKS"), local, address, "slurm")


def _first_host(nodes: str) -> str:
    """The first host of a SLURM list such as `a[03-07,9],b1`."""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    if match is None:
        raise ConfigError(f"SLURM_NODELIST: found {nodes!r}, expected a list of hosts; set MASTER_ADDR instead")
    return match[1] + (match[2] or "")


def _text(found: Mapping[str, str], name: str) -> str:
    if not found.get(name):
        raise ConfigError(f"{name}: not set, though other variables of a launcher are; start with torchrun or deepspeed")
    return found[name]


def _whole(found: Mapping[str, str], name: str) -> int:
    text = _text(found, name)
    if not text.isdecimal():
        raise ConfigError(f"{name}: found {text!r}, expected a whole number; start with torchrun or deepspeed")
    return int(text)
