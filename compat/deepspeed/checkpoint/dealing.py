"""The order of parameters in DeepSpeed's flat groups under `round_robin_gradients`, which assigns
parameters to ranks in turn (stage_1_and_2.py: _round_robin_reorder).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def deals_parameters(config: Any) -> bool:
    """Return whether a config assigns parameters to ranks in turn, so that a flat group does not
    have the model's order.
    """
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return isinstance(zero, Mapping) and zero.get("round_robin_gradients") is True


def deal_names(names: Sequence[str], ranks: int) -> tuple[str, ...]:
    """Return the parameter names of a group in the order of its flat tensor under
    `round_robin_gradients`: names 0, `ranks`, 2 * `ranks`, ..., then names 1, `ranks` + 1, ..., and
    so on.
    """
    return tuple(names[number] for number in _order(len(names), ranks))


def collect_names(names: Sequence[str], ranks: int) -> tuple[str, ...]:
    """Return the parameter names of a flat tensor in the order of the model. This is the inverse of
    `deal_names`.
    """
    places = dict(zip(_order(len(names), ranks), names, strict=True))
    return tuple(places[number] for number in range(len(names)))


def _order(count: int, ranks: int) -> list[int]:
    return [number for first in range(ranks) for number in range(first, count, ranks)]
