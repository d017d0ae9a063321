"""What Megatron's own code made of flag lists: a committed sample, and all rows where they are at hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

Row = dict[str, Any]
SAMPLE = Path(__file__).parent / "sample.jsonl"


def _rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


@pytest.fixture(scope="session")
def facts(shared: Path | None) -> tuple[Row, ...]:
    """Rows of flags, release and world size, with effective values or the refusal of Megatron's own code."""
    whole = _rows(shared / "truth" / "megatron_cli.jsonl") if shared else iter(())
    return (*_rows(SAMPLE), *whole)
