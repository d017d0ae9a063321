"""Rules between the learning-rate schedules of a recipe and of the plan. Both count optimizer
steps.
"""

from __future__ import annotations

from bridge.plan.equality import FACTORS
from bridge.stack.rules import Context, Group, convert

STYLES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}
FLAGS = {ours: theirs for theirs, ours in STYLES.items()}
L, S = "lr_scheduler.", "optimizer.schedule."
LENGTH, LAST = L + "wsd_decay_steps", L + "lr_wsd_decay_style"
RAMP = "optimizer.decay_ramp.shape"
"""Plan field for the shape of the weight-decay ramp. Recipes set the ramp in the section of the
learning-rate schedule. The default shape is cosine (optimizer.py: LRSchedulerConfig).
"""
RESUMED = "run.resumed_schedule"
"""Plan field for the schedule that a resumed run uses. Recipes set it in the section of the
learning-rate schedule.
"""
SCOPE, GROUPED = "optimizer.decay_scope", "0.5.0.post20260822"
"""Plan field for the parameters that decay, and the release that has groups of parameters."""
SEES = (S + "name", S + "warmup_steps", RAMP, SCOPE, *FACTORS)
"""Plan fields that decide whether a written recipe has the section `lr_scheduler`."""
TENTH = 10
"""If the plan has no length for WSD's final decay, the decay takes the number of steps in the
schedule divided by this number.
"""


def _read_schedule(values: Group, context: Context) -> Group:
    # Without the section AutoModel builds no scheduler, and the rate stays.
    if L + "lr_decay_style" not in values:
        return {S + "name": "constant", S + "warmup_steps": 0}
    name, warmup = (
        STYLES.get(values.get(L + "lr_decay_style") or ""),
        values.get(L + "lr_warmup_steps"),
    )
    # A constant rate without warmup has no length. With a warmup
    # it has one: lr_decay_steps must be more than the warmup.
    ends = name != "constant" or bool(warmup)
    return {
        S + "name": name,
        S + "warmup_steps": warmup,
        S + "warmup_from": values.get(L + "init_lr") if warmup != 0 else None,
        S + "total_steps": values.get(L + "lr_decay_steps") if ends else None,
        S + "minimum": values.get(L + "min_lr") if name != "constant" else None,
        S + "decay_steps": values.get(LENGTH) if name == "wsd" else None,
        S + "decay_shape": values.get(LAST) if name == "wsd" else None,
    }


def has_groups(values: Group, context: Context) -> bool:
    """Whether a recipe for the plan has groups of parameters with factors of their own."""
    spared = values.get(SCOPE) in ("matrices", "not_layernorm")
    return context.since(GROUPED) and (spared or any(values.get(path, 1) != 1 for path in FACTORS))


def writes_section(values: Group, context: Context) -> bool:
    """Whether a recipe for the plan needs the section `lr_scheduler`. A constant learning rate
    needs none, unless other settings of the section are set, or groups of parameters, whose factors
    the scheduler alone applies.
    """
    beside = values.get(RAMP) or values.get(RESUMED) is not None or has_groups(values, context)
    name, warms = values.get(S + "name"), values.get(S + "warmup_steps") != 0
    return name in FLAGS and bool(name != "constant" or warms or beside)


def _write_schedule(values: Group, context: Context) -> Group:
    name, steps = values.get(S + "name"), values.get(S + "decay_steps")
    if name is None or not writes_section(values, context):
        return {}
    decay: dict[str, object] = {}
    if name == "wsd":
        # AutoModel stops without either of them.
        length = max(1, (values.get(S + "total_steps") or 0) // TENTH) if steps is None else steps
        decay = {LENGTH: length, LAST: values.get(S + "decay_shape") or "linear"}
    return {
        L + "lr_decay_style": FLAGS[name],
        L + "lr_warmup_steps": values.get(S + "warmup_steps"),
        L + "init_lr": values.get(S + "warmup_from"),
        L + "lr_decay_steps": values.get(S + "total_steps"),
        L + "min_lr": values.get(S + "minimum"),
        **decay,
    }


RULE = convert(
    (
        *(
            L + name
            for name in ("lr_decay_style", "lr_warmup_steps", "init_lr", "lr_decay_steps", "min_lr")
        ),
        LENGTH,
        LAST,
    ),
    tuple(
        S + name
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
    sees=(RAMP, RESUMED, SCOPE, *FACTORS),
    carries={
        L + "lr_decay_style": S + "name",
        L + "lr_warmup_steps": S + "warmup_steps",
        L + "init_lr": S + "warmup_from",
        L + "lr_decay_steps": S + "total_steps",
        L + "min_lr": S + "minimum",
        LENGTH: S + "decay_steps",
        LAST: S + "decay_shape",
    },
    source="optim/optimizer.py: LRSchedulerConfig.build; optim/scheduler.py: OptimizerParamScheduler",
)
