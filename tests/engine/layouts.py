"""Every legal layout of up to four ranks, and a sample of them in which every pair of settings meets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

BUFFERS = (1, 2, None)
MESHES = [(1, 1, False), (2, 1, False), (4, 1, False)] + [
    (data, tensor, sequence) for data, tensor in ((1, 2), (2, 2), (1, 4)) for sequence in (False, True)
]
"""Data ranks, tensor ranks, and whether tokens are split."""
AXES: Mapping[str, Sequence[Any]] = {
    "mesh": MESHES,
    "level": (0, 1, 2, 3),
    "weight buffers": BUFFERS,
    "gradient buffers": BUFFERS,
    "accumulation": (1, 4),
    "recompute": (False, True),
}
"""All settings; a level of ZeRO says how many buffers there are where nothing else does (None)."""
OPTIMIZERS: Mapping[str, tuple[Mapping[str, Any], float]] = {
    "sgd": ({"optimizer.name": "sgd", "optimizer.lr": 0.3}, 1e-9),
    "adamw": ({"optimizer.name": "adamw", "optimizer.lr": 0.01, "optimizer.eps": 1e-4, "optimizer.weight_decay": 0.1}, 1e-7),
}
"""Plan values of each optimizer, and how far its runs may be from one process."""

Setting = tuple[Any, ...]


def everything() -> Iterator[Setting]:
    """All combinations."""
    yield from product(*AXES.values())


def pairwise() -> list[Setting]:
    """Few combinations, in which every two values of two axes occur together."""
    rest, missing = list(everything()), {pair for setting in everything() for pair in _pairs(setting)}
    found = []
    while missing:
        best = max(rest, key=lambda setting: len(missing & _pairs(setting)))
        missing -= _pairs(best)
        found.append(best)
    return found


def _pairs(setting: Setting) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    return set(combinations(enumerate(setting), 2))


def world_of(setting: Setting) -> int:
    """Ranks of a setting."""
    data, tensor, _ = setting[0]
    return int(data * tensor)


def values_of(setting: Setting, optimizer: str) -> dict[str, Any]:
    """Plan values of a setting, in float64."""
    (_, tensor, sequence), level, weights, grads, accumulation, recompute = setting
    return {
        "precision.compute": "fp64",
        **OPTIMIZERS[optimizer][0],
        "parallel.tensor": tensor,
        "parallel.sequence": sequence,
        "zero.stage": level,
        "zero.weight_buffers": weights,
        "zero.grad_buffers": grads,
        "batch.accumulation": accumulation,
        "recompute.granularity": "full" if recompute else "none",
    }
