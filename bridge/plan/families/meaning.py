"""Converts the keys of a config to fields of a model and back. The family's row in the table
determines the meaning of each key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from bridge.plan.families.source import Group, Source, Target
from bridge.plan.families.table import GENERIC, Family
from bridge.plan.section import below

PREFIX = "model."
EXPERTS = "moe."


def meaning(keys: Group, family: Family) -> Mapping[str, Any]:
    """Return the values of plan fields that a config of `family` sets, by path such as
    `model.layers`.

    Fields without a value are left out. Raises `ConfigError` for a value that no plan can hold.
    """
    # A text can be a key of the cache, a mapping cannot.
    return _meaning(json.dumps(dict(keys), sort_keys=True), family.name, family)


@lru_cache(64)
def _meaning(text: str, name: str, family: Family) -> Mapping[str, Any]:
    model = _read(Source(json.loads(text), family.defaults, family is not GENERIC), family)
    # Classes with experts have defaults for all of their settings, also in a file without experts.
    if model.get("experts") is None and family is not GENERIC:
        model = {path: value for path, value in model.items() if not path.startswith(EXPERTS)}
    return {PREFIX + path: value for path, value in model.items() if value is not None}


WIDTH = "attention.head_size"
FIRST = ("layers", "hidden", "heads", "embedding.max_positions", WIDTH)
"""Names of fields that are read first, because other fields are computed from them."""


def _read(source: Source, family: Family) -> dict[str, Any]:
    model: dict[str, Any] = {"family": family.name} if family.name else {}
    first = [path for path in FIRST if path in family.keys]
    for path in (*first, *(path for path in family.keys if path not in FIRST)):
        key = family.keys[path]
        value = key.codec.read(source.find(*key.names), source, model)
        if value is not None:
            model[path] = value
    model.update(family.facts)
    for part, options in family.parts:
        model.update(part.read(source, model, options))
    if not model.get("experts") or not any(model.get("moe.layers") or (True,)):
        model.pop("experts", None)
    if not model.get("moe.groups"):
        model.pop("moe.group_best", None)
    if not model.get("norm.parallel"):
        model.pop("norm.shared", None)
    return _place_fields(model)


def _place_fields(model: dict[str, Any]) -> dict[str, Any]:
    """Return the model's fields. Fields of rotary positions are left out if the model has another
    kind of positions.
    """
    if model.get("embedding.positions", "rotary") == "rotary":
        return model
    return {path: value for path, value in model.items() if not path.startswith("rotary.")}


def spelling(plan: Group, family: Family, rope_mapping: bool) -> Mapping[str, Any]:
    """Return the keys and values that a config of `family` needs for the plan's model. Keys without
    a value are left out.

    If `rope_mapping` is true, rotary positions are written as one mapping (`rope_parameters`).
    """
    return _write(below(PREFIX, plan), family, rope_mapping)


def _write(model: Group, family: Family, rope_mapping: bool) -> dict[str, Any]:
    target, keys = Target(family.defaults, rope_mapping), {}
    for path, key in family.keys.items():
        if not key.names or (
            path.startswith(EXPERTS) and not model.get("experts") and family is not GENERIC
        ):
            continue
        value = (
            key.codec.write(model.get(path), target, model)
            if needs_key(path, model, family)
            else None
        )
        if value is None and family is not GENERIC:
            value = target.open(key.names[0]) if path in OPEN else None
        # Two fields may share a key, such as the one width of all layers; the first that has a
        # value writes it.
        if value is not None and key.names[0] not in keys:
            keys[key.names[0]] = value
    for part, options in family.parts:
        keys |= {
            key: value
            for key, value in part.write(model, target, options).items()
            if value is not None
        }
    return keys


def needs_key(path: str, model: Group, family: Family) -> bool:
    """Return whether the config needs a key for this field.

    A field without a value needs a key only if the family is known, because each family has its own
    value for "not set".
    """
    return model.get(path) is not None or family is not GENERIC


OPEN = ("attention.softcap", "embedding.softcap", "attention.window", "mlp.clamp")
"""Fields such as `attention.window` that a model sets only if it has the feature. If such a field
is open, a family's default for its key is overwritten with null.
"""
