"""The examples of docs/testing.md run as they stand there."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from bridge.testing import Mistake

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "testing.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_an_example_runs(block: str) -> None:
    with warnings.catch_warnings(action="ignore"):
        exec(compile(block, "docs/testing.md", "exec"), {"__name__": "example"})


def test_every_mistake_is_explained() -> None:
    assert len(BLOCKS) >= 2
    assert not [mistake for mistake in Mistake if f"`{mistake}`" not in PAGE]
