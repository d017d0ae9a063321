"""Learning-rate schedules as functions of the number of steps taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import cos, pi, sqrt

from bridge.errors import ConfigError
from bridge.plan.plan import DecayRamp, LearningRate

DECAY_SHARE = 10
"""If the plan does not set the length of the decay of `wsd`, the decay is the last 1 /
`DECAY_SHARE` of the schedule.
"""


def learning_rate(peak: float, schedule: LearningRate, step: int) -> float:
    """Return the learning rate for the update after `step` updates. Raises `ConfigError` if the
    schedule needs a number of steps that the plan does not set.
    """
    warmup = schedule.warmup_steps or 0
    # The peak itself belongs to the warmup: at `step` = `warmup` the line ends there, and the shape
    # starts from it.
    if warmup and step <= warmup:
        start = schedule.warmup_from or 0.0
        return start + (peak - start) * step / warmup
    return _SHAPES[schedule.name or "constant"](peak, schedule, step, warmup)


def _constant(peak: float, schedule: LearningRate, step: int, warmup: int) -> float:
    return peak


def _linear(peak: float, schedule: LearningRate, step: int, warmup: int) -> float:
    return _between(peak, schedule, 1 - _progress(schedule, step, warmup))


def _cosine(peak: float, schedule: LearningRate, step: int, warmup: int) -> float:
    return _between(peak, schedule, (1 + cos(pi * _progress(schedule, step, warmup))) / 2)


def _inverse_sqrt(peak: float, schedule: LearningRate, step: int, warmup: int) -> float:
    low = schedule.minimum or 0.0
    if schedule.total_steps is not None and step > schedule.total_steps:
        return low
    # The root falls from the peak at the end of the warmup, and never reaches zero by itself.
    return max(low, peak * sqrt(max(warmup, 1) / max(step, 1)))


def _wsd(peak: float, schedule: LearningRate, step: int, warmup: int) -> float:
    """Return the learning rate of the schedule `wsd`: constant until the decay begins, then
    falling. The decay has its full length even if it begins within the warmup.
    """
    start = _total(schedule) - decay_steps(schedule)
    progress = _progress(schedule, step, start) if step > start else 0.0
    return _between(peak, schedule, _DECAYS[schedule.decay_shape or "linear"](progress))


def weight_decay(ramp: DecayRamp, step: int) -> float | None:
    """Return the weight decay for the update after `step` updates, or None if the plan has no ramp."""
    if ramp.shape is None:
        return None
    start, end = ramp.start or 0.0, ramp.end or 0.0
    progress = min(1.0, step / max(1, ramp.steps or 0))
    # The cosine goes up here: from 0 at the start to 1 at the end.
    share = progress if ramp.shape == "linear" else (1 - cos(pi * progress)) / 2
    return start + (end - start) * share


def decay_steps(schedule: LearningRate) -> int:
    """Return the number of steps of the decay at the end of the schedule `wsd`."""
    return (
        max(1, _total(schedule) // DECAY_SHARE)
        if schedule.decay_steps is None
        else schedule.decay_steps
    )


def _between(peak: float, schedule: LearningRate, share: float) -> float:
    low = schedule.minimum or 0.0
    return low + (peak - low) * share


def _progress(schedule: LearningRate, step: int, start: int) -> float:
    """Return how much of the decay has passed: 0 at the step `start`, 1 from the last step of the
    schedule on.
    """
    return min(1.0, (step - start) / max(1, _total(schedule) - start))


def _total(schedule: LearningRate) -> int:
    if schedule.total_steps is None:
        raise ConfigError(
            f"optimizer.schedule.total_steps: not set, but schedule {schedule.name} needs the number of steps; set it"
        )
    return schedule.total_steps


_DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + cos(pi * progress)) / 2,
    # Halves over the whole decay, stretched so that it runs from 1 to 0 and not from 1 to 0.5.
    "exponential": lambda progress: 2 * 0.5**progress - 1,
    "minus_sqrt": lambda progress: 1 - sqrt(progress),
}
"""Shapes of a decay: functions from how much of the decay has passed (0 to 1) to the learning rate
(1 for the peak, 0 for the minimum).
"""

_SHAPES: Mapping[str, Callable[[float, LearningRate, int, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "inverse_sqrt": _inverse_sqrt,
    "wsd": _wsd,
}
