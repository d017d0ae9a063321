"""Indices of this rank among the pipeline, tensor and data ranks, under the names of
Merak/core/mpu/initialize.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bridge.engine import comm
from bridge.errors import BridgeError
from bridge.layout.mesh import Mesh
from bridge.translation.lift import lift
from compat.merak.dialect import DIALECT
from compat.merak.runtime.launch import sizes

AXES = {"data": "data", "model": "tensor", "pipe": "pipeline"}
"""The engine's name for each of Merak's axes."""


def place(axis: str) -> tuple[int, int]:
    """Return this rank's index along an axis, and the number of ranks along this axis."""
    rank, world = comm.rank_and_world() or (0, 1)
    mesh = Mesh.of(lift(DIALECT.read({"init": sizes()}, None, world)).parallel, world)
    return mesh.coordinate(rank, axis), mesh.sizes[axis]


def get_sequence_parallel_rank() -> int:
    """Return the index along the sequence axis: 0, because each rank has whole sequences."""
    return 0


def get_sequence_parallel_world_size() -> int:
    """Return the size of the sequence axis: 1, because each rank has whole sequences."""
    return 1


def is_pipeline_first_stage() -> bool:
    """Return whether this rank has the first stage."""
    return place("pipeline")[0] == 0


def is_pipeline_last_stage() -> bool:
    """Return whether this rank has the last stage."""
    at, number = place("pipeline")
    return at == number - 1


def _rank(axis: str) -> int:
    return place(axis)[0]


def _number(axis: str) -> int:
    return place(axis)[1]


def _no_group(name: str) -> None:
    raise BridgeError(
        f"mpu.{name}: the engine has its own process groups; use trainer.engine.comm, or"
        " torch.distributed"
    )


def __getattr__(name: str) -> Any:
    """Return a function such as `get_data_parallel_rank`."""
    kind, _, what = name.removeprefix("get_").partition("_parallel_")
    readers = {"rank": _rank, "world_size": _number}
    if what == "group":
        return partial(_no_group, name)
    if kind not in AXES or what not in readers:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(readers[what], AXES[kind])
