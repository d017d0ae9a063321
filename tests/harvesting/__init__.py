"""Adds a release: reads its facts from its code, records its results for generated configs, and lists open decisions."""

STACKS, JUDGES = "tests.harvesting.stacks", "tests.harvesting.judges"
"""Packages with a module for each stack: what reads its facts, and what asks it."""
