"""Patterns: descriptions of the difference between two tensors that claim no more than the numbers
show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bridge.trace.segments import Floats, Segments

CLOSE = 1e-2
"""Largest relative distance at which a tensor counts as another tensor times a factor."""

SAME = 1e-6
"""Largest relative distance at which values count as equal."""


def causes(
    values: Floats,
    others: Floats,
    segments: Segments,
    ratios: Mapping[str, float],
    phases: Sequence[str] = (),
) -> list[str]:
    """Return a description of each tensor's difference between `values` of A and `others` of B, in
    one phase of a step. `segments` divides the elements into tensors.
    """
    with np.errstate(all="ignore"):
        norms, sizes = np.sqrt(segments.sums(values**2)), np.sqrt(segments.sums(others**2))
        product = segments.sums(values * others)
        # Least squares: the multiple of B that is nearest to A, and the share that it leaves.
        factors = product / np.maximum(sizes**2, TINY)
        rest = np.sqrt(
            segments.sums((values - segments.spread(factors) * others) ** 2)
        ) / np.maximum(norms, TINY)
        alike = product / (sizes * norms)
    same = _same(values, others, segments)
    # The same values whatever their order: each tensor's are sorted within its own segment.
    ours, theirs = (found[np.lexsort((found, segments.numbers))] for found in (values, others))
    again = _same(ours, theirs, segments)
    found = []
    rows = zip(
        norms.tolist(),
        sizes.tolist(),
        factors.tolist(),
        rest.tolist(),
        alike.tolist(),
        again.tolist(),
        strict=True,
    )
    for at, (norm, size, factor, left, cosine, other_order) in enumerate(rows):
        if not size or not norm:
            found.append("A is all zeros" if size else "B is all zeros")
        # A factor that is nearer to 1 than what it leaves says nothing.
        elif left <= CLOSE and abs(factor - 1) > left:
            # No update is reduced over ranks: that its factor is a number of ranks is chance.
            found.append(_factor(factor, {} if phases and phases[at] == "update" else ratios))
        elif phases and phases[at] == "update" and same[at]:
            found.append("equal in both runs: the difference is older than this update")
        elif other_order:
            found.append("the same values in another order: swapped microbatches or samples")
        else:
            found.append(f"cosine {cosine:.4g}" + ("" if cosine > 0.5 else ": unrelated values"))
    return found


def _same(values: Floats, others: Floats, segments: Segments) -> NDArray[np.bool_]:
    """Return whether each tensor is equal in both runs, up to rounding."""
    with np.errstate(all="ignore"):
        apart = ~((np.abs(values - others) <= SAME * np.abs(others)) | (values == others))
    found: NDArray[np.bool_] = segments.sums(apart.astype(np.float64)) == 0
    return found


def scaled(values: Tensor, others: Tensor) -> tuple[float, float]:
    """Return the factor that brings B's values nearest to A's values, and the distance that
    remains, as a share of A's norm.
    """
    factor = float(values @ others) / max(float(others @ others), TINY)
    return factor, float((values - factor * others).norm()) / max(float(values.norm()), TINY)


TINY = 1e-300
"""Divisor that replaces 0."""


def _factor(factor: float, ratios: Mapping[str, float]) -> str:
    for what, size in ratios.items():
        for wanted, words in (
            (size, f"the number of {what}"),
            (1 / size, f"one over the number of {what}"),
        ):
            if abs(factor - wanted) <= CLOSE * wanted:
                return f"A is {factor:.6g} times B: {words}"
    return f"A is {factor:.6g} times B"
