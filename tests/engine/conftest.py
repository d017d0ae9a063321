"""Each module leaves the process group that it joined."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def leave_alone(leave_group: None) -> None:
    """Of `tests/conftest.py`, for every module of this folder."""
