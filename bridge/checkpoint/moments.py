"""Moments that no run of Adam can have: a check that detects swapped files in formats without
checksums.

Adam's first moment is m = (1 - b1) * sum(b1^k * g_k), its second v = (1 - b2) * sum(b2^k * g_k^2),
over the same gradients. By the inequality of Cauchy and Schwarz, m^2 <= K * v in every element,
with K = (1 - b1)^2 / (1 - b2) * sum((b1^2 / b2)^k).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bridge.checkpoint.hub import Hub, Parameter, loss_finding
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect

FIRST, SECOND, LARGEST = "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
SAMPLE = 2**16
"""Number of elements of each parameter that are checked, from its beginning."""
ROUNDING, TINY = 1.05, 1e-30
"""Factor by which rounding in fp32 may increase m^2; and limit of m^2 below which nothing is
checked, because v may be too small for fp32.
"""


def find_impossible(hub: Hub) -> Iterator[Finding]:
    """Yield a finding for each parameter whose two moments cannot come from one run of Adam with
    the betas in the checkpoint.
    """
    settings = {name: group.settings for group in hub.groups for name in group.names}
    for name, parameter in hub.trainable_parameters.items():
        limit = _moment_bound(parameter, settings.get(name, hub.settings), hub.where.steps)
        if limit is not None and (times := _ratio_to_bound(parameter, limit)) > 1:
            yield loss_finding(
                f"moments.{name}",
                f"{FIRST} is up to {times**0.5:.3g} times the largest value that Adam can reach with this "
                f"{SECOND}: one of the two moments is of another parameter or run, or the betas changed; the "
                "loss may jump in a run that resumes from this checkpoint",
                Effect.NUMBERS,
            )


def _moment_bound(
    parameter: Parameter, settings: Mapping[str, Any], steps: int | None
) -> float | None:
    """Return the bound K for the number of updates that a parameter's moments have seen. Return
    None if they are not moments of Adam in fp32, or if the betas or the number of updates
    are unknown.
    """
    kinds, betas = set(parameter.moments), settings.get("betas")
    if kinds - {LARGEST} != {FIRST, SECOND} or any(
        parameter.moments[kind].dtype != "F32" for kind in kinds
    ):
        return None
    step = steps if parameter.step is None else parameter.step
    if not isinstance(betas, list | tuple) or len(betas) != 2 or step is None or step < 1:
        return None
    # Adam's betas are below 1; with second == 0 the bound would divide by zero.
    first, second = betas
    if not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas) or second == 0:
        return None
    ratio = first**2 / second
    if ratio >= 1:
        return None  # the sum has no end: every pair of moments is possible
    return float((1 - first) ** 2 / (1 - second) * (1 - ratio**step) / (1 - ratio))


def _ratio_to_bound(parameter: Parameter, limit: float) -> float:
    """Return the largest m^2 / (K * v) in the checked elements, after the share that rounding
    explains is taken off; `limit` is K. The result is infinite if v is 0 in an element in which m
    is not 0.
    """
    import torch

    count = min(SAMPLE, parameter.weight.count)
    first, second = (parameter.moments[kind].flat(0, count).double() for kind in (FIRST, SECOND))
    square = first.square()
    ratio = torch.where(square > TINY, square / (ROUNDING * limit * second.clamp(min=0)), 0.0)
    return float(ratio.max()) if ratio.numel() else 0.0
