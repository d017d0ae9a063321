"""`deepspeed.comm`: the functions of torch.distributed under DeepSpeed's names, in the process
group of the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh

from bridge.engine import comm, device
from bridge.engine.environment import detect
from bridge.errors import BridgeError

SAME = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_reduce_coalesced", "all_to_all",
    "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list",
    "destroy_process_group", "gather", "irecv", "is_available", "is_initialized", "isend", "monitored_barrier",
    "new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip
"""Functions of torch.distributed that DeepSpeed has too. DeepSpeed's versions have further
arguments for logging; these arguments are accepted and ignored.
"""
PORT = 29500
LOGGED = ("prof", "log_name", "debug")

__all__ = [
    *SAME, "P2POp", "ReduceOp", "ProcessGroup", "TorchBackend", "allgather_fn", "configure",
    "get_all_ranks_from_group", "get_global_rank", "get_local_rank", "get_rank", "get_world_group", "get_world_size",
    "has_all_gather_into_tensor", "has_all_reduce_coalesced", "has_coalescing_manager", "has_reduce_scatter_tensor",
    "inference_all_reduce", "init_distributed", "initialize_mesh_device", "log_summary",
    "reduce_scatter_fn", "set_backend",
]  # fmt: skip
P2POp, ProcessGroup = torch_distributed.P2POp, torch_distributed.ProcessGroup


def _same(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(torch_distributed, name)

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return function(
            *arguments, **{key: value for key, value in keywords.items() if key not in LOGGED}
        )

    return call


globals().update({name: _same(name) for name in SAME})
inference_all_reduce = _same("all_reduce")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group that the launcher's environment variables describe, as
    `deepspeed.init_distributed` does; a single rank makes a group of itself. Does nothing if this
    process has already joined a group, or if `dist_init_required` is False.
    """
    if comm.rank_and_world() is not None or dist_init_required is False:
        return
    environment = detect()
    address = (init_method or f"tcp://{environment.address}").removeprefix("tcp://")
    environment = replace(
        environment,
        address=address,
        rank=max(rank, environment.rank),
        world=max(world_size, environment.world),
    )
    backend = dist_backend or device.backend(device.local(environment.local_rank))
    comm.connect(
        environment.rank,
        environment.world,
        environment.address,
        backend,
        timeout.total_seconds() if timeout else None,
        alone=True,
    )


class TorchBackend:
    """DeepSpeed's wrapper of torch.distributed."""

    def get_all_gather_function(self) -> Callable[..., Any]:
        """Return torch's function that gathers the tensors of all ranks into one tensor."""
        return torch_distributed.all_gather_into_tensor

    def get_reduce_scatter_function(self) -> Callable[..., Any]:
        """Return torch's function that reduces a tensor over the ranks and gives each rank a part
        of the result.
        """
        return torch_distributed.reduce_scatter_tensor


def _needs_group(name: str) -> None:
    if not torch_distributed.is_initialized():
        raise BridgeError(
            f"deepspeed.comm.{name}: there is no process group; call deepspeed.init_distributed()"
            " first"
        )


def get_rank(group: Any = None) -> int:
    """Return this process's rank in a group."""
    _needs_group("get_rank")
    return torch_distributed.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks in a group."""
    _needs_group("get_world_size")
    return torch_distributed.get_world_size(group)


def get_local_rank() -> int:
    """Return this process's rank on its machine."""
    _needs_group("get_local_rank")
    return int(os.environ.get("LOCAL_RANK", 0))


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the global rank of the process that has rank `group_rank` in a group."""
    return group_rank if group is None else torch_distributed.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the global ranks of the processes in a group."""
    return torch_distributed.get_process_group_ranks(group or torch_distributed.group.WORLD)


def get_world_group() -> Any:
    """Return the group of all ranks."""
    _needs_group("get_world_group")
    return torch_distributed.group.WORLD


def initialize_mesh_device(mesh_shape: Any, mesh_dim_names: Any) -> Any:
    """Return a device mesh: all ranks as a grid with named dimensions."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(kind, mesh_shape, mesh_dim_names=mesh_dim_names)


def allgather_fn(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
    debug: Any = None,
) -> Any:
    """Gather into one tensor."""
    return torch_distributed.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def reduce_scatter_fn(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **_: Any,
) -> Any:
    """Reduce a tensor over the ranks and give each rank a part of the result."""
    return torch_distributed.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


def has_all_gather_into_tensor() -> bool:
    """Return True, because torch has the function all_gather_into_tensor."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_coalescing_manager = (
    has_all_gather_into_tensor
)


def set_backend() -> None:
    """Do nothing, because there is only one backend."""


def configure(*_: Any, **__: Any) -> None:
    """Do nothing, because the engine itself counts collectives (`engine.native.comm.ledger`)."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> Any:
    """Raise `BridgeError`, because the engine itself counts collectives."""
    raise BridgeError(
        "deepspeed.comm.log_summary: the engine counts collectives itself; see engine.native.comm.ledger"
    )
