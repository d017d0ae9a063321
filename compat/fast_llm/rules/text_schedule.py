"""Fast-LLM's learning-rate schedule as text, which lists its stages. Only this form can express WSD
and a warmup that starts above 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from bridge.stack.rules import Group

KINDS = {
    ("linear", 1.0): "linear",
    ("power", 1.0): "linear",
    ("cosine", 1.0): "cosine",
    ("power", 0.5): "minus_sqrt",
}
"""A table from kind and power of a stage to the plan's name for the shape of WSD's decay. Fast-LLM
has no exponential decay.
"""
DECAYS = {"linear": ("linear", 1.0), "cosine": ("cosine", 1.0), "minus_sqrt": ("power", 0.5)}
READ_SINCE = "0.3.0"
"""First release that reads a text: earlier ones take each stage apart letter by letter, and stop
(optimizer/learning_rate.py: create_schedule_from_config).
"""
TENTH = 10
"""If a Plan does not set the length of WSD's decay, it is the schedule's length divided by this."""


class Stage(NamedTuple):
    """A stage of a learning-rate schedule: its kind, number of steps (negative: all remaining steps),
    first and last learning rate, and power.
    """

    kind: str
    steps: int
    begin: float
    end: float
    power: float = 1.0

    @classmethod
    def of(cls, text: str) -> Stage:
        """Parse the text of a stage. Raises `ValueError` where Fast-LLM would."""
        kind, steps, begin, *more = text.split(",")
        # A constant stage has no last rate, and stages without a power are straight.
        end = float(more[0]) if more else float(begin)
        power = float(more[1]) if len(more) > 1 else 1.0
        return cls(kind, int(steps), float(begin), end, power)

    def __str__(self) -> str:
        ends = [self.begin] if self.kind == "constant" else [self.begin, self.end]
        return ",".join(
            [
                self.kind,
                str(self.steps),
                *map(repr, ends),
                *([repr(self.power)] if self.power != 1 else []),
            ]
        )


def read(text: str) -> Group | None:
    """Return the plan's fields for a schedule as text, without its peak; None if a plan cannot hold
    the schedule.

    A plan can hold an optional linear warmup, followed by a constant rate, a decay or WSD. A
    constant stage of one step before them is skipped: no update has its rate.
    """
    return _read(_without_idle_stage(text)) or _read(text)


def read_peak(text: str) -> float | None:
    """Return the highest learning rate of a schedule as text; None if Fast-LLM refuses the text.

    The rates of a text are absolute: the base rate has no part in them
    (optimizer/learning_rate.py: create_schedule_from_config).
    """
    text = _without_idle_stage(text) or text
    try:
        stages = [Stage.of(part) for part in text.split(";")]
    except ValueError:
        return None
    # The stage behind a warmup begins at the peak, which a warmup from above exceeds.
    if _read(text) is not None:
        return _split(stages)[1][0].begin
    return max(max(stage.begin, stage.end) for stage in stages)


def skips_idle_stage(text: str) -> bool:
    """Return whether a schedule as text begins with a stage whose rate no update has, followed by a
    schedule that a plan can hold. Fast-LLM's first update has the rate of step 1.
    """
    return _read(_without_idle_stage(text)) is not None


def _without_idle_stage(text: str) -> str:
    first, _, rest = text.partition(";")
    try:
        stage = Stage.of(first)
    except ValueError:
        return ""
    return rest if stage.kind == "constant" and stage.steps == 1 else ""


def _split(stages: list[Stage]) -> tuple[list[Stage], list[Stage]]:
    """Return the warmup, if there is one, and the stages behind it. Behind its last stage, a schedule
    keeps the last rate (optimizer/learning_rate.py: LearningRateSchedule).
    """
    first, *rest = stages
    if not rest and first.kind == "linear" and first.end > first.begin:
        rest = [Stage("constant", -1, first.end, first.end)]
    return ([first], rest) if first.kind == "linear" and rest else ([], stages)


def _read(text: str) -> Group | None:
    try:
        stages = [Stage.of(part) for part in text.split(";")]
    except ValueError:
        return None
    warmup, rest = _split(stages)
    # A plan has names for one stage, and for a constant one with a decay behind it.
    kinds, name = [stage.kind for stage in rest], None
    if len(kinds) == 1 and kinds[0] in ("constant", "linear", "cosine"):
        name = kinds[0]
    elif len(kinds) == 2 and kinds[0] == "constant" and kinds[1] != "constant":
        name = "wsd"
    if name is None or not _is_sound([*warmup, *rest], rest, name):
        return None
    fields: dict[str, Any] = {"name": name, "warmup_steps": sum(stage.steps for stage in warmup)}
    fields["warmup_from"] = warmup[0].begin if warmup else 0.0
    if name == "constant":
        return fields
    last = stages[-1]
    fields |= {"total_steps": sum(stage.steps for stage in stages), "minimum": last.end}
    if name == "wsd":
        fields |= {"decay_steps": last.steps, "decay_shape": KINDS[last.kind, last.power]}
    return fields


def _is_sound(stages: Sequence[Stage], rest: Sequence[Stage], name: str) -> bool:
    """Return whether a plan can hold the stages: they join without jumps, the rate does not rise
    after the warmup, and all except the last have a number of steps and a linear shape.
    """
    continuous = all(one.end == other.begin and one.power == 1 for one, other in pairwise(stages))
    last = stages[-1]
    # Only a last constant stage may be open: a decay needs its length.
    whole = all(stage.steps > 0 for stage in stages[:-1]) and (
        last.steps > 0 or (name == "constant" and last.steps < 0)
    )
    has_shape = (last.kind, last.power) in KINDS if name == "wsd" else last.power == 1
    return (
        continuous
        and whole
        and has_shape
        and last.end <= rest[0].begin
        and min(min(stage.begin, stage.end) for stage in stages) >= 0
    )


def schedule_to_text(values: Group, idle: bool = False) -> str | None:
    """Return the text form of a plan's schedule with the learning rate `peak`; None if stages
    cannot express the schedule. If `idle`, a stage of one step comes first, so that the first update
    has the rate at the start of the schedule.
    """
    peak, warmup = values.get("peak"), values.get("warmup_steps") or 0
    rest = None if peak is None else _rest(values, peak, warmup)
    first = (
        [Stage("linear", warmup, values.get("warmup_from") or 0.0, peak)]
        if warmup and peak is not None
        else []
    )
    if not rest or not all(stage.steps for stage in rest):
        return None
    stages = [*first, *rest]
    start = stages[0].begin
    return ";".join(map(str, [*[Stage("constant", 1, start, start)][: int(idle)], *stages]))


def _rest(values: Group, peak: float, warmup: int) -> list[Stage] | None:
    """Return the stages after the warmup; None if the plan does not set their lengths."""
    name, total, low = values.get("name"), values.get("total_steps"), values.get("minimum") or 0.0
    if name == "constant":
        return [Stage(name, -1, peak, peak)]
    if name is None or total is None or total <= warmup:
        return None
    return (
        _wsd(values, peak, total - warmup)
        if name == "wsd"
        else [Stage(name, total - warmup, peak, low)]
    )


def _wsd(values: Group, peak: float, steps: int) -> list[Stage] | None:
    decay, shape = values.get("decay_steps"), values.get("decay_shape") or "linear"
    decay = max(1, values["total_steps"] // TENTH) if decay is None else decay
    if shape not in DECAYS or steps - decay < 1 or decay < 1:
        return None
    kind, power = DECAYS[shape]
    return [
        Stage("constant", steps - decay, peak, peak),
        Stage(kind, decay, peak, values.get("minimum") or 0.0, power),
    ]
