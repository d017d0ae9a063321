"""The one solver of the batch triangle: global = micro x accumulation x data."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Triangle:
    """Sequences per microbatch, microbatches per step, sequences per step, and data ranks; None is open."""

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


def solve(micro: int | None, accumulation: int | None, global_: int | None, data: int | None) -> Triangle:
    """Fill in the one side that the others determine; raise `ConfigError` if they contradict each other or do not divide.

    With fewer than three of the four sides known the rest stays open.
    """
    sides = Triangle(micro, accumulation, global_, data)
    if global_ is None:
        return _product(sides)
    known = [side for side in (micro, accumulation, data) if side is not None]
    if len(known) < 2:
        return sides
    return _quotient(sides, known)


def _product(sides: Triangle) -> Triangle:
    if sides.micro is None or sides.accumulation is None or sides.data is None:
        return sides
    return Triangle(sides.micro, sides.accumulation, sides.micro * sides.accumulation * sides.data, sides.data)


def _quotient(sides: Triangle, known: list[int]) -> Triangle:
    assert sides.global_ is not None
    product = 1
    for side in known:
        product *= side
    rest, remainder = divmod(sides.global_, product)
    if remainder or rest == 0 or (len(known) == 3 and rest != 1):
        raise ConfigError(f"batch: {sides} does not hold; make the global batch a multiple of {product}")
    if len(known) == 3:
        return sides
    return Triangle(
        rest if sides.micro is None else sides.micro,
        rest if sides.accumulation is None else sides.accumulation,
        sides.global_,
        rest if sides.data is None else sides.data,
    )
