"""What DeepSpeed does alike in all runs. The model, its loss and its data are the training script's."""

from __future__ import annotations

from bridge.stack.rules import Group, Habit, habits
from compat.deepspeed.rules.optimizers import SHAPES


def _first_lr_step(values: Group) -> int:
    # A scheduler of DeepSpeed's own sets the first rate twice: when it is made, and in its first step.
    return -1 if values.get("scheduler.type") in SHAPES else 0


RULES = habits(
    {
        "clip_scope": Habit(
            "model",
            "DeepSpeed bounds the norm of the whole model's gradients",
            "runtime/utils.py: clip_grad_norm_, get_global_norm",
        ),
        "first_lr_step": Habit(
            _first_lr_step,
            "the schedule in the script starts with the first update; DeepSpeed's own lag one step behind",
            "runtime/lr_schedules.py: last_batch_iteration; runtime/engine.py: _take_model_step",
            "scheduler.type",
        ),
        "overflow_steps": Habit(
            "skipped",
            "in DeepSpeed, a step that an overflow leaves out does not count",
            "runtime/engine.py: _take_model_step",
        ),
        "nonfinite": Habit(
            "continue",
            "DeepSpeed does not stop at a loss that is no finite number",
            "runtime/engine.py: check_grad_overflow",
        ),
        "muon_qkv": Habit(
            "whole",
            "DeepSpeed's Muon takes a fused matrix of queries, keys and values as a whole",
            "runtime/zero/muon/original_muon.py: muon_update",
        ),
        "inverse_sqrt": Habit(
            "steps",
            "the schedule in the script counts the inverse square root in steps, and without warmup from the first step",
            "the written schedule (DeepSpeed has none of this shape)",
        ),
    }
)
