"""Parameter groups of a recipe with their own weight decay or learning rate, and the ramp of weight decay over the steps."""

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
"""The parameter group of biases and norms, without weight decay."""
SPARED_NAMES = ("model.layers.0.self_attn.q_proj.bias", "model.layers.0.input_layernorm.weight", "model.norm.weight")
WEIGHT, EMBEDDING, OUTPUT = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight", "lm_head.weight"
RATES = {"optimizer.embedding_lr": EMBEDDING, "optimizer.output_lr": OUTPUT}
"""Examples of the kinds of parameters that a plan distinguishes, by their names in most models of Hugging Face."""


def _read_ramp(values: Group, context: Context) -> Group:
    if values.get(THEIRS[0]) not in ("linear", "cosine"):
        return {}
    return dict(zip(PLAN, (values.get(path) for path in THEIRS), strict=True))


def _write_ramp(values: Group, context: Context) -> Group:
    told = [values.get(path) for path in PLAN]
    return dict(zip(THEIRS, told, strict=True)) if told[0] else {}


def _factors(values: Group) -> Mapping[str, tuple[float, float]] | None:
    """Factors on learning rate and weight decay of each kind of parameter, by the first matching pattern; None: not readable."""
    groups = values.get(GROUPS) or ()
    try:
        found = [(re.compile(str(group["pattern"])), _factor(group, "lr_mult"), _factor(group, "wd_mult")) for group in groups]
    except (re.error, KeyError, TypeError, ValueError):
        return None
    names = (*SPARED_NAMES, WEIGHT, EMBEDDING, OUTPUT)
    return {name: next(((rate, decay) for pattern, rate, decay in found if pattern.search(name)), (1.0, 1.0)) for name in names}


def _factor(group: Mapping[str, Any], name: str) -> float:
    return float(group.get(name, 1.0))


def _read_groups(values: Group, context: Context) -> Group:
    if values.get("optimizer._target_") not in CLASSES:
        return {}
    factors = _factors(values) if context.since(SINCE) else None
    if factors is None:
        return {SCOPE: "all"}
    spared = all(factors[name][1] == 0 for name in SPARED_NAMES) and factors[WEIGHT][1] != 0
    rates = {ours: factors[name][0] for ours, name in RATES.items() if factors[name][0] != 1}
    return {SCOPE: "matrices" if spared else "all", **rates}


def _write_groups(values: Group, context: Context) -> Group:
    if not context.since(SINCE):
        return {}
    spared = [dict(SPARED)] if values.get(SCOPE) in ("matrices", "not_layernorm") else []
    rates = [_rated(name, values[ours]) for ours, name in RATES.items() if values.get(ours, 1.0) != 1]
    return {GROUPS: [*spared, *rates]} if spared or rates else {}


def _rated(name: str, factor: float) -> dict[str, Any]:
    return {"pattern": name.split(".")[-2], "lr_mult": factor}


def _odd(values: Group) -> bool:
    """Whether groups have factors that no plan has: for other parameters, or on the decay of only some biases and norms."""
    factors = _factors(values)
    if factors is None or not values.get(GROUPS):
        return bool(values.get(GROUPS))
    decays = {factors[name][1] for name in SPARED_NAMES}
    usual = len(decays) == 1 and decays <= {0.0, 1.0} and all(factors[name][1] == 1 for name in (WEIGHT, EMBEDDING, OUTPUT))
    rated = all(factors[name][0] == 1 for name in (*SPARED_NAMES, WEIGHT))
    unseen = any(not any(re.search(str(group["pattern"]), name) for name in factors) for group in values[GROUPS])
    return unseen or not (usual and rated)


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
        (SCOPE, *RATES),
        _read_groups,
        _write_groups,
        effect=lambda values: EFFECTS[SCOPE] if values.get("optimizer.weight_decay") or values.get(GROUPS) else Effect.NONE,
        sees=("optimizer._target_", "optimizer.weight_decay"),
        blurs=_odd,
        carries={"optimizer.weight_decay": SCOPE},
        lossy="a plan has groups only for biases and norms, embedding and output layer; older releases have no groups",
        source="components/optim/optimizer.py: ParamGroupOverride, _build_param_groups",
    ),
)
