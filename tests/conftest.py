"""Fixtures for all tests: the folder of facts beside the checkout, where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path | None:
    """The folder of truth, facts and corpus beside the checkout, or None; tests then use the committed sample."""
    return SHARED if (SHARED / "truth").is_dir() else None
