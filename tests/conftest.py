"""Fixtures for all tests: the folder of facts beside the checkout, where there is one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"
NEED_TORCH = ("engine", "trace")

collect_ignore = [] if find_spec("torch") else list(NEED_TORCH)


@pytest.fixture(scope="session")
def shared() -> Path | None:
    """The folder of truth, facts and corpus beside the checkout, or None; tests then use the committed sample."""
    return SHARED if (SHARED / "truth").is_dir() else None
