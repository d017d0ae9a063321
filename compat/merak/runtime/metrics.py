"""`AccMetric`: means of named values since the last reading. Source: Merak/core/printer/logging.py."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

__all__ = ["AccMetric"]


class AccMetric:
    """Sums of values by name. Reading `avg` returns the mean of each value and starts new sums."""

    def __init__(self) -> None:
        self.metrics: dict[str, list[float]] = defaultdict(list)

    def update(self, key: str, val: Any) -> None:
        """Add a value."""
        self.metrics[key].append(float(val))

    def reset(self) -> None:
        """Begin anew."""
        self.metrics.clear()

    @property
    def avg(self) -> dict[str, float]:
        """The mean of each value since `avg` was last read."""
        averages = {key: sum(values) / len(values) for key, values in self.metrics.items()}
        self.reset()
        return averages
