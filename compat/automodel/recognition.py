"""Recognises recipes of AutoModel and its pipeline configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RECIPE_MARKS: Mapping[str, int] = {
    "recipe": 2,
    "step_scheduler": 2,
    "distributed": 1,
    "dist_env": 1,
    "distributed.pipeline": 2,
    "distributed.strategy": 2,
    "distributed.pp_size": 2,
    "autopipeline": 3,
    "model._target_": 1,
    "optimizer._target_": 1,
    "clip_grad_norm.max_norm": 1,
    "lr_scheduler.lr_decay_style": 1,
    "pp_schedule": 3,
}
"""Keys that identify a recipe or a pipeline config, each with a weight. A higher weight is stronger
evidence.
"""


def score(data: Any) -> int:
    """Count the keys in a mapping that identify a recipe. Keys that only AutoModel has count
    two or three times.
    """
    if not isinstance(data, Mapping):
        return 0
    return sum(weight for path, weight in RECIPE_MARKS.items() if _has_path(data, path))


def _has_path(data: Any, path: str) -> bool:
    for name in path.split("."):
        if not isinstance(data, Mapping) or name not in data:
            return False
        data = data[name]
    return True
