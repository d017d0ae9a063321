"""Fast-LLM's learning rate as text, stage by stage: a plan's WSD can be said in it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from bridge.rules import Group

KINDS = {("linear", 1.0): "linear", ("power", 1.0): "linear", ("cosine", 1.0): "cosine", ("power", 0.5): "minus_sqrt"}
"""Shapes of WSD's decay by the kind of a stage and its power; an exponential is none."""
DECAYS = {"linear": ("linear", 1.0), "cosine": ("cosine", 1.0), "minus_sqrt": ("power", 0.5)}
TENTH = 10
"""Where a Plan leaves the decay of WSD open, it is the last of so many equal parts of the schedule."""


class Stage(NamedTuple):
    """A stage: its kind, its steps (negative: all that are left), the rates at its ends, and the power of its shape."""

    kind: str
    steps: int
    begin: float
    end: float
    power: float = 1.0

    @classmethod
    def of(cls, text: str) -> Stage:
        """A stage as it is written; raises `ValueError` where Fast-LLM would."""
        kind, steps, begin, *more = text.split(",")
        end, power = (float(more[0]) if more else float(begin)), (float(more[1]) if len(more) > 1 else 1.0)
        return cls(kind, int(steps), float(begin), end, power)

    def __str__(self) -> str:
        ends = [self.begin] if self.kind == "constant" else [self.begin, self.end]
        return ",".join([self.kind, str(self.steps), *map(repr, ends), *([repr(self.power)] if self.power != 1 else [])])


def read(text: str, peak: float | None) -> Group | None:
    """The fields of the plan's WSD where `text` is one that reaches `peak`: a line up to it, itself, and a decay."""
    try:
        stages = [Stage.of(part) for part in text.split(";")]
    except ValueError:
        return None
    *warmup, _, last = stages if _is_wsd(stages, peak) else (None, None)
    if last is None:
        return None
    return {
        "name": "wsd",
        "warmup_steps": sum(stage.steps for stage in warmup),
        "warmup_from": warmup[0].begin if warmup else 0.0,
        "total_steps": sum(stage.steps for stage in stages),
        "minimum": last.end,
        "decay_steps": last.steps,
        "decay_shape": KINDS[last.kind, last.power],
    }


def _is_wsd(stages: Sequence[Stage], peak: float | None) -> bool:
    kinds = [stage.kind for stage in stages[:-1]]
    joined = all(one.end == other.begin and one.power == 1 for one, other in pairwise(stages))
    whole = all(stage.steps > 0 and min(stage.begin, stage.end) >= 0 for stage in stages)
    decays = (stages[-1].kind, stages[-1].power) in KINDS and stages[-1].begin == peak
    return kinds in (["constant"], ["linear", "constant"]) and joined and whole and decays


def written(values: Group) -> str | None:
    """WSD as text, from the fields of a plan's schedule and its `peak`; None where stages cannot say it."""
    peak, total, shape = values.get("peak"), values.get("total_steps"), values.get("decay_shape") or "linear"
    if peak is None or total is None or shape not in DECAYS:
        return None
    warmup, start = values.get("warmup_steps") or 0, values.get("warmup_from") or 0.0
    decay = values.get("decay_steps")
    decay = max(1, total // TENTH) if decay is None else decay
    stable = total - warmup - decay
    if stable < 1 or decay < 1:
        return None
    first = [Stage("linear", warmup, start, peak)] if warmup else []
    kind, power = DECAYS[shape]
    last = Stage(kind, decay, peak, values.get("minimum") or 0.0, power)
    return ";".join(map(str, (*first, Stage("constant", stable, peak, peak), last)))
