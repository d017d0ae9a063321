"""Rules that convert Fast-LLM's learning-rate schedule to the plan's schedule, and back. Both count
optimizer steps.
"""

from __future__ import annotations

from bridge.stack.rules import HABITS, Context, Group, convert
from compat.fast_llm.rules import text_schedule

RATE = "optimizer.learning_rate."
STEPS, BASE = "training.train_iters", RATE + "base"
STYLE, END, POWER, WARMUP, MINIMUM, TEXT = (
    RATE + name
    for name in (
        "decay_style",
        "decay_iterations",
        "decay_power",
        "warmup_iterations",
        "minimum",
        "schedule",
    )
)
PLAN = "optimizer.schedule."
NAMES = (
    "name",
    "total_steps",
    "warmup_steps",
    "warmup_from",
    "minimum",
    "decay_steps",
    "decay_shape",
)
DECAYS = ("linear", "cosine")
FIRST = HABITS + "first_lr_step"
"""Plan field for the step of the schedule whose rate the first update has."""


SCALE = "optimizer.default_learning_rate_scale"


def peak(values: Group) -> float | None:
    """Return the peak learning rate of parameters whose layer has no factor of its own; None if no
    rate is set. A schedule as text has its own rates, and leaves the base unused.
    """
    text = values.get(TEXT)
    base = not_negative(values.get(BASE) if text is None else text_schedule.read_peak(text))
    return None if base is None else base * _scale(values)


def _scale(values: Group) -> float:
    scale = values.get(SCALE)
    return 1.0 if scale is None else float(scale)


def not_negative(value: float | None) -> float | None:
    """Return the value, or 0 if it is negative, because a Plan cannot hold negative values."""
    return None if value is None else max(0.0, value)


def _shape(values: Group) -> str:
    """Return the plan's name for the decay shape, or the nearest shape that a plan has."""
    style = values.get(STYLE)
    if values.get(TEXT) is not None or style not in (*DECAYS, "power"):
        return "constant"
    return "linear" if style == "power" else str(style)


def _total(values: Group) -> int | None:
    end = values.get(END) if _shape(values) in DECAYS else None
    total = end if end is not None and end > 0 else values.get(STEPS)
    return total if total is not None and total > 0 else None


def _as_text(values: Group) -> Group | None:
    """Return the plan's fields for a schedule that is given as text; None if a Plan cannot express
    the schedule.
    """
    return text_schedule.read(values.get(TEXT) or "")


def _read_schedule(values: Group, context: Context) -> Group:
    if (schedule := _as_text(values)) is not None:
        # The factor applies to every rate of the schedule; `peak` has it in `optimizer.lr`.
        rates = {
            name: schedule[name] * _scale(values)
            for name in ("warmup_from", "minimum")
            if name in schedule
        }
        usual = {"total_steps": _total(values), "minimum": 0.0}
        return {PLAN + name: value for name, value in {**usual, **schedule, **rates}.items()}
    return {
        PLAN + "name": _shape(values),
        PLAN + "total_steps": _total(values),
        PLAN + "warmup_steps": max(0, values.get(WARMUP) or 0),
        PLAN + "warmup_from": 0.0,
        PLAN + "minimum": (not_negative(values.get(MINIMUM)) or 0.0) * _scale(values)
        if _shape(values) in DECAYS
        else 0.0,
    }


def _write_schedule(values: Group, context: Context) -> Group:
    name, total = values.get(PLAN + "name"), values.get(PLAN + "total_steps")
    schedule = {name: values.get(PLAN + name) for name in NAMES} | {
        "peak": values.get("optimizer.lr")
    }
    warmup, shaped = schedule["warmup_steps"], name in (*DECAYS, "constant")
    # Only a text can begin with a step that no update has.
    idle = values.get(FIRST) == 0 and bool(warmup or name != "constant")
    as_text = name == "wsd" or (shaped and (idle or (warmup and schedule["warmup_from"])))
    as_text = as_text and context.since(text_schedule.READ_SINCE)
    if as_text and (text := text_schedule.schedule_to_text(schedule, idle)) is not None:
        return {TEXT: text}
    decays = name in DECAYS
    return {
        STYLE: name if decays or name == "constant" else None,
        END: total if decays else None,
        WARMUP: values.get(PLAN + "warmup_steps"),
        MINIMUM: values.get(PLAN + "minimum"),
    }


def first_lr_step(values: Group) -> int:
    """Return the step of the schedule whose rate the first update has: 1, unless a text begins with a
    stage that no update has.
    """
    return 0 if text_schedule.skips_idle_stage(values.get(TEXT) or "") else 1


def _blurs_schedule(values: Group) -> bool:
    """Return whether the plan cannot hold the schedule exactly: it has no name for the shape, or a
    value is out of bounds.
    """
    if _as_text(values) is not None:
        return False
    no_length = values.get(END) is not None and values[END] <= 0
    # Each decay has a power, and a plan has names for the shapes of power 1.
    decays = values.get(STYLE) in (*DECAYS, "power")
    has_name = values.get(POWER) == 1 if decays else values.get(STYLE) == "constant"
    expressible = values.get(TEXT) is None and has_name
    return (
        no_length
        or not expressible
        or any((values.get(path) or 0) < 0 for path in (WARMUP, MINIMUM))
    )


RULE = convert(
    (STYLE, END, POWER, WARMUP, MINIMUM, TEXT),
    tuple(PLAN + name for name in NAMES),
    _read_schedule,
    _write_schedule,
    sees=(STEPS, SCALE, "optimizer.lr", FIRST),
    blurs=_blurs_schedule,
    carries={
        STYLE: PLAN + "name",
        POWER: PLAN + "name",
        TEXT: tuple(PLAN + name for name in NAMES),
        END: PLAN + "total_steps",
        WARMUP: (PLAN + "warmup_steps", PLAN + "warmup_from"),
        MINIMUM: PLAN + "minimum",
    },
    lossy=(
        "Fast-LLM's shapes are constant (the default), linear and cosine; "
        "WSD, and a warmup that starts above 0, need a schedule as text (since 0.3.0) with a known peak "
        "and end; WSD then needs at least one step at the peak and has no exponential decay; "
        "stagebridge does not translate shapes with other powers"
    ),
    note="a schedule as text is read only if it is a warmup followed by one of the shapes that stagebridge translates",
    source="optimizer/learning_rate.py: create_schedule_from_config",
)
