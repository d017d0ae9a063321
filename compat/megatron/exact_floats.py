"""Finds a float that a given function, such as a division, maps to exactly the wanted number."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nextafter

STEPS = 3
"""Number of neighbouring floats that are tried on each side.

Three suffice, because a product and a division each round by half a unit in the last place.
"""


def undone(guess: float, again: Callable[[float], float], target: float) -> float:
    """Return the float near `guess` that `again` maps to `target`. Of several such floats, it is
    the one with the shortest repr. Without such a float, return `guess`.
    """
    near, above, below = [guess], guess, guess
    for _ in range(STEPS):
        above, below = nextafter(above, inf), nextafter(below, -inf)
        near += [above, below]
    # The shortest is the one that a person would have written: 0.001, not 0.0010000000000000002.
    return min(
        (number for number in near if again(number) == target),
        key=lambda number: len(repr(number)),
        default=guess,
    )
