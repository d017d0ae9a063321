"""Hypothesis strategies for models' configs: a family with valid sizes, and any keys of other
families.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from bridge.plan.families import FAMILIES
from bridge.plan.families.setting_types import REST
from bridge.plan.section import fields
from bridge.stack.dialect import Config
from bridge.testing.models import KEYS, of_family
from bridge.testing.strategies import Group, StrategyCase, StrategyPart, words
from compat.huggingface.schema import HuggingFace

KNOWN = tuple(name for name, family in FAMILIES.items() if not family.foreign)
OWN: Mapping[str, SearchStrategy[Any]] = {
    **KEYS,
    "model_type": st.sampled_from(KNOWN),
    REST: st.dictionaries(
        st.sampled_from(("sep_token_id", "_name_or_path", "made up")),
        st.integers(0, 9) | words(),
        min_size=1,
    ),
}


@st.composite
def core(draw: DrawFn, case: StrategyCase) -> Sequence[Group]:
    """Draw a model type, which transformers requires, then some of the keys of the family."""
    name = draw(st.sampled_from(KNOWN))
    first, *more = draw(of_family(name))
    return [{"model_type": name, **first}, *more]


def values(case: StrategyCase, path: str) -> SearchStrategy[Any] | None:
    """Return a strategy for a key whose type alone also allows values that are not useful; None for
    other keys.
    """
    return OWN.get(path)


def paths(case: StrategyCase) -> Iterable[str]:
    """Return all keys, which are the same in every release."""
    return tuple(fields(HuggingFace))


def source(config: Config) -> Group:
    """Return the config as a mapping."""
    content: Group = json.loads(config.text())
    return content


PART = StrategyPart(core, paths, values, entries=("file",), source=source)
"""What the general strategies need to know about this dialect in addition to its schema and its
rules.
"""
