"""`deepspeed.utils.groups`: process groups of the data axis and of the sequence axis."""

from __future__ import annotations

from typing import Any

import torch.distributed as torch_distributed

from bridge.errors import BridgeError

__all__ = [
    "_get_data_parallel_group", "_get_data_parallel_rank", "_get_data_parallel_world_size", "_get_sequence_parallel_group",
    "_get_sequence_parallel_rank", "_get_sequence_parallel_world_size",
]  # fmt: skip


def _get_data_parallel_group() -> Any:
    """Return the group of all ranks. DeepSpeed returns this group too if a script makes no groups."""
    return torch_distributed.group.WORLD


def _get_data_parallel_rank() -> int:
    return torch_distributed.get_rank()


def _get_data_parallel_world_size() -> int:
    return torch_distributed.get_world_size()


def _get_sequence_parallel_group() -> Any:
    raise BridgeError(
        "deepspeed.utils.groups: the native engine has no sequence axis; leave sequence_parallel_size at 1"
    )


def _get_sequence_parallel_rank() -> int:
    return 0


def _get_sequence_parallel_world_size() -> int:
    return 1
