"""Adaptive updates: what rounding of gradients does to weights that Adam updates by them, worked out from the logs of both runs.

Adam divides each element of a gradient by its own usual size, so that rounding, small beside the largest elements, decides
where the smallest go. How far is known: both runs log their gradients, so both updates can be computed.
"""

from __future__ import annotations

import math
from ast import literal_eval
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bridge.errors import SourceError

Key = tuple[str, str]
"""Layer and parameter."""

SURE = 2.0
"""How many times more than computed the updates may be apart: clipping and a rate of its own are not in the logs."""


@dataclass
class Followed:
    """The samples of one parameter, those of both runs (2, samples): weights as logged last, and Adam's moments, computed.

    `explained` is how far rounding of gradients may have carried each weight apart; `noise` how far the gradients of the step
    that runs are apart as a share of their `size`, None before they are known; `matters` their size beside that of others.
    """

    weights: Tensor
    first: Tensor
    second: Tensor
    explained: Tensor
    steps: int = 0
    noise: float | None = None
    size: float = 0.0
    matters: float = 1.0

    @classmethod
    def of(cls, weights: Tensor) -> Followed:
        """Before the first update."""
        return cls(weights, torch.zeros_like(weights), torch.zeros_like(weights), torch.zeros_like(weights[0]))


@dataclass
class Updates:
    """Follows the updates of two runs whose optimizer has these settings. `drift` is how far apart, as a share of their size,
    rounding may have carried the weights before the step that runs; None once the logs have no samples to tell it from.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decay: float = 0.0
    drift: float | None = 0.0
    _step: float = 0.0
    _followed: dict[Key, Followed] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Updates:
        """From a run's settings: a plan's, or the first group of a torch optimizer."""

        def setting(name: str, default: Any) -> Any:
            found = next((settings[key] for key in (f"optimizer.{name}", f"group 0.{name}") if key in settings), None)
            if found is None and name == "betas" and "optimizer.adam_beta1" in settings:
                found = tuple(float(settings[f"optimizer.adam_beta{number}"]) for number in (1, 2))
            found = settings.get(f"optimizer.adam_{name}") if found is None else found
            found = literal_eval(found) if isinstance(found, str) else found
            return default if found is None else found

        try:
            first, second = setting("betas", cls.betas)
            return cls((float(first), float(second)), float(setting("eps", cls.eps)), float(setting("weight_decay", cls.decay)))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
            raise SourceError(f"run.json: settings of the optimizer are no numbers ({error}); it is damaged") from None

    def begin(self, key: Key, weights: Tensor | None) -> None:
        """The weights (2, samples) before the first update."""
        if weights is not None:
            self._followed[key] = Followed.of(weights)

    def gradient(self, key: Key, gradients: Tensor | None, noise: float, scale: float) -> None:
        """The gradients (2, samples) of a step, which are `noise` apart, as a share of their size; that of others is `scale`."""
        followed = self._followed.get(key)
        if followed is None or gradients is None or followed.weights.shape != gradients.shape:
            return
        followed.steps += 1
        followed.noise, followed.size = noise, _rms(gradients)
        followed.matters = min(1.0, followed.size / max(scale, TINY))
        followed.first = torch.lerp(gradients, followed.first, self.betas[0])
        followed.second = torch.lerp(gradients.square(), followed.second, self.betas[1])

    def weight(self, key: Key, weights: Tensor | None, scale: float) -> Tensor | None:
        """How far apart rounding may have carried each of these weights (2, samples); that of others is `scale`."""
        followed = self._followed.get(key)
        if followed is None or weights is None or followed.weights.shape != weights.shape:
            self.drift = None
            return None
        change, followed.weights = weights - followed.weights, weights
        if followed.noise is None:
            self.drift = None if change.any() else self.drift
            return followed.explained
        steps = self._steps(followed, weights - change)
        rate = abs(float((steps * change).sum())) / max(float(steps.square().sum()), TINY)
        spread = SURE * rate * (steps[0] - steps[1]).abs()
        followed.explained = followed.explained + spread
        beyond = _beyond_samples(followed, self.eps) * _rms(change)
        self._step = max(self._step, followed.matters * max(_rms(spread), beyond) / max(_rms(weights), scale, TINY))
        followed.noise = None
        return followed.explained

    def end(self) -> None:
        """The step is over: steps carry weights apart in directions of their own."""
        self.drift = None if self.drift is None else math.hypot(self.drift, self._step)
        self._step = 0.0

    def _steps(self, followed: Followed, weights: Tensor) -> Tensor:
        """What the optimizer takes off the weights, but for its rate."""
        moments = zip((followed.first, followed.second), self.betas, strict=True)
        first, second = (moment / (1 - beta**followed.steps) for moment, beta in moments)
        return first / (second.sqrt() + self.eps) + self.decay * weights


def _beyond_samples(followed: Followed, eps: float) -> float:
    """How far apart the updates of all elements may be as a share of their size, those included that no sample shows.

    A first update is nearly the sign of its gradient: of elements spread around 0, a share of about `noise` is smaller than its
    own rounding and goes anywhere, unless `eps` is larger still. Later ones are tame: few elements are small in all steps.
    """
    if followed.steps > 1 or followed.noise is None:
        return 0.0
    return min(2 * math.sqrt(followed.noise), followed.noise * math.sqrt(followed.size / max(eps, TINY)))


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


TINY = 1e-300
"""Instead of a divisor of 0."""
