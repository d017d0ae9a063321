"""Examples on the pages of the stacks: what each rule's example is read as is what the rule says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import compat

HOME = Path(__file__).resolve().parents[1] / "docs" / "generate"
pytestmark = [pytest.mark.once, pytest.mark.skipif(not HOME.is_dir(), reason="runs in a checkout")]
KNOWN: dict[str, dict[str, Any]] = json.loads((HOME / "examples.json").read_text("utf-8")) if HOME.is_dir() else {}
LEAST = {"deepspeed": 0.95, "megatron": 0.7, "merak": 0.85}
"""The share of a stack's rules that has an example; for the others none was found."""


@pytest.fixture(scope="module")
def examples() -> Any:
    """The module that keeps them."""
    sys.path.insert(0, str(HOME))
    try:
        import rule_examples  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(HOME))
    return rule_examples


@pytest.mark.parametrize("name", KNOWN)
def test_every_example_yields_its_rule(name: str, examples: Any) -> None:
    dialect = compat.load(name)
    silent = [rule for rule, example in KNOWN[name].items() if rule not in examples.spoken(dialect, example)]
    assert not silent


@pytest.mark.parametrize("name", KNOWN)
def test_most_rules_have_one(name: str) -> None:
    rules = {check.rule for check in compat.load(name).checks}
    assert set(KNOWN[name]) <= rules
    assert len(KNOWN[name]) >= LEAST[name] * len(rules), len(KNOWN[name]) / len(rules)
