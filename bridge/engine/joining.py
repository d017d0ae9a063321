"""Joins the group of the ranks that a launcher describes."""

from __future__ import annotations

from bridge.engine import comm, device
from bridge.engine.environment import Environment


def join(here: Environment) -> None:
    """Join the process group that a launcher describes, over the library for this rank's device."""
    comm.connect(here.rank, here.world, here.address, device.backend(device.local(here.local_rank)))
