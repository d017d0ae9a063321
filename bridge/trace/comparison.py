"""Comparison of two runs of any layouts: whether they differ by more than rounding, and the first
tensor that does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from bridge.errors import BridgeError
from bridge.trace.causes import Diagnosis, diagnosed
from bridge.trace.comparing import Comparer
from bridge.trace.run import Run
from bridge.trace.settings import Setting, differences
from bridge.trace.verdicts import Line, share
from bridge.underway import counted


@dataclass(frozen=True)
class Comparison:
    """The result for every tensor of the steps that both runs have, in order of execution."""

    first: Run
    second: Run
    lines: tuple[Line, ...]
    left: tuple[int, ...] = ()
    """Steps that were not compared, because they follow the first step that differs."""
    formats: tuple[Setting, ...] = ()
    """Differences in number format. Each of them names the first tensor of its kind."""

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """The settings that differ between the runs."""
        return (*differences(self.first.about, self.second.about), *self.formats)

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """The diagnosis of why the runs part; None if they do not."""
        return diagnosed(self) if self.divergence else None

    @cached_property
    def faults(self) -> tuple[Line, ...]:
        """The lines that rounding does not explain."""
        return tuple(line for line in self.lines if line.is_fault)

    @property
    def divergence(self) -> Line | None:
        """The first line that rounding does not explain; None if there is none."""
        return self.faults[0] if self.faults else None

    @property
    def worst(self) -> Line | None:
        """The line that is nearest to its bound, among the lines within their bounds."""
        return max((line for line in self.lines if not line.is_fault), key=share, default=None)

    def heat(self) -> Mapping[str, Mapping[int, float]]:
        """The largest distance in each layer and step, as a share of its bound."""
        found: dict[str, dict[int, float]] = defaultdict(dict)
        for line in self.lines:
            layer = found[line.name.layer]
            layer[line.name.step] = max(layer.get(line.name.step, 0.0), share(line))
        return found


def compare(
    first: Run, second: Run, steps: Iterable[int] | None = None, every: bool = True
) -> Comparison:
    """Compare the steps that are complete in both runs, in order. `steps` limits the comparison to
    these steps. Without `every`, stop at the first step that differs.

    Raises `BridgeError` if there is no such step.
    """
    wanted = set(first.logged) & set(second.logged)
    wanted &= wanted if steps is None else set(steps)
    if not wanted:
        raise BridgeError(
            f"{first.folder}, {second.folder}: no step is complete in both; found "
            f"{_told(first.steps)} and {_told(second.steps)}"
        )
    comparer = Comparer(first, second)
    lines: list[Line] = []
    ordered = sorted(wanted)
    for at, step in enumerate(counted(ordered)):
        found = comparer.step(step)
        lines += found
        if not every and any(line.is_fault for line in found):
            return Comparison(
                first, second, tuple(lines), tuple(ordered[at + 1 :]), _formats(comparer)
            )
    return Comparison(first, second, tuple(lines), formats=_formats(comparer))


def _formats(comparer: Comparer) -> tuple[Setting, ...]:
    names = {
        kind: f"number format, {kind} of {name.layer or 'the model'}"
        for kind, (name, *_) in comparer.formats.items()
    }
    return tuple(
        Setting(names[kind], one, other) for kind, (_, one, other) in comparer.formats.items()
    )


def _told(steps: Sequence[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
