"""Facts about Fast-LLM: what its own config classes made of generated inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SAMPLE = Path(__file__).parent / "config_cases.jsonl"
RECIPE = Path(__file__).parent / "recipe.yaml"


def rows(path: Path) -> list[dict[str, Any]]:
    """One fact a line."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="session")
def facts(shared: Path | None) -> list[dict[str, Any]]:
    """Inputs of `MultiStageConfig` and `DistributedConfig`, with verdict and effective values: all, or the committed sample."""
    return rows(shared / "truth" / "fast_llm_config.jsonl" if shared else SAMPLE)


@pytest.fixture(scope="session")
def corpus(shared: Path | None) -> list[Path]:
    """Recipes: those of public repositories, or the committed one."""
    return sorted((shared / "corpus" / "fast_llm").glob("*.yaml")) if shared else [RECIPE]
