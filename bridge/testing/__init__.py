"""Public Hypothesis strategies: plans, checked configs of any dialect, and edits of these. Needs the `test` extra."""

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
