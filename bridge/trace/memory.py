"""Memory: the bytes that a process has allocated on a device."""

from __future__ import annotations

import resource
import sys

import torch
from torch import Tensor


def memory_bytes(device: torch.device) -> Tensor:
    """Return four numbers of bytes as fp64: allocated now, the peak of these since the last call,
    reserved now, and the peak of these since the last call.

    Torch does not count the memory of a CPU. There, all four numbers are the peak of the whole
    process so far.
    """
    if device.type != "cuda":
        unit = 1 if sys.platform == "darwin" else 2**10
        return torch.full(
            (4,),
            float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit),
            dtype=torch.float64,
        )
    used = (
        torch.cuda.memory_allocated(device),
        torch.cuda.max_memory_allocated(device),
        torch.cuda.memory_reserved(device),
        torch.cuda.max_memory_reserved(device),
    )
    torch.cuda.reset_peak_memory_stats(device)
    return torch.tensor(used, dtype=torch.float64)
