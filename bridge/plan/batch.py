"""The one solver of the batch triangle: global = micro x accumulation x data."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Triangle:
    """Sequences per microbatch, microbatches per step, sequences per step, and data ranks. A number
    that is not known is None.
    """

    micro: int | None
    accumulation: int | None
    global_: int | None
    data: int | None

    def __str__(self) -> str:
        def word(value: int | None) -> str:
            return "?" if value is None else str(value)

        return (
            f"global ({word(self.global_)}) = micro ({word(self.micro)}) x "
            f"accumulation ({word(self.accumulation)}) x data ({word(self.data)})"
        )


def solve(
    micro: int | None, accumulation: int | None, global_: int | None, data: int | None
) -> Triangle:
    """Compute the one number that the others determine. Raise `ConfigError` if the numbers
    contradict each other or do not divide. If fewer than three of the four numbers are known, the
    rest stays None.
    """
    sides = Triangle(micro, accumulation, global_, data)
    if global_ is None:
        if micro is None or accumulation is None or data is None:
            return sides
        return Triangle(micro, accumulation, micro * accumulation * data, data)
    factors = [side for side in (micro, accumulation, data) if side is not None]
    if len(factors) < 2:
        return sides
    return _quotient(sides, factors)


def _quotient(sides: Triangle, factors: list[int]) -> Triangle:
    assert sides.global_ is not None
    product = 1
    for side in factors:
        product *= side
    # The known factors must divide the global batch. The quotient is the missing factor; it is 1 if
    # none is missing.
    rest, remainder = divmod(sides.global_, product)
    if remainder or rest == 0 or (len(factors) == 3 and rest != 1):
        raise ConfigError(
            f"batch: the equation {sides} does not hold; make the global batch a multiple of {product}"
        )
    if len(factors) == 3:
        return sides
    return Triangle(
        rest if sides.micro is None else sides.micro,
        rest if sides.accumulation is None else sides.accumulation,
        sides.global_,
        rest if sides.data is None else sides.data,
    )
