"""The table of rules between the keys of a model's config and `Plan`: one rule for each group of
keys that are read together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

from bridge.plan.families import (
    FAMILIES,
    GENERIC,
    apart,
    choose,
    family_of,
    groups,
    meaning,
    read_by,
    spelling,
    stands_for,
)
from bridge.plan.families.keys import USES
from bridge.plan.families.table import Family
from bridge.plan.plan import paths
from bridge.plan.section import fields
from bridge.stack.rules import (
    EFFECTS,
    Context,
    Effect,
    Group,
    Rule,
    Use,
    convert,
    each_only_ours,
    nothing,
    only_ours,
    worst,
)
from compat.huggingface.releases import GROUPED
from compat.huggingface.schema import HuggingFace

TYPE = "model_type"
MODEL = tuple(path for path in paths() if path.startswith("model."))
KEYS = tuple(key for keys, _ in groups() for key in keys)


class _Settings:
    """Settings of one config as a key of a cache: the same object, not an equal one."""

    def __init__(self, values: Group) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Settings) and self.values is other.values

    def __hash__(self) -> int:
        return id(self.values)


def _read_fields(ours: tuple[str, ...]) -> Callable[[Group, Context], Group]:
    def read(values: Group, context: Context) -> Group:
        facts = _meaning_of(_Settings(values))
        return {path: facts[path] for path in ours if path in facts}

    return read


# Each row of the table reads a part of the same config.
@lru_cache(1)
def _meaning_of(settings: _Settings) -> Mapping[str, Any]:
    values = settings.values
    config = {key: values[key] for key in KEYS if key in values}
    return meaning(config, family_of(values.get(TYPE)) or GENERIC)


def _write_keys(theirs: tuple[str, ...]) -> Callable[[Group, Context], Group]:
    def write(values: Group, context: Context) -> Group:
        plan = {path: values[path] for path in MODEL if path in values}
        family, keys = _spell_model(
            tuple(sorted(plan.items())), context.since(GROUPED) and not apart(context.had)
        )
        if theirs == (TYPE,):
            return {TYPE: family.name} if family.name else {}
        return {key: keys[key] for key in theirs if key in keys}

    return write


# Every row of the table writes a part of the same config, so the choice of the family is made once.
@lru_cache(32)
def _spell_model(
    plan: tuple[tuple[str, Any], ...], rope_mapping: bool
) -> tuple[Family, Mapping[str, Any]]:
    values = dict(plan)
    family, _ = choose(values, rope_mapping)
    keys = spelling(values, family, rope_mapping)
    return family, {
        key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()
    }


UNTOLD = "no known family of models says what this key does in this model"
OWN = "not every family of models can express this field; the nearest family is used"


def _group_rule(keys: tuple[str, ...], model_paths: tuple[str, ...]) -> Rule:
    ours = tuple(f"model.{path}" for path in model_paths)
    # The family decides about every key, so each row sees the whole config and the whole model.
    others = tuple(path for path in (*KEYS, TYPE, *MODEL) if path not in keys and path not in ours)
    carries = (
        {key: tuple(f"model.{path}" for path in stands_for()[key]) for key in keys}
        if keys
        else {TYPE: ours}
    )
    effect = worst(EFFECTS[path] for path in ours)
    return convert(
        keys,
        ours,
        _read_fields(ours),
        _write_keys(keys),
        effect=effect,
        sees=others,
        carries=carries,
        blurs=lambda values: (family_of(values.get(TYPE)) or GENERIC).leaves_open(
            *(key for key in keys if values.get(key) is not None)
        ),
        tells=UNTOLD,
        lossy=OWN,
        note="" if keys else "a fact that the family of the model determines",
        model=True,
    )


def _beyond(key: str, note: str, harmless: tuple[Any, ...], use: Use) -> Rule:
    """Return a rule for a key that no plan field stands for. It has no effect if its value is null
    or in `harmless`, or if the class of the family does not read it.
    """

    def effect(values: Group) -> Effect:
        quiet = values.get(key) in (None, *harmless) or _is_unread(key, values.get(TYPE))
        return Effect.NONE if quiet else use.effect

    return convert(key, (), nothing, nothing, effect=effect, sees=(TYPE,), note=note, model=True)


def _is_unread(key: str, family: str | None) -> bool:
    entry = FAMILIES.get(family or "")
    return entry is not None and not entry.foreign and key not in read_by(entry.name)


BEYOND: tuple[tuple[str, tuple[str, ...], tuple[Any, ...], Use], ...] = (
    (
        "the format of stored weights; a run sets its own format",
        ("torch_dtype", "dtype"),
        (),
        Use.FORM,
    ),
    (
        "stagebridge does not translate noise on the router's input",
        ("router_jitter_noise",),
        (0, 0.0),
        Use.COMPUTES,
    ),
    (
        "stagebridge does not translate these kinds of blocks",
        ("hybrid_override_pattern",),
        (),
        Use.COMPUTES,
    ),
    (
        "stagebridge does not translate quantised stored weights",
        ("quantization_config",),
        (),
        Use.COMPUTES,
    ),
    (
        "the order in which partial sums were added when an old model was trained",
        ("pretraining_tp",),
        (1,),
        Use.FORM,
    ),
)
SWITCHES = {
    "clip_qkv": (),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "apply_residual_connection_post_layernorm": (False,),
    "use_bidirectional_attention": (False,),
    "layerdrop": (0, 0.0),
    "layer_norm_elementwise_affine": (True,),
}
"""Keys that only some families have, each with the values that have no effect."""


def _rest_rule(keys: tuple[str, ...], note: str) -> Rule:
    """Return the rule for all other keys. A key that the class of the family does not read has no
    effect; of the others, those without a known use may change what the model computes.
    """

    def effect(values: Group) -> Effect:
        family = values.get(TYPE)
        uses = [
            USES.get(key, Use.UNREAD if _is_unread(key, family) else Use.COMPUTES)
            for path in keys
            for key in values.get(path) or {}
        ]
        return worst(use.effect for use in uses)

    return convert(keys, (), nothing, nothing, effect=effect, sees=(TYPE,), note=note, model=True)


NOT_HERE = "a model's config describes the model, not its training"
NO_KEY = "a model's config has no key for this field"


@cache
def table() -> tuple[Rule, ...]:
    """Return all rules. Each key and each plan field is in exactly one rule."""
    others = tuple(path for path in (*KEYS, *MODEL) if path != "model.family")
    family = convert(
        TYPE,
        "model.family",
        write=_write_keys((TYPE,)),
        effect=EFFECTS["model.family"],
        sees=others,
        lossy="no family of models can express the whole model; the nearest family is used",
    )
    rules = (family, *(_group_rule(keys, model_paths) for keys, model_paths in groups()))
    rows = (
        *(
            _beyond(key, note, harmless, use)
            for note, keys, harmless, use in BEYOND
            for key in keys
        ),
        *(
            _beyond(key, "a switch of one family of models", harmless, Use.COMPUTES)
            for key, harmless in SWITCHES.items()
        ),
    )
    rule_keys = {path for rule in (*rules, *rows) for path in rule.theirs}
    rest = tuple(path for path in fields(HuggingFace) if path not in rule_keys)
    note = "names, tokens and classes, and settings of layers that stagebridge does not translate"
    model_paths = {path for rule in rules for path in rule.ours}
    without_key = each_only_ours(*(path for path in MODEL if path not in model_paths), note=NO_KEY)
    training = tuple(only_ours(path, note=NOT_HERE) for path in paths() if path not in MODEL)
    return (*rules, *without_key, *training, *rows, _rest_rule(rest, note))
