"""The order of parameters under `round_robin_gradients`: dealt out to ranks in turn (stage_1_and_2.py: _round_robin_reorder)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def dealt_out(config: Any) -> bool:
    """Whether a config has parameters dealt out to ranks in turn, so that flat groups are not in the model's order."""
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return isinstance(zero, Mapping) and zero.get("round_robin_gradients") is True


def dealt(names: Sequence[str], ranks: int) -> tuple[str, ...]:
    """Names of a group in the order of its flat tensor: every `ranks`-th from the first, then from
    the second, and so on.
    """
    return tuple(names[number] for number in _order(len(names), ranks))


def collected(names: Sequence[str], ranks: int) -> tuple[str, ...]:
    """The same the other way: names of a flat tensor in the order of the group."""
    places = dict(zip(_order(len(names), ranks), names, strict=True))
    return tuple(places[number] for number in range(len(names)))


def _order(count: int, ranks: int) -> list[int]:
    return [number for first in range(ranks) for number in range(first, count, ranks)]
