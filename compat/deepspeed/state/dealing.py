"""The order of parameters under `round_robin_gradients`, which deals them out to ranks in turn
(stage_1_and_2.py: _round_robin_reorder).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def dealt_out(config: Any) -> bool:
    """Whether a config deals parameters out to ranks in turn. Flat groups are then not in the
    model's order.
    """
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return isinstance(zero, Mapping) and zero.get("round_robin_gradients") is True


def dealt(names: Sequence[str], ranks: int) -> tuple[str, ...]:
    """Names of a group in the order of its flat tensor: every `ranks`-th name from the first on,
    then from the second on, and so on.
    """
    return tuple(names[number] for number in _order(len(names), ranks))


def collected(names: Sequence[str], ranks: int) -> tuple[str, ...]:
    """Names of a flat tensor in the order of the group. The inverse of `dealt`."""
    places = dict(zip(_order(len(names), ranks), names, strict=True))
    return tuple(places[number] for number in range(len(names)))


def _order(count: int, ranks: int) -> list[int]:
    return [number for first in range(ranks) for number in range(first, count, ranks)]
