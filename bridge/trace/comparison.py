"""The comparison of two runs as data: the result for each tensor, and the diagnosis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from bridge.trace.record import Name
from bridge.trace.run import TracedRun
from bridge.trace.settings import SettingDifference, setting_differences
from bridge.trace.verdicts import TensorVerdict, share_of_bound


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why two runs differ: the first tensor that differs (`where`), the cause (`claim`, empty if
    the logs do not show it), the evidence, and the next thing to do.
    """

    where: Name
    claim: str
    evidence: tuple[str, ...]
    next: str


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

    diagnose: Callable[[Comparison], Diagnosis] = field(kw_only=True, repr=False, compare=False)
    """The search for the cause, which `diagnosis` starts."""

    @cached_property
    def settings(self) -> tuple[SettingDifference, ...]:
        """The settings that differ between the runs."""
        return (*setting_differences(self.first.about, self.second.about), *self.formats)

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """The diagnosis of why the runs differ; None if they do not differ."""
        return self.diagnose(self) if self.divergence else None

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
