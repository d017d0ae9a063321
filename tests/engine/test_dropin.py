"""A script for DeepSpeed runs on the engine with another import: the same losses, learning rates, norms and answers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from scripts import config_of, script

SIX_DIGITS = 1e-6
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def compared(run: Any, config: dict[str, Any], way: str, folder: Path, **steps: int) -> None:
    """Run the script with both and compare all that it saw."""
    theirs, ours = (run(2, script, name, config, way, folder, *steps.values()) for name in ("deepspeed", "compat"))
    for expected, found in zip(theirs, ours, strict=True):
        assert found[0] == pytest.approx(expected[0], rel=SIX_DIGITS, abs=0.0)
        assert found[1] == [pytest.approx(lrs, rel=1e-12) for lrs in expected[1]]
        known = [(mine, norm) for mine, norm in zip(found[2], expected[2], strict=True) if norm is not None]
        assert all(float(mine) == pytest.approx(float(norm), rel=1e-4) for mine, norm in known)
        assert found[3] == expected[3]
        assert found[4] == pytest.approx(expected[4], rel=SIX_DIGITS)
    assert sum(theirs[0][0][-4:]) < 0.95 * sum(theirs[0][0][:4])


@needs_deepspeed
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_the_same_script_with_another_import(run: Any, tmp_path: Path, level: int) -> None:
    compared(run, config_of(level), "config", tmp_path)
