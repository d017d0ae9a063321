"""Rules that convert the length, seed and logs of a DeepSpeed run to the plan's fields, and back."""

from __future__ import annotations

from bridge.stack.rules import count_rule, each_only_ours, rename

RULES = (
    rename("code.steps", "run.steps"),
    rename("code.epochs", "run.epochs"),
    rename("code.seed", "run.seed"),
    count_rule(
        "steps_per_print",
        "run.log_interval",
        never=None,
        source="runtime/engine.py: _report_progress",
    ),
    rename("wall_clock_breakdown", "run.timers", source="runtime/engine.py: wall_clock_breakdown"),
    *each_only_ours(
        "run.save_interval",
        "run.save_optimizer",
        "run.save_random",
        "run.load_optimizer",
        "run.load_random",
        "run.eval_interval",
        "run.collect_interval",
        "run.loaders",
        "run.backend",
        "run.timeout",
        note="DeepSpeed has no key for this setting; the training script contains it",
    ),
)
