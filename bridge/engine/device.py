"""The device of a rank, in one place: which one it is, its communication library, and its random
generator.
"""

from __future__ import annotations

import torch

from bridge.errors import ConfigError


def local(local_rank: int, device: str | torch.device | None = None) -> torch.device:
    """Return the device of the rank with this local rank, with its index, and make it torch's
    current device.

    Without `device`, or with one that has no index, an accelerator is the one that the script has
    made current, or else the one whose index is the local rank. A rank that sees a single device
    takes it, because launchers may show each rank a device of its own.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type != "cuda":
        return place
    if str(place) == "cuda":
        place = torch.device("cuda", torch.cuda.current_device() or _index(local_rank))
    # Streams, generators, NCCL's collectives of objects and `tensor.cuda()` all ask for the current
    # device.
    torch.cuda.set_device(place)
    return place


def backend(device: torch.device | None = None) -> str:
    """Return the communication library for tensors on `device` (default: on an accelerator, if
    there is one).
    """
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    return "nccl" if on_gpu else "gloo"


def generator(device: torch.device) -> torch.Generator | None:
    """Return torch's random generator of an accelerator, or None for a CPU, which has only the
    default one.
    """
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if str(device) == "cuda" else device.index
    torch.cuda.init()  # type: ignore[no-untyped-call]  # before, there are no generators
    default: torch.Generator = torch.cuda.default_generators[index]
    return default


def _index(local_rank: int) -> int:
    count = torch.cuda.device_count()
    if local_rank >= count > 1:
        raise ConfigError(
            f"LOCAL_RANK: found {local_rank}, but this machine has {count} devices; start at most"
            f" {count} ranks on each machine"
        )
    return 0 if count == 1 else local_rank
