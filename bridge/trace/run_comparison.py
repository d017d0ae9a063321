"""Comparison of two runs of any layouts: whether they differ by more than rounding, and the first
tensor that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bridge.errors import BridgeError
from bridge.files.progress import count_items
from bridge.trace.causes import diagnose_difference
from bridge.trace.comparison import Comparison
from bridge.trace.run import TracedRun
from bridge.trace.settings import SettingDifference
from bridge.trace.tensor_comparison import Comparer
from bridge.trace.verdicts import TensorVerdict


def compare_runs(
    first: TracedRun, second: TracedRun, steps: Iterable[int] | None = None, every: bool = True
) -> Comparison:
    """Compare the steps that all ranks of both runs logged, in order; if `steps` is given, only
    these steps. Without `every`, stop after the first step that differs.

    Raises `BridgeError` if there is no step to compare.
    """
    common_steps = set(first.steps_with_all_tensors) & set(second.steps_with_all_tensors)
    common_steps &= common_steps if steps is None else set(steps)
    if not common_steps:
        raise BridgeError(
            f"{first.folder}, {second.folder}: found {_steps_text(first.steps)} and {_steps_text(second.steps)}, "
            "expected a step that all ranks of both runs logged"
        )
    comparer = Comparer(first, second)
    lines: list[TensorVerdict] = []
    step_list = sorted(common_steps)
    for at, step in enumerate(count_items(step_list)):
        verdicts = comparer.step(step)
        lines += verdicts
        if not every and any(line.is_fault for line in verdicts):
            return Comparison(
                first,
                second,
                tuple(lines),
                tuple(step_list[at + 1 :]),
                _format_differences(comparer),
                diagnose=diagnose_difference,
            )
    return Comparison(
        first,
        second,
        tuple(lines),
        formats=_format_differences(comparer),
        diagnose=diagnose_difference,
    )


def _format_differences(comparer: Comparer) -> tuple[SettingDifference, ...]:
    names = {
        kind: f"number format of {kind} tensors in {name.layer or 'the model'}"
        for kind, (name, *_) in comparer.formats.items()
    }
    return tuple(
        SettingDifference(names[kind], one, other)
        for kind, (_, one, other) in comparer.formats.items()
    )


def _steps_text(steps: Sequence[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
