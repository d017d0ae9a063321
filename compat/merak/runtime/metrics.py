"""`AccMetric`: means of named values since the last question. Source: Merak/core/printer/logging.py."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

__all__ = ["AccMetric"]


class AccMetric:
    """Adds up values by name; `avg` is the mean of each, and begins anew."""

    def __init__(self) -> None:
        self.metrics: dict[str, list[float]] = defaultdict(list)

    def update(self, key: str, val: Any) -> None:
        """One value more."""
        self.metrics[key].append(float(val))

    def reset(self) -> None:
        """Begin anew."""
        self.metrics.clear()

    @property
    def avg(self) -> dict[str, float]:
        """The mean of each since the last question."""
        found = {key: sum(values) / len(values) for key, values in self.metrics.items()}
        self.reset()
        return found
