"""Comparison of two runs of any layouts: whether they differ by more than rounding, and the first
tensor that does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from bridge.errors import BridgeError
from bridge.files.progress import count_items
from bridge.trace.causes import Diagnosis, diagnose_difference
from bridge.trace.run import TracedRun
from bridge.trace.settings import SettingDifference, setting_differences
from bridge.trace.tensor_comparison import Comparer
from bridge.trace.verdicts import TensorVerdict, share_of_bound


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs: `lines` has the result for every tensor of the compared steps,
    in order of execution.
    """

    first: TracedRun
    second: TracedRun
    lines: tuple[TensorVerdict, ...]
    left: tuple[int, ...] = ()
    """Steps that were not compared, because the comparison stopped at an earlier step that
    differs.
    """
    formats: tuple[SettingDifference, ...] = ()
    """Differences in number format, one for each kind of tensor. Each names the first tensor of
    this kind that differs.
    """

    @cached_property
    def settings(self) -> tuple[SettingDifference, ...]:
        """The settings that differ between the runs."""
        return (*setting_differences(self.first.about, self.second.about), *self.formats)

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """The diagnosis of why the runs differ; None if they do not differ."""
        return diagnose_difference(self) if self.divergence else None

    @cached_property
    def faults(self) -> tuple[TensorVerdict, ...]:
        """The results that rounding does not explain."""
        return tuple(line for line in self.lines if line.is_fault)

    @property
    def divergence(self) -> TensorVerdict | None:
        """The result for the first tensor whose difference rounding does not explain; None if
        there is none.
        """
        return self.faults[0] if self.faults else None

    @property
    def worst(self) -> TensorVerdict | None:
        """Of the results that rounding explains, the one whose distance is nearest to its bound;
        None if there is none.
        """
        return max(
            (line for line in self.lines if not line.is_fault), key=share_of_bound, default=None
        )

    def heat(self) -> Mapping[str, Mapping[int, float]]:
        """Return the largest distance in each layer and step, divided by the bound of this
        distance.
        """
        table: dict[str, dict[int, float]] = defaultdict(dict)
        for line in self.lines:
            layer = table[line.name.layer]
            layer[line.name.step] = max(layer.get(line.name.step, 0.0), share_of_bound(line))
        return table


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
            )
    return Comparison(first, second, tuple(lines), formats=_format_differences(comparer))


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
