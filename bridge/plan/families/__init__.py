"""Families of models in Hugging Face's `config.json`: converts the keys of each model type to plan
fields, and plan fields to keys.

The facts are in a table (`families.json`) with one row for each model type. A row lists the plan
fields that have the same value in every model of the type, the key of each other plan field, and
the groups of keys that have a meaning only together. The defaults of transformers' own config
classes are in `defaults.json`.
"""

from __future__ import annotations

from bridge.plan.families.choice import (
    choose as choose,
    differing as differing,
    says_enough as says_enough,
)
from bridge.plan.families.meaning import meaning as meaning, spelling as spelling
from bridge.plan.families.rope import apart as apart
from bridge.plan.families.source import NULL as NULL
from bridge.plan.families.table import (
    FAMILIES as FAMILIES,
    GENERIC as GENERIC,
    ROTARY as ROTARY,
    Family as Family,
    family_of as family_of,
    groups as groups,
    of_class as of_class,
    read_by as read_by,
    stands_for as stands_for,
)
