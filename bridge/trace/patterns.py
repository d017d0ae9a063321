"""Patterns: descriptions of how a tensor of one run differs from that of another, such as a
constant factor. They claim no more than the numbers show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bridge.trace.segments import Floats, Segments

CLOSE = 1e-2
"""Largest relative distance at which a tensor still counts as a multiple of another tensor."""

SAME = 1e-6
"""Largest relative distance at which two values still count as equal."""


def pattern_causes(
    values: Floats,
    others: Floats,
    segments: Segments,
    ratios: Mapping[str, float],
    phases: Sequence[str] = (),
) -> list[str]:
    """Return for each tensor a description of the difference between its `values` in run A and its
    values in run B, `others`. `segments` are the ranges of the tensors in these arrays, `ratios`
    are numbers that may be a factor between the runs, by name, and `phases` are the phases of the
    tensors.
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
    same = _are_same(values, others, segments)
    # The same values whatever their order: each tensor's are sorted within its own segment.
    ours, theirs = (side[np.lexsort((side, segments.numbers))] for side in (values, others))
    again = _are_same(ours, theirs, segments)
    causes = []
    rows = zip(
        norms.tolist(),
        sizes.tolist(),
        factors.tolist(),
        rest.tolist(),
        alike.tolist(),
        again.tolist(),
        strict=True,
    )
    for at, (norm, size, factor, residual, cosine, other_order) in enumerate(rows):
        if not size or not norm:
            causes.append("A is all zeros" if size else "B is all zeros")
        # A factor that is nearer to 1 than what it leaves says nothing.
        elif residual <= CLOSE and abs(factor - 1) > residual:
            # No update is reduced over ranks: that its factor is a number of ranks is chance.
            causes.append(_factor_text(factor, {} if phases and phases[at] == "update" else ratios))
        elif phases and phases[at] == "update" and same[at]:
            causes.append(
                "this update is equal in both runs, so the weights differed before the update"
            )
        elif other_order:
            causes.append(
                "A has the values of B in another order: microbatches or samples are swapped"
            )
        else:
            causes.append(f"cosine {cosine:.4g}" + ("" if cosine > 0.5 else ": unrelated values"))
    return causes


def _are_same(values: Floats, others: Floats, segments: Segments) -> NDArray[np.bool_]:
    """Return for each tensor whether its values in both runs are equal up to rounding."""
    with np.errstate(all="ignore"):
        apart = ~((np.abs(values - others) <= SAME * np.abs(others)) | (values == others))
    result: NDArray[np.bool_] = segments.sums(apart.astype(np.float64)) == 0
    return result


def fit_factor(values: Tensor, others: Tensor) -> tuple[float, float]:
    """Return the factor with which `others` come nearest to `values`, and the distance that is
    left, divided by the norm of `values`.
    """
    factor = float(values @ others) / max(float(others @ others), TINY)
    return factor, float((values - factor * others).norm()) / max(float(values.norm()), TINY)


TINY = 1e-300
"""Divisor that replaces 0."""


def _factor_text(factor: float, ratios: Mapping[str, float]) -> str:
    for what, size in ratios.items():
        for ratio, inverse in ((size, ""), (1 / size, "one over ")):
            if abs(factor - ratio) <= CLOSE * ratio:
                return f"A is {factor:.6g} times B; this factor is {inverse}the number of {what}"
    return f"A is {factor:.6g} times B"
