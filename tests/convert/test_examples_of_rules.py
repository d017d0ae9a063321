"""Examples on the pages of the stacks: what each rule's example is read as is what the rule says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import compat

HOME = Path(__file__).resolve().parents[2] / "docs" / "generate"
pytestmark = [pytest.mark.once, pytest.mark.skipif(not HOME.is_dir(), reason="runs in a checkout")]
KNOWN: dict[str, dict[str, Any]] = (
    json.loads((HOME / "examples.json").read_text("utf-8")) if HOME.is_dir() else {}
)


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
    silent = [
        rule
        for rule, example in KNOWN[name].items()
        if rule not in examples.spoken(dialect, example)
    ]
    assert not silent


@pytest.mark.parametrize("name", compat.names())
def test_every_rule_has_one_or_a_reason_why_not(name: str, examples: Any) -> None:
    rules = {check.rule for check in compat.load(name).checks}
    known, reasons = KNOWN.get(name, {}).keys(), examples.REASONS.get(name, {}).keys()
    assert known | reasons == rules and not known & reasons
    assert len(reasons) <= 0.01 * len(rules)


def test_rows_of_one_id_do_not_share_an_example_that_speaks_of_one_of_them(examples: Any) -> None:
    dialect = compat.load("deepspeed")
    rows = {
        row.message: cell for row, cell in zip(dialect.checks, examples.cells(dialect), strict=True)
    }
    assert "zenflow" in rows["sum is not possible with zenflow; use mean"]
    assert rows["sum is not possible with compile.deepcompile; use mean"] == examples.ELSEWHERE


def test_an_example_is_shown_as_it_is_typed(examples: Any) -> None:
    assert examples.shown({"source": ["--data", "a b"], "ranks": 2}) == "`--data 'a b'` on 2 ranks"
    assert (
        examples.shown({"object": "Config", "source": {"size": None}, "version": "1.0"})
        == "`Config(size=None)` in 1.0"
    )
