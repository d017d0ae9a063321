"""Rules for parameter groups with their own weight decay or learning rate, and for the ramp of
weight decay over the steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bridge.stack.rules import EFFECTS, Context, Group, convert
from bridge.stack.words import effect_if, give, of, on, some
from compat.automodel.rules.learning_rate import GROUPED as SINCE, SCOPE
from compat.automodel.rules.optimizers import CLASSES

L, RAMP = "lr_scheduler.", "optimizer.decay_ramp."
PLAN = tuple(RAMP + name for name in ("shape", "start", "end", "steps"))
THEIRS = tuple(L + name for name in ("wd_incr_style", "start_wd", "end_wd", "wd_incr_steps"))
GROUPS, SCHEDULER = "optimizer.param_group_overrides", L + "lr_decay_style"
SPARED: Mapping[str, Any] = {"pattern": r"(bias|norm)", "wd_mult": 0.0}
"""Entry of the parameter groups that switches weight decay off for biases and norms."""
SPARED_NAMES = (
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.0.input_layernorm.weight",
    "model.norm.weight",
)
WEIGHT, EMBEDDING, OUTPUT = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
)
RATES = {"optimizer.embedding_lr": EMBEDDING, "optimizer.output_lr": OUTPUT}
"""A table from each plan field for a separate learning rate to the name of a parameter that has
this rate.
"""


def _factors(values: Group) -> Mapping[str, tuple[float, float]] | None:
    """Return the factors on learning rate and weight decay for each kind of parameter. A pattern is
    tested on an example name of each kind.

    The first matching pattern decides. A kind without a matching pattern has factors of 1, and so
    has each without a scheduler, which applies them. The result is None if a group has no readable
    factors.
    """
    groups = (values.get(GROUPS) or ()) if SCHEDULER in values else ()
    try:
        rules = [
            (
                re.compile(str(group["pattern"])),
                float(group.get("lr_mult", 1.0)),
                float(group.get("wd_mult", 1.0)),
            )
            for group in groups
        ]
    except (re.error, KeyError, TypeError, ValueError):
        return None
    factors = {}
    for name in (*SPARED_NAMES, WEIGHT, EMBEDDING, OUTPUT):
        matches = ((rate, decay) for pattern, rate, decay in rules if pattern.search(name))
        factors[name] = next(matches, (1.0, 1.0))
    return factors


def _read_groups(values: Group, context: Context) -> Group:
    if values.get("optimizer._target_") not in CLASSES:
        return {}
    factors = _factors(values) if context.since(SINCE) else None
    if factors is None:
        return {SCOPE: "all"}
    spares = all(factors[name][1] == 0 for name in SPARED_NAMES) and factors[WEIGHT][1] != 0
    rates = {ours: factors[name][0] for ours, name in RATES.items() if factors[name][0] != 1}
    return {SCOPE: "matrices" if spares else "all", **rates}


def _write_groups(values: Group, context: Context) -> Group:
    if not context.since(SINCE):
        return {}
    groups = [dict(SPARED)] if values.get(SCOPE) in ("matrices", "not_layernorm") else []
    for ours, name in RATES.items():
        if values.get(ours, 1.0) != 1:
            # The module's name without the prefix, which differs
            # between models: embed_tokens, lm_head.
            groups.append({"pattern": name.split(".")[-2], "lr_mult": values[ours]})
    return {GROUPS: groups} if groups else {}


def _has_odd_groups(values: Group) -> bool:
    """Whether the groups have factors that no plan can express: on other parameters, or on the
    weight decay of only some biases and norms.
    """
    if not values.get(GROUPS) or SCHEDULER not in values:
        return False
    factors = _factors(values)
    if factors is None:
        return True
    decays = {factors[name][1] for name in SPARED_NAMES}
    usual = (
        len(decays) == 1
        and decays <= {0.0, 1.0}
        and all(factors[name][1] == 1 for name in (WEIGHT, EMBEDDING, OUTPUT))
    )
    full_rates = all(factors[name][0] == 1 for name in (*SPARED_NAMES, WEIGHT))
    # A pattern that matches no example is for parameters that no plan tells apart.
    unseen = any(
        not any(re.search(str(group["pattern"]), name) for name in factors)
        for group in values[GROUPS]
    )
    return unseen or not (usual and full_rates)


RULES = (
    convert(
        THEIRS,
        PLAN,
        # A constant style, or none, is no ramp, nor is one whose ends are equal.
        lambda values, context: (
            dict(zip(PLAN, map(values.get, THEIRS), strict=True))
            if values.get(THEIRS[0]) in ("linear", "cosine")
            and (values.get(THEIRS[1]) is None or values[THEIRS[1]] != values.get(THEIRS[2]))
            else {}
        ),
        give(dict(zip(THEIRS, map(of, PLAN), strict=True)), when=on(PLAN[0])),
        effect=EFFECTS[PLAN[0]],
        carries=dict(zip(THEIRS, PLAN, strict=True)),
        source="components/optim/scheduler.py: OptimizerParamScheduler.get_wd",
    ),
    convert(
        GROUPS,
        (SCOPE, *RATES),
        _read_groups,
        _write_groups,
        effect=effect_if(some(on("optimizer.weight_decay"), on(GROUPS)), EFFECTS[SCOPE]),
        sees=("optimizer._target_", "optimizer.weight_decay", SCHEDULER),
        blurs=_has_odd_groups,
        carries={"optimizer.weight_decay": SCOPE},
        lossy="stagebridge translates groups only for biases and norms, embedding and output layer;"
        " older releases have no groups",
        source="components/optim/optimizer.py: ParamGroupOverride, _build_param_groups; scheduler.py: step",
    ),
)
