"""Filters: which tensors of a run are logged, and how a log records the selection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.trace.record import Name


@dataclass(frozen=True)
class Filter:
    """Selects the tensors to log: those of layers whose name contains one of `layers`, of these
    `kinds`, and of this range of `steps`. An empty field selects everything.
    """

    layers: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    steps: range | None = None

    def takes(self, name: Name) -> bool:
        """Whether the tensor `name` is selected."""
        return (
            (not self.layers or any(part in name.layer for part in self.layers))
            and (not self.kinds or name.kind in self.kinds)
            and (self.steps is None or name.step in self.steps)
        )

    def notes(self) -> list[str]:
        """Return sentences that say which part of a run a log with this filter has."""
        steps = (
            f"steps {self.steps.start} to {self.steps.stop - 1}" if self.steps is not None else ""
        )
        layers = f"layers with {', '.join(self.layers)} in their names" if self.layers else ""
        parts = [*filter(None, [layers, ", ".join(self.kinds), steps])]
        return [f"the log has only {', and of these '.join(parts)}"] if parts else []

    def about(self) -> dict[str, Any]:
        """Return the filter as an entry for run.json; empty if everything is selected."""
        steps = None if self.steps is None else [self.steps.start, self.steps.stop, self.steps.step]
        return (
            {}
            if self == Filter()
            else {
                "filter": {"layers": list(self.layers), "kinds": list(self.kinds), "steps": steps}
            }
        )

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> Filter:
        """Return the filter that is recorded in `about`, the content of run.json."""
        settings = about.get("filter", {})
        steps = settings.get("steps")
        return cls(
            tuple(settings.get("layers", ())),
            tuple(settings.get("kinds", ())),
            None if steps is None else range(*steps),
        )
