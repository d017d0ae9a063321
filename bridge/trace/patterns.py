"""Patterns: what the difference of two tensors looks like, in words that claim no more than the numbers say."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

CLOSE = 1e-2
"""How near a scaled copy has to come, as a share, to be called one."""


def cause(values: Tensor, others: Tensor, ratios: Mapping[str, float], phase: str = "") -> str:
    """What the difference looks like, in words: A's `values` against B's, in that phase of a step."""
    norm = float(others.norm())
    if not norm or not float(values.norm()):
        return "A is all zeros" if norm else "B is all zeros"
    factor, rest = scaled(values, others)
    if rest <= CLOSE and abs(factor - 1) > rest:
        return _factor(factor, ratios if phase != "update" else {})
    if torch.allclose(values.sort().values, others.sort().values, rtol=1e-6, atol=0):
        return "the same values in another order: swapped microbatches or samples"
    alike = float(values @ others) / (norm * float(values.norm()))
    return f"cosine {alike:.4g}" + ("" if alike > 0.5 else ": unrelated values")


def scaled(values: Tensor, others: Tensor) -> tuple[float, float]:
    """The factor by which A's values are nearest to B's, and what it leaves of them, as a share."""
    factor = float(values @ others) / max(float(others @ others), TINY)
    return factor, float((values - factor * others).norm()) / max(float(values.norm()), TINY)


TINY = 1e-300
"""Instead of a divisor of 0."""


def _factor(factor: float, ratios: Mapping[str, float]) -> str:
    for what, size in ratios.items():
        for wanted, words in ((size, f"the number of {what}"), (1 / size, f"one over the number of {what}")):
            if abs(factor - wanted) <= CLOSE * wanted:
                return f"A is {factor:.6g} times B: {words}"
    return f"A is {factor:.6g} times B"
