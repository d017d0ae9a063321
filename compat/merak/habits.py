"""What Merak does alike in all runs."""

from __future__ import annotations

from bridge.stack.rules import Group, Habit, habits

AUTOCAST = ("cuda_amp", "amp", "apex")


def automatic(values: Group) -> bool:
    """Return whether automatic mixed precision determines the number formats."""
    return not values.get("args.fp16") and values.get("args.half_precision_backend") in AUTOCAST


def _clip_scope(values: Group) -> str:
    # Automatic mixed precision is translated to fp16, and a trap says how it clips.
    return "model" if values.get("args.fp16") or automatic(values) else "rank"


RULES = habits(
    {
        "clip_scope": Habit(
            _clip_scope,
            "Merak bounds the norm of each rank's own gradients, except in fp16",
            "core/merak_engine.py: clip_fp32_gradients",
            "args.fp16 args.half_precision_backend args.max_grad_norm",
        ),
        "first_lr_step": Habit(
            0,
            "Merak's first update has the rate at the start of the schedule",
            "core/merak_engine.py: _exec_optimizer_step; torch's LambdaLR",
        ),
        "overflow_steps": Habit(
            "counted",
            "Merak's schedule counts steps that an overflow leaves out",
            "core/merak_engine.py: _exec_optimizer_step",
        ),
        "dropout_ranks": Habit(
            "alike",
            "Merak's data ranks have one seed",
            "core/recompute/checkpointing.py: model_parallel_cuda_manual_seed",
        ),
        "nonfinite": Habit(
            "continue",
            "Merak does not check for losses that are no finite number",
            "core/merak_engine.py: _exec_optimizer_step",
        ),
        "inverse_sqrt": Habit(
            "ten_thousand_steps",
            "without warmup, Merak's inverse square root counts steps in ten thousands",
            "transformers, optimization.py: get_inverse_sqrt_schedule",
        ),
    }
)
