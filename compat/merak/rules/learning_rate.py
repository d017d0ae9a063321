"""Rules that convert the learning-rate schedules of Hugging Face, which Merak's trainer builds, to
the plan's schedule, and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, inf, nextafter
from typing import Any

from bridge.stack.rules import Context, Group, convert
from compat.merak.effective import POLYNOMIAL_END
from compat.merak.releases import REWRITTEN

TYPE, KWARGS = "args.lr_scheduler_type", "args.lr_scheduler_kwargs"
RATIO, WARMUP, TOTAL, PEAK = (
    "args.warmup_ratio",
    "args.warmup_steps",
    "args.max_steps",
    "args.learning_rate",
)
SCHEDULE = "optimizer.schedule."

SHAPES: Mapping[str, str] = {
    "linear": "linear",
    "polynomial": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "reduce_lr_on_plateau": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}
"""For each schedule of Hugging Face, the plan's name of the same or the most similar schedule."""
TENTH = 10
"""If a plan does not set the length of WSD's decay, it is the schedule's length divided by this."""
UNWARMED = ("constant", "reduce_lr_on_plateau")
USUAL: Mapping[str, Mapping[str, float]] = {
    "polynomial": {"power": 1.0},
    "cosine": {"num_cycles": 0.5},
    "cosine_with_restarts": {"num_cycles": 1},
    "cosine_with_min_lr": {"num_cycles": 0.5},
    "warmup_stable_decay": {"num_cycles": 0.5},
}
"""Values of further arguments with which a schedule of Hugging Face equals the plan's schedule."""


def _scheduler_arguments(values: Group) -> Mapping[str, Any]:
    return values.get(KWARGS) or {}


def _is_approximate(values: Group) -> bool:
    """Return whether the plan cannot hold the schedule exactly: the plan's schedule is only
    similar, or the warmup depends on the size of the data.
    """
    name, arguments = values[TYPE], _scheduler_arguments(values)
    unusual = any(arguments.get(key, usual) != usual for key, usual in USUAL.get(name, {}).items())
    # Without a warmup, their inverse root has a scale of its own, which the plan's habits say.
    slow = name == "inverse_sqrt" and arguments.get("timescale", _scale(values)) != _scale(values)
    # A share of a run whose number of steps is not known.
    open_ = values[RATIO] > 0 and values[WARMUP] == 0 and values[TOTAL] <= 0
    # No plateau and no decay: the schedule ends with the warmup, which a plan's WSD cannot.
    lengths = [arguments.get(key) for key in ("num_stable_steps", "num_decay_steps")]
    sudden = name == "warmup_stable_decay" and lengths == [0, 0]
    return unusual or slow or open_ or sudden or name == "reduce_lr_on_plateau"


def _scale(values: Group) -> int:
    """Return the number of steps that the inverse square root counts in, unless the config sets it
    (transformers, optimization.py: get_inverse_sqrt_schedule).
    """
    return _count_warmup(values) or 10_000


def _count_warmup(values: Group) -> int:
    """Return the number of warmup steps. The ratio takes effect only if the config gives no number
    of warmup steps and the length of the run is known.
    """
    if values[TYPE] in UNWARMED:
        return 0
    share = ceil(values[TOTAL] * values[RATIO]) if values[TOTAL] > 0 else 0
    return int(values[WARMUP] or share)


def _minimum(values: Group) -> float | None:
    arguments = _scheduler_arguments(values)
    match values[TYPE]:
        case "linear" | "cosine" | "cosine_with_restarts":
            return 0.0
        case "polynomial":
            return float(arguments.get("lr_end", POLYNOMIAL_END))
        case "cosine_with_min_lr":
            return (
                float(arguments["min_lr"])
                if "min_lr" in arguments
                else float(arguments["min_lr_rate"] * values[PEAK])
            )
        case "warmup_stable_decay":
            return float(arguments.get("min_lr_ratio", 0) * values[PEAK])
    return None


def _total(values: Group) -> int | None:
    if values[TYPE] == "warmup_stable_decay":
        arguments = _scheduler_arguments(values)
        return max(
            1,
            int(
                _count_warmup(values) + arguments["num_stable_steps"] + arguments["num_decay_steps"]
            ),
        )
    return values[TOTAL] if values[TOTAL] > 0 else None


def _read_schedule(values: Group, context: Context) -> Group:
    warmup = _count_warmup(values)
    fields = {
        SCHEDULE + "name": SHAPES[values[TYPE]],
        SCHEDULE + "warmup_steps": warmup,
        SCHEDULE + "warmup_from": 0.0,
        SCHEDULE + "total_steps": _total(values),
        SCHEDULE + "minimum": _minimum(values),
    }
    if values[TYPE] == "warmup_stable_decay":
        # A half cosine. A decay of 0 steps becomes 1 step, since its first step is still at the
        # peak.
        fields[SCHEDULE + "decay_steps"] = max(
            1, int(_scheduler_arguments(values)["num_decay_steps"])
        )
        fields[SCHEDULE + "decay_shape"] = "cosine"
    return fields


def _write_schedule(values: Group, context: Context) -> Group:
    name, warmup = values.get(SCHEDULE + "name"), values.get(SCHEDULE + "warmup_steps")
    shape, arguments = _shape(values, context) if name else (None, {})
    return {TYPE: shape, KWARGS: arguments or None, WARMUP: warmup}


def _shape(values: Group, context: Context) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the Hugging Face schedule for a plan, and the schedule's arguments beyond
    the numbers of steps. Old releases do not have such arguments.
    """
    name, minimum = values[SCHEDULE + "name"], values.get(SCHEDULE + "minimum") or 0.0
    warmup, total = values.get(SCHEDULE + "warmup_steps") or 0, values.get(SCHEDULE + "total_steps")
    below = minimum < _peak(values)
    if name in ("linear", "cosine"):
        if not context.since(REWRITTEN):
            # Without arguments polynomial falls to its default end, so it can express that one
            # minimum.
            return (
                "polynomial" if minimum == POLYNOMIAL_END and name == "linear" and below else name
            ), {}
        if not minimum:
            return name, {}
        if name == "cosine":
            return "cosine_with_min_lr", {"min_lr": minimum}
        return ("polynomial", {"lr_end": minimum, "power": 1.0}) if below else ("linear", {})
    if name == "inverse_sqrt" and context.since(REWRITTEN):
        return "inverse_sqrt", {}
    if name == "wsd" and context.since(REWRITTEN) and total and total >= warmup:
        return "warmup_stable_decay", _wsd_arguments(values, total, warmup, minimum)
    return ("constant_with_warmup" if warmup else "constant"), {}


def _wsd_arguments(values: Group, total: int, warmup: int, minimum: float) -> Mapping[str, Any]:
    """Return the arguments of Hugging Face's WSD schedule: the lengths of plateau and decay, and
    the last learning rate as a share of the peak.
    """
    steps = values.get(SCHEDULE + "decay_steps")
    decay = min(max(1, total // TENTH) if steps is None else steps, total - warmup)
    lengths = {"num_stable_steps": total - warmup - decay, "num_decay_steps": decay}
    if not minimum:
        return lengths
    peak = _peak(values)
    near = minimum / peak if peak else 0.0
    # A quotient is rounded, so its product with the peak may miss the minimum by a bit; a
    # neighbouring float may hit it.
    shares = (near, nextafter(near, 0), nextafter(near, inf))
    return {
        **lengths,
        "min_lr_ratio": next((share for share in shares if share * peak == minimum), near),
    }


def _peak(values: Group) -> float:
    peak: float | None = values.get("optimizer.lr")
    return 5e-5 if peak is None else peak


RULE = convert(
    (TYPE, KWARGS, RATIO, WARMUP),
    tuple(
        SCHEDULE + name
        for name in (
            "name",
            "warmup_steps",
            "warmup_from",
            "total_steps",
            "minimum",
            "decay_steps",
            "decay_shape",
        )
    ),
    _read_schedule,
    _write_schedule,
    sees=(PEAK, TOTAL, "optimizer.lr"),
    carries={
        TYPE: (SCHEDULE + "name", SCHEDULE + "minimum", SCHEDULE + "decay_shape"),
        KWARGS: (SCHEDULE + "minimum", SCHEDULE + "total_steps", SCHEDULE + "decay_steps"),
        RATIO: SCHEDULE + "warmup_steps",
        WARMUP: SCHEDULE + "warmup_steps",
    },
    blurs=_is_approximate,
    lossy=(
        "Merak warms up from 0, and decays WSD along a half cosine; stagebridge does not translate"
        " powers, restarts, reduce_lr_on_plateau, or a warmup ratio if the number of steps is unknown"
    ),
    source="merak_trainer.py: create_lr_scheduler; transformers, optimization.py: get_scheduler",
)
