"""A sample of `engines.py`: causes in one of two engines are named, and clean engines are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trace.engines import CAUSES, SETTINGS, held, started, tried

SAMPLE = (
    "loss by token, by microbatch",
    "decay of norms and biases",
    "clipped before unscaling",
    "gradients summed over ranks",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_two_engines_differ_and_the_cause_is_right(name: str, run: Any, tmp_path: Path) -> None:
    found = tried(run, name, tmp_path)
    assert found.where and found.right, (found, CAUSES[name].claim)


@pytest.mark.parametrize("settings", SETTINGS)
def test_clean_engines_are_the_same(settings: str, run: Any, tmp_path: Path) -> None:
    first, second = (
        started(run, engine, settings, False, tmp_path / engine) for engine in ("DDP", "FSDP2")
    )
    assert held(first, second).divergence is None
