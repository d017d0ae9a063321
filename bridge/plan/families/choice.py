"""Chooses the family of the config that a plan is written to: the family that the plan names,
another family that can express all fields of the plan's model, or the nearest family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import isclose
from typing import Any

from bridge.errors import BridgeError
from bridge.plan.equality import plain
from bridge.plan.families.meaning import PREFIX, meaning, spelling
from bridge.plan.families.source import Group
from bridge.plan.families.table import FAMILIES, GENERIC, ORDERED, Family

TELLING = ("model.norm.kind", "model.mlp.gated", "model.embedding.positions")
"""Names of fields that a plan must set before a family is chosen by comparison."""
NONE = (
    "experts",
    "attention.window",
    "attention.windowed",
    "attention.softcap",
    "attention.scale",
    "attention.latent.kv_rank",
    "rotary.layers",
    "rotary.local_base",
    "rotary.scaling.attention",
    "mlp.clamp",
    "mlp.offset",
    "embedding.scale",
    "embedding.softcap",
    "embedding.logit_scale",
    "embedding.residual_scale",
    "embedding.width",
    "moe.layers",
    "moe.scale",
    "moe.groups",
    "moe.top_groups",
)
"""Fields of optional features. If a plan leaves such a field open, the model does not have the
feature.
"""
LATENT = "model.attention.latent.kv_rank"
HEAVY = (
    "model.norm.kind",
    "model.norm.place",
    "model.mlp.gated",
    "model.embedding.positions",
    LATENT,
)
"""Fields that are compared first. A difference in one of these fields counts more than others when
the nearest family is chosen.
"""
UNSAID = (
    "model.family",
    "model.sequence",
    "model.embedding.padded_vocab",
    "model.predicted",
    "model.embedding.max_positions",
    "model.embedding.padding",
    "model.embedding.begin",
    "model.embedding.ends",
)


def says_enough(plan: Group) -> bool:
    """Return whether a plan sets enough of its model to choose a family."""
    return all(plan.get(path) is not None for path in TELLING)


def choose(plan: Group, rope_mapping: bool) -> tuple[Family, bool]:
    """Return the family of the config to write, and whether a config of this family expresses the
    plan's model exactly.

    The family that the plan names is chosen if it expresses the model exactly, else the first
    family that does. If no family does, the named family is chosen if a plan can describe all of
    its layers. Otherwise, the family with the smallest difference is chosen. A plan that sets too
    little of the model gets the family that the plan names, or else the generic family.
    """
    model = {
        path: value for path, value in plan.items() if path.startswith(PREFIX) and value is not None
    }
    return _choose(tuple(sorted(model.items())), rope_mapping)


@lru_cache(64)
def _choose(model: tuple[tuple[str, Any], ...], rope_mapping: bool) -> tuple[Family, bool]:
    plan = dict(model)
    plan_family = FAMILIES.get(plan.get("model.family") or "")
    if plan_family is not None and not differing(plan, plan_family, rope_mapping):
        return plan_family, True
    if not says_enough(plan):
        return (plan_family or GENERIC), False
    distances = []
    for family in ORDERED:
        losses = differing(plan, family, rope_mapping)
        if not losses:
            return family, True
        distances.append((sum(10 if path in HEAVY else 1 for path in losses), family.order, family))
    if plan_family is not None and not plan_family.foreign:
        return plan_family, False
    return min(distances, key=lambda one: one[:2])[2], False


def differing(plan: Group, family: Family, rope_mapping: bool) -> tuple[str, ...]:
    """Return the paths of the model's fields for which a config of `family` has another value than
    `plan`, or no value.

    If the family has another fixed value for one of the fields `HEAVY`, only fields for which the
    family has a fixed value are compared.
    """
    facts: tuple[str, ...] = ()
    for name, value in family.facts.items():
        path = PREFIX + name
        without_experts = path.startswith("model.moe.") and not plan.get("model.experts")
        if not without_experts and plan.get(path) is not None and not _same(plan[path], value):
            facts += (path,)
    # A family that differs in a heavy field is not the one; spelling and reading it costs far more
    # than this look.
    if facts and any(path in HEAVY for path in facts):
        return facts
    try:
        back = meaning(spelling(plan, family, rope_mapping), family)
    except BridgeError:  # the family cannot express a value, so nothing can be compared
        return tuple(plan)
    return tuple(dict.fromkeys((*facts, *_different(plan, back, family))))


def _different(plan: Group, back: Mapping[str, Any], family: Family) -> Iterator[str]:
    mine, theirs = plain(plan), plain(back)
    for path in _comparable():
        if path.startswith("model.moe.") and not plan.get("model.experts"):
            continue
        # Latent attention makes keys and values for every head, so that their number has no effect.
        if path == "model.kv_heads" and plan.get(LATENT) is not None:
            continue
        if (path in mine or path.removeprefix(PREFIX) in NONE) and not _same(
            mine.get(path), theirs.get(path)
        ):
            yield path


@lru_cache(1)
def _comparable() -> tuple[str, ...]:
    paths = {PREFIX + path for family in (GENERIC, *ORDERED) for path in family.paths}
    return tuple(sorted(paths - set(UNSAID)))


def _same(mine: Any, theirs: Any) -> bool:
    # Factors come through roots and quotients, each of which rounds.
    if isinstance(mine, float) and isinstance(theirs, int | float) and not isinstance(theirs, bool):
        return isclose(mine, theirs, rel_tol=1e-9)
    if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        return tuple(mine) == tuple(theirs)
    return bool(mine == theirs)
