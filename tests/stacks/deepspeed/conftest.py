"""Fixtures for the DeepSpeed dialect: the dialect, the real DeepSpeedConfig, and what such an object holds by path."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

import compat
from bridge.errors import ConfigError
from bridge.stack.dialect import Dialect


@pytest.fixture(scope="session")
def deepspeed() -> Dialect:
    """The dialect under test."""
    return compat.load("deepspeed")


@pytest.fixture(scope="session")
def real() -> Callable[[dict[str, Any], int], Any]:
    """Builds the real DeepSpeedConfig of a mapping at a data-parallel size, or returns the message of its refusal."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    pytest.importorskip("deepspeed")
    from compat.deepspeed.live import real as build

    def built(data: dict[str, Any], ranks: int = 1) -> Any:
        try:
            return build(data, ranks)
        except ConfigError as error:
            return str(error)

    return built


@pytest.fixture(scope="session")
def held() -> Callable[[Any], dict[str, Any]]:
    """What a real DeepSpeedConfig holds, by the dialect's paths."""
    from tests.harvesting.judges.deepspeed import values_by_path

    return values_by_path
