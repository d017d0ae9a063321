"""A few converted configs are started with the stack's own code; `benchmarks/starts.py` does it with many."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

import compat
from bridge.errors import VersionError

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from starts import run

TARGETS = {"deepspeed": ("automodel", "merak"), "megatron": ("fast_llm",), "huggingface": ("megatron",)}
"""For each stack, the stacks whose configs are converted."""
COUNT = 4


@pytest.mark.once
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_stops_that_was_not_said(target: str) -> None:
    pytest.importorskip({"huggingface": "transformers"}.get(target, target))
    try:
        compat.load(target).release(import_module(f"compat.{target}.runtime.starting").installed())
    except VersionError as error:
        pytest.skip(str(error))
    found = run(target, TARGETS[target], 1, COUNT)
    assert found.agrees, "\n".join(found.lines())
    assert found.outcomes["starts"] + found.outcomes["stops, said"]
