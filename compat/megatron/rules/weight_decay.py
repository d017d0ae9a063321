"""Rules for the parameters that Megatron decays, and for the change of the decay over the steps."""

from __future__ import annotations

from bridge.stack.rules import EFFECTS, Context, Group, convert, nothing
from bridge.stack.words import effect_if, give, has_value, on
from compat.megatron.rules.learning_rate import steps

RAMP = "optimizer.decay_ramp."
PLAN = tuple(RAMP + name for name in ("shape", "start", "end", "steps"))
START, END, STYLE = "start_weight_decay", "end_weight_decay", "weight_decay_incr_style"


# Under the style `constant`, validate_args sets both ends to weight_decay, and there is no ramp.
SHAPES = ("linear", "cosine")
DECAY = "optimizer.weight_decay"


def _read_decay(values: Group, context: Context) -> Group:
    # A ramp sets the decay at every step, and one whose ends are equal is no ramp.
    flat = values.get(STYLE) in SHAPES and values.get(START) == values.get(END)
    return {DECAY: values.get(END if flat else "weight_decay")}


RULES = (
    convert(
        "weight_decay",
        DECAY,
        _read_decay,
        sees=(START, END, STYLE),
        source="core/optimizer_param_scheduler.py: step, get_wd",
    ),
    convert(
        (START, END, STYLE),
        PLAN,
        lambda values, context: (
            dict(
                zip(
                    PLAN,
                    (values[STYLE], values.get(START), values.get(END), steps(values, "train")),
                    strict=True,
                )
            )
            if values.get(STYLE) in SHAPES and values.get(START) != values.get(END)
            else {}
        ),
        # Megatron has no argument for the length of the ramp.
        lambda values, context: (
            {STYLE: values[PLAN[0]], START: values[PLAN[1]], END: values[PLAN[2]]}
            if values.get(PLAN[0]) and None not in (values.get(PLAN[1]), values.get(PLAN[2]))
            else {}
        ),
        effect=EFFECTS[PLAN[0]],
        sees=("train_iters", "train_samples", "global_batch_size"),
        carries={START: PLAN[1], END: PLAN[2], STYLE: (PLAN[0], PLAN[3])},
        lossy="Megatron's ramp of the weight decay always lasts the whole run",
        source="training.py: get_optimizer_param_scheduler, wd_incr_steps; optimizer_param_scheduler.py: get_wd",
    ),
    convert(
        (),
        "optimizer.decay_scope",
        give("optimizer.decay_scope", "matrices", has_value("weight_decay")),
        nothing,
        effect=effect_if(on("weight_decay"), EFFECTS["optimizer.decay_scope"]),
        sees=("weight_decay",),
        carries={"weight_decay": "optimizer.decay_scope"},
        lossy="Megatron never decays biases and parameters of one dimension",
        note="Megatron never decays biases and parameters of one dimension",
        source="optimizer/__init__.py: get_standard_config_overrides, up to 0.15 _get_param_groups",
    ),
)
