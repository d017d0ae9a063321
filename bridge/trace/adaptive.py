"""Adaptive updates: how far rounding in gradients may move the weights that Adam updates, computed
from the logs of two runs.

Adam divides each element of a gradient by the usual size of this element. Rounding is small
compared with the largest elements, but it may decide the direction in which the smallest elements
move. Both runs log their gradients, so the updates of both runs can be computed and compared.
"""

from __future__ import annotations

import math
from ast import literal_eval
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.errors import SourceError
from bridge.trace.segments import Floats, Segments

Key = tuple[str, str]
"""Layer and parameter."""

WITHOUT_MEAN = ("alpha", "rho", "lr_decay", "beta2_decay", "momentum_decay")
"""Settings that only torch's RMSprop, Adadelta, Adagrad, Adafactor and NAdam have. They divide the gradient itself and not its
running mean, NAdam for half of its update.
"""

SURE = 2.0
"""Safety factor on the computed distance between updates, because the logs do not show everything
that changes an update, such as clipping.
"""


@dataclass(frozen=True, eq=False)
class Batch:
    """The names of parameters whose sampled elements stand in one array, one parameter after the
    other. The array has a row for each of the two runs. `segments` are the ranges of the parameters
    in the array.
    """

    keys: tuple[Key, ...]
    segments: Segments


@dataclass(frozen=True, eq=False)
class Known:
    """The parameters that are both in a batch and in `Followed`. `rows` are their indices in the
    batch, and `given` the indices of their sampled elements there. `numbers` are their indices in
    `Followed`, and `at` the indices of their sampled elements there. `segments` are the ranges of
    the parameters in `given` and in `at`.
    """

    rows: NDArray[np.int64]
    given: NDArray[np.int64]
    numbers: NDArray[np.int64]
    at: NDArray[np.int64]
    segments: Segments


@dataclass
class Followed:
    """The parameters whose updates are computed, with their sampled elements, one parameter after
    the other. Arrays (2, samples) have a row for each run.

    `weights` are the weights as last logged. `first` and `second` are Adam's moments, computed from
    the gradients. `explained` (samples) is the distance between the two runs' weights that rounding
    of gradients may have caused. The other fields have one entry for each parameter: `steps` is the
    number of steps; `size` is the size of the gradient in this step; `noise` is the distance
    between the two runs' gradients, divided by `size` (NaN until it is known); `matters` is `size`
    divided by the usual size of gradients, at most 1.
    """

    segments: Segments = field(default_factory=lambda: Segments.of(()))
    places: dict[Key, int] = field(default_factory=dict)
    weights: Floats = field(default_factory=lambda: np.zeros((2, 0)))
    first: Floats = field(default_factory=lambda: np.zeros((2, 0)))
    second: Floats = field(default_factory=lambda: np.zeros((2, 0)))
    explained: Floats = field(default_factory=lambda: np.zeros(0))
    steps: Floats = field(default_factory=lambda: np.zeros(0))
    noise: Floats = field(default_factory=lambda: np.zeros(0))
    size: Floats = field(default_factory=lambda: np.zeros(0))
    matters: Floats = field(default_factory=lambda: np.zeros(0))
    _known: dict[int, tuple[Batch, Known]] = field(default_factory=dict)

    def begin(self, batch: Batch, weights: Floats) -> None:
        """Add the parameters of a batch before their first update. A parameter that was added
        before starts again without moments.
        """
        start, before = self.segments.size, len(self.segments.lengths)
        self.segments = Segments.of(
            (*self.segments.lengths.tolist(), *batch.segments.lengths.tolist())
        )
        # One that begins anew gets a new place; its old samples stay behind and are read no more.
        self.places |= {key: before + number for number, key in enumerate(batch.keys)}
        new_elements, more = self.segments.size - start, len(batch.keys)
        self.weights = np.concatenate([self.weights, weights], axis=1)
        self.first, self.second = (
            np.concatenate([old, np.zeros((2, new_elements))], axis=1)
            for old in (self.first, self.second)
        )
        self.explained = np.concatenate([self.explained, np.zeros(new_elements)])
        self.steps, self.size = (
            np.concatenate([old, np.zeros(more)]) for old in (self.steps, self.size)
        )
        self.noise = np.concatenate([self.noise, np.full(more, np.nan)])
        self.matters = np.concatenate([self.matters, np.ones(more)])
        # What was known of a batch names places of before.
        self._known.clear()

    def unchanged_parameters(self, batch: Batch) -> Known:
        """Return the parameters of `batch` that were added, and whose number of samples is still
        the same.
        """
        if id(batch) not in self._known:
            # The batch is kept with its answer, so that no other one gets its id.
            self._known[id(batch)] = batch, self._look(batch)
        return self._known[id(batch)][1]

    def _look(self, batch: Batch) -> Known:
        lengths = self.segments.lengths
        places = [self.places.get(key, -1) for key in batch.keys]
        pairs = zip(places, batch.segments.lengths.tolist(), strict=True)
        rows = np.array(
            [
                row
                for row, (place, size) in enumerate(pairs)
                if place >= 0 and lengths[place] == size
            ],
            np.int64,
        )
        numbers = np.array(places, np.int64)[rows]
        own = Segments.of(lengths[numbers].tolist())
        return Known(
            rows, batch.segments.elements(rows), numbers, self.segments.elements(numbers), own
        )


@dataclass
class Updates:
    """Computes the updates of two runs whose optimizers have these settings. `corrected` is true if
    the moments are divided by 1 - beta^count, as Adam's are and RMSprop's are not; `factored`, if
    the size of an element is that of its row and column, as Adafactor takes it. `drift` is the
    distance that rounding may have caused between the runs' weights before the current step,
    divided by the size of the weights. `drift` is None as soon as the logs lack samples that it
    depends on.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decay: float = 0.0
    corrected: bool = True
    factored: bool = False
    drift: float | None = 0.0
    _step: float = 0.0
    _followed: Followed = field(default_factory=Followed)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Updates:
        """Return an instance with the settings of a run. They are settings of a plan, or of the
        first parameter group of a torch optimizer.
        """

        def setting(name: str, default: Any) -> Any:
            value = next(
                (
                    settings[key]
                    for key in (f"optimizer.{name}", f"group 0.{name}")
                    if key in settings
                ),
                None,
            )
            if value is None and name == "betas" and "optimizer.adam_beta1" in settings:
                value = tuple(float(settings[f"optimizer.adam_beta{number}"]) for number in (1, 2))
            value = settings.get(f"optimizer.adam_{name}") if value is None else value
            # The head of a run has the settings of torch's optimizers as text.
            value = literal_eval(value) if isinstance(value, str) else value
            return default if value is None else value

        try:
            first, second = setting("betas", (cls.betas[0], setting("alpha", cls.betas[1])))
            if any(f"group 0.{name}" in settings for name in WITHOUT_MEAN):
                first = setting("momentum", 0.0)
            eps = setting("eps", cls.eps)
            # Adafactor has two: one for squares of gradients, which may be unset, one for weights.
            eps = eps[0] or cls.eps if isinstance(eps, tuple | list) else eps
            return cls(
                (float(first), float(second)),
                float(eps),
                float(setting("weight_decay", cls.decay)),
                "group 0.alpha" not in settings,
                "group 0.beta2_decay" in settings,
            )
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
            raise SourceError(
                f"run.json: expected numbers as the optimizer's betas, eps and weight decay ({error}); the file is damaged"
            ) from None

    def begin(self, batch: Batch, weights: Floats) -> None:
        """Record the sampled elements (2, samples) of weights before the first update."""
        self._followed.begin(batch, weights)

    def gradients(self, batch: Batch, gradients: Floats, noise: Floats, scale: float) -> None:
        """Record the sampled elements (2, samples) of a step's gradients. `noise` has, for each
        parameter, the distance between the two runs' gradients divided by the size of the gradient.
        `scale` is the usual size of gradients.
        """
        all_of = self._followed
        overlap = all_of.unchanged_parameters(batch)
        values, number, at = gradients[:, overlap.given], overlap.numbers, overlap.at
        all_of.steps[number] += 1
        all_of.noise[number] = noise[overlap.rows]
        all_of.size[number] = overlap.segments.rms(values)
        all_of.matters[number] = np.minimum(1.0, all_of.size[number] / max(scale, TINY))
        # Adam's m = b1 m + (1 - b1) g and v = b2 v + (1 - b2) g^2, each with one product less.
        all_of.first[:, at] = values + self.betas[0] * (all_of.first[:, at] - values)
        all_of.second[:, at] = values**2 + self.betas[1] * (all_of.second[:, at] - values**2)

    def weights(
        self, batch: Batch, weights: Floats, scales: Floats
    ) -> tuple[Floats, NDArray[np.bool_], NDArray[np.bool_]]:
        """Record the sampled elements (2, samples) of weights after an update. `scales` are the
        usual sizes of such weights.

        Returns three arrays: for each sampled element, the distance between the runs that rounding
        may have caused; for each parameter, whether this distance is known; and for each parameter,
        whether its update cannot be computed, because the logs lack samples or gradients of the
        parameter. If an update cannot be computed, `drift` becomes None.
        """
        all_of = self._followed
        overlap = all_of.unchanged_parameters(batch)
        number, at, segments = overlap.numbers, overlap.at, overlap.segments
        values = weights[:, overlap.given]
        change, all_of.weights[:, at] = values - all_of.weights[:, at], values
        # Of these no gradient was logged in this step: their updates cannot be worked out.
        quiet = np.isnan(all_of.noise[number])
        spread = self._spread(overlap, values, change)
        spread[segments.spread(quiet)] = 0.0
        all_of.explained[at] += spread
        distances = np.where(
            quiet,
            0.0,
            np.maximum(segments.rms(spread), self._beyond_samples(number) * segments.rms(change)),
        )
        # Weights that are zeros so far are measured by the size of others.
        sizes = np.maximum(np.maximum(segments.rms(values), scales[overlap.rows]), TINY)
        self._step = max([self._step, *(all_of.matters[number] * distances / sizes).tolist()])
        all_of.noise[number] = np.nan
        rounding, certain = np.zeros(batch.segments.size), np.zeros(len(batch.keys), bool)
        rounding[overlap.given], certain[overlap.rows] = all_of.explained[at], True
        unknown = ~certain
        # A weight that moved though no gradient of it was logged cannot be followed any further.
        unknown[overlap.rows] |= quiet & (segments.sums(np.abs(change).sum(axis=0)) != 0)
        self.drift = None if unknown.any() else self.drift
        return rounding, certain, unknown

    def end(self) -> None:
        """Add the drift of this step to `drift`. Steps move weights apart in independent
        directions, so the squares are added.
        """
        self.drift = None if self.drift is None else math.hypot(self.drift, self._step)
        self._step = 0.0

    def forget_drift(self) -> None:
        """Record that the weights of both runs are equal, so that nothing drifted so far."""
        self.drift = 0.0
        self._followed.explained[:] = 0.0

    def _spread(self, overlap: Known, values: Floats, change: Floats) -> Floats:
        """Return for each sample the distance between the two runs' weights that rounding of this
        step's gradients may cause.
        """
        segments, at = overlap.segments, overlap.at
        kinds = [self._steps(overlap, values - change)]
        if self.factored:
            # Adafactor's update of a matrix goes with the gradient, of a vector with its sign.
            kinds.append(self._followed.first[:, at])
        spread = np.zeros(segments.size)
        for steps in kinds:
            with np.errstate(all="ignore"):
                # The rate that fits best, change = -rate * steps by least squares. A schedule changes
                # it, and settings have that of the start alone.
                along, square = (
                    segments.sums((steps * other).sum(axis=0)) for other in (change, steps)
                )
                rate = np.abs(along) / np.maximum(square, TINY)
                apart = SURE * segments.spread(rate) * np.abs(steps[0] - steps[1])
            spread = np.maximum(spread, apart)
        return spread

    def _steps(self, overlap: Known, weights: Floats) -> Floats:
        """Return the values that the optimizer subtracts from the weights in this step, divided by
        its learning rate.
        """
        all_of, at = self._followed, overlap.at
        # Moments begin with zeros; Adam divides them by 1 - beta^count to make up for it.
        count = overlap.segments.spread(np.maximum(all_of.steps[overlap.numbers], 1))
        first, second = (
            moment[:, at] / (1 - beta**count if self.corrected else 1.0)
            for moment, beta in zip((all_of.first, all_of.second), self.betas, strict=True)
        )
        with np.errstate(all="ignore"):
            steps: Floats = first / (np.sqrt(second) + self.eps) + self.decay * weights
        return steps

    def _beyond_samples(self, numbers: NDArray[np.int64]) -> Floats:
        """Return for each parameter how far the two runs' updates may differ over all elements,
        sampled or not, divided by the size of the update.

        A first update is nearly the sign of the gradient. Of elements that are spread around 0, a
        share of about `noise` is smaller than the rounding error. These elements may move in either
        direction, unless `eps` is larger still. Later updates differ less, because few elements are
        small in all steps. So the result is 0 after the first update.
        """
        all_of = self._followed
        noise, size = all_of.noise[numbers], all_of.size[numbers]
        with np.errstate(all="ignore"):
            first = np.minimum(2 * np.sqrt(noise), noise * np.sqrt(size / max(self.eps, TINY)))
        return np.where((all_of.steps[numbers] > 1) | np.isnan(noise), 0.0, first)


TINY = 1e-300
"""Divisor that replaces 0."""
