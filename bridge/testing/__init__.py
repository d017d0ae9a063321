"""Public Hypothesis strategies: plans, configs that their stack accepts, and edits of such configs.

Needs the extra `test`.
"""

from __future__ import annotations

from bridge.testing.mutations import Mistake, Mutation, mutations
from bridge.testing.strategies import Case, Part, configs, entries, plans, values

__all__ = [
    "Case",
    "Mistake",
    "Mutation",
    "Part",
    "configs",
    "entries",
    "mutations",
    "plans",
    "values",
]
