"""Loss scaling for fp16: a constant, or a scale that halves on overflow and doubles after a run of good
steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bridge.plan import Plan

LIMIT = 10
"""Steps in a row that may be skipped where no smaller loss scale can help; one more is an error."""
STATE = ("scale", "window", "hysteresis", "minimum", "good", "tolerated")


@dataclass
class LossScaler:
    """The scale and what decides its next change; `window` None keeps it constant.

    The first doubling, and one after an overflow, takes `lead` good steps more than the window has. With `refill` a good step
    brings back the hysteresis. With `final` an overflow at the minimum ends the run.
    """

    scale: float = 1.0
    window: int | None = None
    hysteresis: int = 1
    minimum: float = 1.0
    good: int = 0
    tolerated: int = 0
    lead: int = 0
    refill: bool = False
    final: bool = False

    @classmethod
    def of(cls, plan: Plan) -> LossScaler:
        """The scaler that `plan` asks for; formats other than fp16 need none. Defaults: 2**16, 1000, 2, 1."""
        given = plan.precision.loss_scale
        if plan.precision.compute != "fp16":
            return cls()
        if given.static is not None:
            return cls(scale=given.static)
        minimum = 1.0 if given.minimum is None else given.minimum
        hysteresis = given.hysteresis or 2
        scale, window, lead = given.initial or 2.0**16, given.window or 1000, int(given.late or False)
        return cls(scale, window, hysteresis, minimum, tolerated=hysteresis - 1, lead=lead, final=bool(given.final))

    def update(self, overflow: bool) -> None:
        """Take note of one step, as torch's scaler does; hysteresis is what Megatron and DeepSpeed add."""
        if self.window is None:
            return
        if overflow:
            self._overflow()
        else:
            self._good(self.window)

    def _overflow(self) -> None:
        self.good = 0
        if self.tolerated > 0:
            self.tolerated -= 1
        else:
            self.scale = max(self.scale / 2, self.minimum)

    def _good(self, window: int) -> None:
        self.good += 1
        if self.refill:
            self.tolerated = self.hysteresis - 1
        if self.good == window + self.lead:
            self.good, self.tolerated, self.scale = self.lead, self.hysteresis - 1, self.scale * 2

    @property
    def share(self) -> float:
        """The part of a good step's gradients that its update sees: one that doubles the scale late divides by the new scale
        what was multiplied with the old one (DeepSpeed's step: _update_scale before unscale_and_clip_grads).
        """
        doubles = self.lead > 0 and self.window is not None and self.good + 1 == self.window + self.lead
        return 0.5 if doubles else 1.0

    @property
    def helps(self) -> bool:
        """Whether another overflow would bring the scale, now or soon, to a smaller one."""
        return self.window is not None and (self.tolerated > 0 or self.scale > self.minimum)

    def state(self) -> dict[str, float | int | None]:
        """What a checkpoint keeps. Good steps are counted as where the scale doubles late, whatever it does here."""
        found = {name: value for name, value in asdict(self).items() if name in STATE}
        return {**found, "good": self.good + 1 - self.lead if self.window is not None else 0}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from another scaler's `state`; a constant scale stays what the plan says."""
        if self.window is not None and state["window"] is not None:
            self.scale, self.good, self.tolerated = state["scale"], state["good"] - 1 + self.lead, state["tolerated"]
