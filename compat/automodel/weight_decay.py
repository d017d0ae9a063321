"""Which parameters a recipe decays, and how the decay changes over the steps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bridge.rules import EFFECTS, Context, Effect, Group, convert
from compat.automodel.optimizers import CLASSES

L, RAMP = "lr_scheduler.", "optimizer.decay_ramp."
PLAN = tuple(RAMP + name for name in ("shape", "start", "end", "steps"))
THEIRS = tuple(L + name for name in ("wd_incr_style", "start_wd", "end_wd", "wd_incr_steps"))
GROUPS, SCOPE, SINCE = "optimizer.param_group_overrides", "optimizer.decay_scope", "0.5.0.post20260822"
SPARED: Mapping[str, Any] = {"pattern": r"(bias|norm)", "wd_mult": 0.0}
"""The group of biases and norms, without decay."""
NAMES = ("model.layers.0.self_attn.q_proj.bias", "model.layers.0.input_layernorm.weight", "model.norm.weight")
WEIGHT = "model.layers.0.self_attn.q_proj.weight"


def _read_ramp(values: Group, context: Context) -> Group:
    if values.get(THEIRS[0]) not in ("linear", "cosine"):
        return {}
    return dict(zip(PLAN, (values.get(path) for path in THEIRS), strict=True))


def _write_ramp(values: Group, context: Context) -> Group:
    told = [values.get(path) for path in PLAN]
    return dict(zip(THEIRS, told, strict=True)) if told[0] else {}


def _spares(group: Any) -> bool:
    """Whether a group takes decay from biases and norms, and from nothing else."""
    if not isinstance(group, Mapping) or group.get("wd_mult") != 0:
        return False
    try:
        pattern = re.compile(str(group.get("pattern")))
    except re.error:
        return False
    return all(pattern.search(name) for name in NAMES) and not pattern.search(WEIGHT)


def _read_scope(values: Group, context: Context) -> Group:
    if values.get("optimizer._target_") not in CLASSES:
        return {}
    grouped = context.since(SINCE) and any(map(_spares, values.get(GROUPS) or ()))
    return {SCOPE: "matrices" if grouped else "all"}


def _write_scope(values: Group, context: Context) -> Group:
    return {GROUPS: [dict(SPARED)]} if values.get(SCOPE) == "matrices" and context.since(SINCE) else {}


RULES = (
    convert(
        THEIRS,
        PLAN,
        _read_ramp,
        _write_ramp,
        effect=EFFECTS[PLAN[0]],
        carries=dict(zip(THEIRS, PLAN, strict=True)),
        source="components/optim/scheduler.py: OptimizerParamScheduler.get_wd",
    ),
    convert(
        GROUPS,
        SCOPE,
        _read_scope,
        _write_scope,
        effect=lambda values: EFFECTS[SCOPE] if values.get("optimizer.weight_decay") else Effect.NONE,
        sees=("optimizer._target_", "optimizer.weight_decay"),
        blurs=lambda values: any(not _spares(group) for group in values.get(GROUPS) or ()),
        carries={"optimizer.weight_decay": SCOPE},
        lossy="a plan knows groups that spare biases and norms; older releases decay all parameters",
        source="components/optim/optimizer.py: ParamGroupOverride, _trainable_params_or_groups",
    ),
)
