"""A pytest plugin with the fixture `assert_same_run`, with which a project's tests compare runs of
two layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Folder = str | Path


@pytest.fixture
def assert_same_run() -> Callable[[Folder, Folder], None]:
    """The function `assert_same_run(a, b)`, which asserts that two traced runs are equal up to
    rounding.

    A failure names the tensor at which they part and, if the logs show it, the cause. If no tensor
    has values in both logs, the assertion fails too, because nothing was proved.
    """
    return same_run


def same_run(first: Folder, second: Folder) -> None:
    """Raise `AssertionError` if the runs part, and `BridgeError` if a folder holds no run."""
    from bridge.trace.comparison import compare
    from bridge.trace.run import Run

    found = compare(Run.read(first), Run.read(second), every=False)
    parted, why = found.divergence, found.diagnosis
    if parted is not None:
        settings = [
            f"settings differ: {setting}" for setting in found.settings if not setting.layout
        ]
        told = [f"they part at {parted.name}: {parted.verdict}; {parted.cause}", *settings]
        if why is not None:
            told += [f"cause: {why.claim}"] if why.claim else []
            told += [f"evidence: {line}" for line in why.evidence]
        raise AssertionError(f"{first} and {second} are not the same run\n" + "\n".join(told))
    if not any(line.verdict in ("equal", "rounding") for line in found.lines):
        raise AssertionError(
            f"{first} and {second}: no tensor was logged with values in both runs, so nothing is "
            "proved"
        )
