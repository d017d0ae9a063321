"""Randomness: seeds that are functions of names and numbers, and a scope that leaves the global generators
alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch


def seed_of(*parts: int | str) -> int:
    """A seed below 2**63 that depends on every part and its place, the same on every machine."""
    digest = blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def scope(device: torch.device) -> Iterator[None]:
    """Put torch's generators back, on leaving, to where they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def reseed(seed: int, device: torch.device) -> None:
    """Start torch's generators for `device` at `seed`."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
