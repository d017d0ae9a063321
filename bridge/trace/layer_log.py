"""Layer logs: the observer that writes what a plan's debug levels ask for."""

from __future__ import annotations

from dataclasses import dataclass, field

from bridge.plan import Debug
from bridge.trace.log import Log
from bridge.trace.record import Name
from bridge.trace.source import Kind, Moment, Source
from bridge.trace.tracer import GRADIENT, OUTPUT, Sight


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


@dataclass
class LayerLog:
    """Writes to `log` at the levels of `debug`."""

    source: Source
    debug: Debug
    log: Log
    filter: Filter = field(default_factory=Filter)

    def wants(self, kind: str) -> bool:
        """See `Observer`."""
        return self._level(kind) > 0

    def saw(self, sight: Sight) -> None:
        """See `Observer`."""
        if not sight.again and self.filter.takes(sight.name):
            kind = sight.name.kind
            self.log.add(sight.name, sight.tensor, sight.placement, self._level(kind), sight.microbatch, kind == GRADIENT)

    def reached(self, moment: Moment | None) -> None:
        """See `Observer`."""
        step = self.source.now().step
        if moment is None:
            self._held("init", step - 1, "weight", self.debug.param_init)
            self.log.write(step - 1)
        elif moment == "reduced":
            self._held("reduce", step, "gradient", max(self.debug.param_gradients or 0, self.debug.all_param_gradients or 0))
        elif moment == "updated":
            self._held("update", step, "weight", self.debug.param_update)
        else:
            self.log.write(step, self.source.factor())

    def _level(self, kind: str) -> int:
        return {OUTPUT: self.debug.layer_outputs, GRADIENT: self.debug.layer_gradients}.get(kind) or 0

    def _held(self, phase: str, step: int, kind: Kind, level: int | None) -> None:
        for held in self.source.tensors(kind) if level else ():
            name = Name(step, phase, held.layer, None, held.kind, held.tensor)
            if self.filter.takes(name):
                self.log.add(name, held.local, held.placement, level or 0, gradient=kind == "gradient")
