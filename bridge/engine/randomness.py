"""Randomness: seeds that follow from names and numbers, and a context after which torch's
generators are as before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b

import torch

from bridge.engine.device import generator


def seed_of(*parts: int | str) -> int:
    """Return a seed below 2**63 that depends on all `parts` and their order, and is the same on
    every machine.
    """
    # Python's own hash differs between processes. The zero byte keeps ("a", "bc") apart from ("ab",
    # "c").
    digest = blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


FIXED: Mapping[str, str] = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
"""Environment variables that make libraries compute products and reductions in a fixed order. The
libraries read them when they start.
"""


def determine() -> None:
    """From now on, make this process compute the same bits from the same inputs.

    Torch uses deterministic algorithms, and an operation without one raises an error. Reductions
    over ranks use one ring. Call this function before the first collective; it holds for the whole
    process.
    """
    for name, value in FIXED.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # Otherwise cuDNN times its algorithms and takes the fastest, which may be another one next
    # time.
    torch.backends.cudnn.benchmark = False


@contextmanager
def scope(device: torch.device) -> Iterator[None]:
    """Context after which torch's generators have the same state as before."""
    # torch.random.fork_rng does the same in several times the time, and every layer has a scope.
    own = generator(device)
    states = [(one, one.get_state()) for one in (torch.default_generator, own) if one is not None]
    try:
        yield
    finally:
        for one, state in states:
            one.set_state(state)


def reseed(seed: int, device: torch.device) -> None:
    """Seed torch's generators for `device`."""
    torch.default_generator.manual_seed(seed)
    # By the generator of this device: `torch.cuda.manual_seed` seeds that of the current one.
    own = generator(device)
    if own is not None:
        own.manual_seed(seed)
