"""Families of models in Hugging Face's `config.json`: converts the keys of each model type to plan
fields, and plan fields to keys.

The facts are in a table (`families.json`) with one row for each model type. A row lists the plan
fields that have the same value in every model of the type, the key of each other plan field, and
the groups of keys that have a meaning only together. The defaults of transformers' own config
classes are in `defaults.json`.
"""

from __future__ import annotations

from bridge.plan.families.choice import choose as choose
from bridge.plan.families.choice import differing as differing
from bridge.plan.families.choice import says_enough as says_enough
from bridge.plan.families.meaning import meaning as meaning
from bridge.plan.families.meaning import spelling as spelling
from bridge.plan.families.rope import apart as apart
from bridge.plan.families.source import NULL as NULL
from bridge.plan.families.table import FAMILIES as FAMILIES
from bridge.plan.families.table import GENERIC as GENERIC
from bridge.plan.families.table import ROTARY as ROTARY
from bridge.plan.families.table import Family as Family
from bridge.plan.families.table import family_of as family_of
from bridge.plan.families.table import groups as groups
from bridge.plan.families.table import of_class as of_class
from bridge.plan.families.table import read_by as read_by
from bridge.plan.families.table import stands_for as stands_for
