"""Loss scaling for fp16: a constant, or a scale that halves on overflow and doubles after many good
steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bridge.plan.plan import Plan

LIMIT = 10
"""Number of steps in a row that may be skipped if no smaller loss scale can help. The next skipped
step raises an error.
"""
STATE = ("scale", "window", "hysteresis", "minimum", "good", "tolerated")
"""Fields of `LossScaler` that are stored in a checkpoint. All other fields follow from the plan."""


@dataclass
class LossScaler:
    """The loss scale, and the settings and counters that decide when it changes.

    If `window` is None, the scale is constant. `good` is the number of good steps since the last
    change, and `tolerated` the number of overflows that may still happen without a change. The
    first doubling in a run, and the first after an overflow, come `lead` good steps later than
    `window` says. With `refill`, a good step resets `tolerated`. With `final`, an overflow at the
    minimum ends the run.
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
        """Return the loss scaler of `plan`. For formats other than fp16 the scale is always 1."""
        settings = plan.precision.loss_scale
        if plan.precision.compute != "fp16":
            return cls()
        if settings.static is not None:
            return cls(scale=settings.static)
        minimum = 1.0 if settings.minimum is None else settings.minimum
        hysteresis = settings.hysteresis or 2
        # Of `hysteresis` overflows the last one halves the scale, so that one less is tolerated.
        scale, window, lead = (
            settings.initial or 2.0**16,
            settings.window or 1000,
            int(settings.late or False),
        )
        return cls(
            scale,
            window,
            hysteresis,
            minimum,
            tolerated=hysteresis - 1,
            lead=lead,
            final=bool(settings.final),
        )

    def update(self, overflow: bool) -> None:
        """Update the scale after one step, as torch's scaler does, with the hysteresis that
        Megatron and DeepSpeed add.
        """
        if self.window is None:
            return
        if overflow:
            # Tolerance is not restored here, nor by a good step without `refill`: after it is used
            # up, every overflow halves the scale until a doubling (DynamicGradScaler.update of
            # Megatron, DynamicLossScaler.update_scale of DeepSpeed).
            self.good = 0
            if self.tolerated > 0:
                self.tolerated -= 1
            else:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self.good += 1
        if self.refill:
            self.tolerated = self.hysteresis - 1
        if self.good == self.window + self.lead:
            # DeepSpeed counts good steps from the last overflow and takes the remainder of the
            # window. The lead is thus paid once, and the count goes on from it; for other stacks it
            # is 0.
            self.good = self.lead
            self.tolerated = self.hysteresis - 1
            self.scale *= 2

    @property
    def share(self) -> float:
        """Return the factor by which the gradients of a good step are multiplied before the update.
        If there is a `lead`, it is 0.5 for a step that doubles the scale. In all other cases it is
        1.

        This is what DeepSpeed does: `step` calls `_update_scale` before `unscale_and_clip_grads`.
        In a step that doubles the scale, the loss is multiplied by the old scale, and the gradients
        are divided by the new one.
        """
        doubles = (
            self.lead > 0 and self.window is not None and self.good + 1 == self.window + self.lead
        )
        return 0.5 if doubles else 1.0

    @property
    def helps(self) -> bool:
        """Whether further overflows would make the scale smaller."""
        return self.window is not None and (self.tolerated > 0 or self.scale > self.minimum)

    def state(self) -> dict[str, float | int | None]:
        """Return the values that are stored in a checkpoint. `good` is converted to the number that
        a scaler with a `lead` of 1 would have.
        """
        # A checkpoint may be read by a run with another lead. One convention keeps the number of
        # steps to the next doubling.
        fields = {name: value for name, value in asdict(self).items() if name in STATE}
        return {**fields, "good": self.good + 1 - self.lead if self.window is not None else 0}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state` that another scaler stored. A constant scale keeps the plan's
        value.
        """
        if self.window is not None and state["window"] is not None:
            self.scale, self.good, self.tolerated = (
                state["scale"],
                state["good"] - 1 + self.lead,
                state["tolerated"],
            )
