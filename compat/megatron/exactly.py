"""Products that come back: the number from which a division makes exactly the one that is wanted."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nextafter

STEPS = 3
"""Neighbours on each side that are looked at; a product and a division are each off by half a unit in the last place."""


def undone(guess: float, again: Callable[[float], float], wanted: float) -> float:
    """The number near `guess` from which `again` makes `wanted`, the shortest of them; `guess` if there is none."""
    near, above, below = [guess], guess, guess
    for _ in range(STEPS):
        above, below = nextafter(above, inf), nextafter(below, -inf)
        near += [above, below]
    return min((number for number in near if again(number) == wanted), key=lambda number: len(repr(number)), default=guess)
