"""Public Hypothesis strategies: plans, configs that their stack accepts, and edits of such configs.

Needs the extra `test`.
"""

from __future__ import annotations

from bridge.testing.mutations import Mistake, Mutation, mutations
from bridge.testing.strategies import StrategyCase, StrategyPart, configs, entries, plans, values

__all__ = [
    "Mistake",
    "Mutation",
    "StrategyCase",
    "StrategyPart",
    "configs",
    "entries",
    "mutations",
    "plans",
    "values",
]
