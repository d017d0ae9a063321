"""Plugin for pytest with the fixture `assert_same_run`, by which tests assert that runs of two
layouts are equal.
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

    If they are not, the error names the first tensor that differs and, if the logs show it, the
    cause. The assertion also fails if no tensor has values in both logs, because then nothing was
    compared.
    """
    return same_run


def same_run(first: Folder, second: Folder) -> None:
    """Raise `AssertionError` if the runs differ by more than rounding or if nothing can be
    compared, and `BridgeError` if a folder holds no run.
    """
    from bridge.trace.run import TracedRun
    from bridge.trace.run_comparison import compare_runs

    comparison = compare_runs(TracedRun.read(first), TracedRun.read(second), every=False)
    divergence, why = comparison.divergence, comparison.diagnosis
    if divergence is not None:
        settings = [
            f"settings differ: {setting}" for setting in comparison.settings if not setting.layout
        ]
        lines = [
            f"the runs first differ at {divergence.name}: {divergence.verdict}; {divergence.cause}",
            *settings,
        ]
        if why is not None:
            lines += [f"cause: {why.claim}"] if why.claim else []
            lines += [f"evidence: {line}" for line in why.evidence]
        raise AssertionError(f"{first} and {second} are not the same run\n" + "\n".join(lines))
    if not any(line.verdict in ("equal", "rounding") for line in comparison.lines):
        raise AssertionError(
            f"{first} and {second}: no tensor has values in both logs, so nothing was compared; "
            "log at level 2 or more"
        )
