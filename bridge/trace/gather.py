"""Gathering: small tensors and texts of every rank of a group are sent to all ranks of the group."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bridge.engine.comm import Comm, Group


def gather_tensor(comm: Comm, name: str, tensor: Tensor, group: Group) -> Tensor:
    """Return the tensors that the ranks of a group passed to this call, as one tensor (ranks, ...)
    on the device of this rank's tensor. `name` is the name under which the collective is counted.
    """
    if group.size == 1:
        return tensor[None]
    own = tensor.reshape(-1).contiguous()
    # NCCL sends the memory of GPUs only.
    own = own.cuda() if dist.get_backend(group.handle) == "nccl" else own
    whole = own.new_empty(group.size, *tensor.shape)
    comm.all_gather(name, whole.view(-1), own, group)()
    return whole.to(tensor.device)


def gather_values(comm: Comm, name: str, value: Any, group: Group) -> list[Any]:
    """Return the values that the ranks of a group passed to this call, in the order of the ranks.
    They are sent as JSON.
    """
    raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    # Lengths first: a gather takes as much from each rank.
    sizes = gather_tensor(comm, name, torch.tensor([len(raw)]), group).view(-1).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(raw)] = raw
    rows = gather_tensor(comm, name, padded, group)
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)]
