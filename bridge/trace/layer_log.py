"""Layer logs: the observer that logs tensors of each layer, at the levels that the section `debug`
of a plan sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bridge.plan.plan import Debug
from bridge.trace.clipping import Clipping
from bridge.trace.filter import Filter
from bridge.trace.gather import gather_tensor
from bridge.trace.log import Log
from bridge.trace.memory import memory_bytes
from bridge.trace.placement import Placement
from bridge.trace.record import MEMORY, SHARD, Name, Unit
from bridge.trace.retention import Keep, indices_to_skip
from bridge.trace.roots import Roots
from bridge.trace.source import Kind, Moment, TraceSource
from bridge.trace.summary import SAMPLES
from bridge.trace.tracer import GRADIENT, INPUT, OUTPUT, Sight

RATE = "learning rate"
"""Name under which a source gives the learning rate, as a tensor of the kind "state"."""


@dataclass
class LayerLog:
    """Observer that passes the tensors of a run to `log`, each kind at the level that `debug`
    sets.
    """

    source: TraceSource
    debug: Debug
    log: Log
    filter: Filter = field(default_factory=Filter)
    keep: Keep = field(default_factory=Keep)
    roots: Roots = field(default_factory=Roots)
    clipping: Clipping = field(init=False)
    _several: bool = False
    """Whether the current step has had more than one microbatch so far. This is needed only if the
    number of microbatches is not known in advance.
    """
    _settings: dict[str, list[float]] = field(default_factory=dict)
    """The last values of each setting of the optimizers, by name, so that changes are seen."""
    _new_modes: Mapping[str, list[str]] | None = None
    _last_modes: Mapping[str, list[str]] | None = None

    def __post_init__(self) -> None:
        self.clipping = Clipping(self.roots)

    @property
    def alone(self) -> bool:
        """Whether this rank can log without communication with other ranks, so that it goes on
        logging when ranks no longer step together.
        """
        return bool(getattr(self.source, "plain", False)) and self._at_hand

    @property
    def _at_hand(self) -> bool:
        """Whether a rank can read its tensors without communication with other ranks."""
        return bool(getattr(self.source, "at_hand", False))

    def _looks(self, step: int) -> bool:
        """Return whether this rank has to read its tensors in a step: for its own log, or because
        another rank logs and ranks can read their tensors only together.
        """
        if self._at_hand or not self.keep.fits(step):
            return self._keeps_step(step)
        comm = self.source.comm
        return bool(
            gather_tensor(
                comm, "log keeps", torch.tensor([int(self._keeps_step(step))]), comm.world
            ).any()
        )

    def wants(self, kind: str) -> bool:
        return self._level(kind) > 0 or self._measures(kind)

    def saw(self, sight: Sight) -> None:
        self._several |= bool(sight.name.microbatch)
        if not sight.again and self._takes(sight.name):
            kind = sight.name.kind
            unit: Unit = "activation" if kind == GRADIENT else "own"
            self._add(
                sight.name, sight.tensor, sight.placement, self._level(kind), sight.microbatch, unit
            )
            if self._measures(kind):
                # What this rank holds after the layer ran; no other rank's is a copy of it.
                name = sight.name._replace(microbatch=sight.microbatch, kind=MEMORY)
                used = memory_bytes(sight.tensor.device)
                placement = Placement.full(tuple(used.shape))
                self.log.add(self._own(name), used, placement, SAMPLES + 2)

    def _takes(self, name: Name) -> bool:
        return self._keeps_step(name.step) and self.filter.takes(name)

    def _keeps_step(self, step: int) -> bool:
        return self.keep.takes(step, self.source.comm.rank) and self.log.keeps(step)

    def _measures(self, kind: str) -> bool:
        return bool(self.debug.activation_memory) and kind in (OUTPUT, GRADIENT)

    def reach_moment(self, moment: Moment | None) -> None:
        step = self.source.now().step
        # Asked even if nothing is logged: it may gather, and then all ranks must call it.
        # What is there before the first step belongs to the step before it.
        log_step = step - 1 if moment is None else step
        looks = moment != "ended" and self._looks(log_step)
        if moment is None:
            self._log_tensors("init", step - 1, "weight", self.debug.param_init, looks)
            self._log_tensors("init", step - 1, "buffer", self.debug.param_init, looks)
            self._forget()
            self.log.write(step - 1)
        elif moment == "reduced":
            self._log_tensors("reduce", step, "gradient", self.debug.all_param_gradients, looks)
            self._log_tensors("reduce", step, "shard", self.debug.param_gradients, looks)
            self._rate(step)
            modes = getattr(self.source, "modes", None)
            self._new_modes = modes() if modes is not None else None
        elif moment == "updated":
            self._log_tensors("update", step, "weight", self.debug.param_update, looks)
            self._log_tensors("update", step, "buffer", self.debug.param_update, looks)
        else:
            alone = self.source.now().part is not None and not self._several
            factors = self.source.factors()
            self._forget()
            self.log.write(step, factors, alone, self._loss(factors), self._clip(), self._modes())
            self._several = False

    def close(self) -> None:
        """Collect no losses any more."""
        self.roots.remove()

    def _forget(self) -> None:
        """Drop the tensors of which an earlier rank logs an equal copy, if `keep.once` is set and
        ranks still step together.
        """
        if self.keep.once and getattr(self.source, "together", True):
            self.log.forget(lambda parts: indices_to_skip(parts, self.source.comm))

    def _loss(self, factors: Mapping[Unit, float]) -> float | None:
        """Return the loss of the step in a unit that does not depend on the layout, or None if it
        is unknown. It is the loss that the engine gives, or else the scalar from which backward
        started.
        """
        if hasattr(self.source, "loss"):
            return float(self.source.loss)
        loss = self.roots.take()
        share = getattr(self.source, "loss_share", 1.0)
        return None if loss is None else loss * factors.get("parameter", 1.0) * share

    def _clip(self) -> float | None:
        """Return the factor by which clipping multiplied all gradients of the step, 1.0 if it left
        them as they were, or None if it is unknown.
        """
        if hasattr(self.source, "clip"):
            clip: float | None = self.source.clip
            return clip
        module = getattr(self.source, "module", None)
        return None if module is None else self.clipping.take(module.parameters())

    def _modes(self) -> Mapping[str, list[str]] | None:
        """Return the modes of modules and parameters in this step, or None if they are as before,
        or if the source does not tell.
        """
        before, self._last_modes = self._last_modes, self._new_modes
        return self._new_modes if self._new_modes != before else None

    def _rate(self, step: int) -> None:
        """If gradients or updates are logged, log the learning rates, and those settings of the
        optimizers that have changed since the last step.
        """
        level = self.debug.all_param_gradients or self.debug.param_update
        for part in self.source.tensors("state") if level else ():
            name = Name(step, "reduce", part.layer, None, part.kind, part.tensor)
            if part.tensor != RATE and not part.tensor.startswith("group "):
                continue
            values = part.local.tolist()
            # What is there the first time is no change.
            differs = self._settings.setdefault(part.tensor, values) != values
            self._settings[part.tensor] = values
            if (differs or part.tensor == RATE) and self._takes(name):
                self._add(name, part.local, part.placement, max(level or 0, SAMPLES + 3))

    def _level(self, kind: str) -> int:
        return {
            INPUT: self.debug.layer_outputs,
            OUTPUT: self.debug.layer_outputs,
            GRADIENT: self.debug.layer_gradients,
        }.get(kind) or 0

    def _log_tensors(
        self, phase: str, step: int, kind: Kind, level: int | None, looks: bool
    ) -> None:
        for part in self.source.tensors(kind) if level and looks else ():
            name = Name(step, phase, part.layer, None, part.kind, part.tensor)
            if self._takes(name):
                self._add(
                    name,
                    part.local,
                    part.placement,
                    level or 0,
                    None,
                    "parameter" if phase == "reduce" else "own",
                )

    def _add(
        self,
        name: Name,
        tensor: Tensor,
        placement: Placement,
        level: int,
        microbatch: int | None = None,
        unit: Unit = "own",
    ) -> None:
        """Add a tensor to the log, normally as a part of the whole tensor. A shard of a flat, or
        any tensor if the plan sets `debug.global_tensors` to false, is logged as a separate tensor
        with the rank in its name.
        """
        if self.debug.global_tensors is False or name.kind == SHARD:
            name, placement = self._own(name), Placement.full(tuple(tensor.shape))
        self.log.add(name, tensor, placement, level, microbatch, unit)

    def _own(self, name: Name) -> Name:
        return name._replace(tensor=f"{name.tensor} of rank {self.source.comm.rank}".strip())
