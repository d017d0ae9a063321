"""Public Hypothesis strategies: plans, and checked configs of any dialect. Needs the `test` extra."""

from __future__ import annotations

from bridge.testing.strategies import Case, Part, configs, entries, plans, values

__all__ = ["Case", "Part", "configs", "entries", "plans", "values"]
