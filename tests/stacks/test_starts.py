"""A few converted configs are started with the stack's own code; `benchmarks/starts.py` does it with many."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import compat
from bridge.errors import VersionError

HOME = Path(__file__).parents[2]
PROGRAM = HOME / "benchmarks" / "starts.py"
TARGETS = {
    "deepspeed": ("automodel", "merak"),
    "megatron": ("fast_llm",),
    "huggingface": ("megatron",),
}
"""For each stack, the stacks whose configs are converted."""
PACKAGES = {"huggingface": "transformers"}
COUNT = "4"


@pytest.mark.once
@pytest.mark.skipif(not PROGRAM.is_file(), reason="runs in a checkout")
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_stops_that_was_not_said(target: str) -> None:
    """In a process of its own: each stack makes the one group of ranks that a process can have."""
    pytest.importorskip(PACKAGES.get(target, target))
    try:
        compat.load(target).release(
            import_module(f"tests.harvesting.starts.{target}").release_of_package()
        )
    except VersionError as error:
        pytest.skip(str(error))
    words = [target, "--source", *TARGETS[target], "--count", COUNT]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words],
        capture_output=True,
        text=True,
        cwd=HOME,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "starts " in done.stdout
