"""Settings without which a Fast-LLM run does not train."""

from __future__ import annotations

from bridge.requirements import Need

NEEDS = (
    Need(
        ("training.train_iters",),
        "Fast-LLM trains nothing without this setting",
        "engine/training/config.py: train_iters is 0 by default",
        sized=False,
    ),
)
