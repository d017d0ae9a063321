"""Filters: which tensors of a run are logged, and what a log says of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.trace.record import Name


@dataclass(frozen=True)
class Filter:
    """What is logged: layers whose name contains one of `layers`, kinds, and steps of a window; empty means all."""

    layers: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    steps: range | None = None

    def takes(self, name: Name) -> bool:
        """Whether `name` passes."""
        return (
            (not self.layers or any(part in name.layer for part in self.layers))
            and (not self.kinds or name.kind in self.kinds)
            and (self.steps is None or name.step in self.steps)
        )

    def notes(self) -> list[str]:
        """What a log does not have, in words."""
        steps = (
            f"steps {self.steps.start} to {self.steps.stop - 1}" if self.steps is not None else ""
        )
        layers = f"layers with {', '.join(self.layers)} in their name" if self.layers else ""
        told = [*filter(None, [layers, ", ".join(self.kinds), steps])]
        return [f"its log has {', of these '.join(told)} alone"] if told else []

    def about(self) -> dict[str, Any]:
        """For the head of a run; empty where everything passes."""
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
        """That of the run whose head this is."""
        found = about.get("filter", {})
        steps = found.get("steps")
        return cls(
            tuple(found.get("layers", ())),
            tuple(found.get("kinds", ())),
            None if steps is None else range(*steps),
        )
