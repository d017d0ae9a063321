"""Cases: the first step in which two runs differ, with its tensors in both logs, as the input of
the search for a cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING

from torch import Tensor

from bridge.trace.patterns import CLOSE, fit_factor
from bridge.trace.record import Name
from bridge.trace.settings import SettingDifference

if TYPE_CHECKING:
    from bridge.trace.comparison import Comparison
    from bridge.trace.run import LoggedTensor, TracedRun
    from bridge.trace.verdicts import TensorVerdict


@dataclass(frozen=True)
class Case:
    """The first step in which two runs differ, with the compared tensors and settings that may
    show the cause. `first` is the result for the first tensor that differs.
    """

    comparison: Comparison
    first: TensorVerdict

    @cached_property
    def lines(self) -> tuple[TensorVerdict, ...]:
        """The result of the comparison for each tensor of this step."""
        return tuple(
            line for line in self.comparison.lines if line.name.step == self.first.name.step
        )

    def of(self, phase: str, kind: str | None = None) -> list[TensorVerdict]:
        """Return the results for the tensors of a phase; if `kind` is given, only for tensors of
        this kind.
        """
        return [
            line
            for line in self.lines
            if line.name.phase == phase and kind in (None, line.name.kind)
        ]

    def agree(self, phase: str, kind: str, words: str) -> str | None:
        """Return a sentence which says that all tensors of a phase and kind agree; `words` names
        these tensors. Return None if one of them differs, or if no such tensor could be compared.
        """
        lines = [line for line in self.of(phase, kind) if line.verdict in ("equal", "rounding")]
        if not lines or any(line.is_fault for line in self.of(phase, kind)):
            return None
        return f"{words} agree to {max(line.distance for line in lines):.1g} ({len(lines)} tensors)"

    def layers_without_tensors(self, phase: str, kind: str) -> set[str]:
        """Return the names of the layers of which no tensor of this phase and kind was compared,
        because one of the logs lacks it.
        """
        runs = self.comparison.first, self.comparison.second
        part = any(
            run.keep.get("ranks") or run.about.get("filter") or run.about.get("hidden")
            for run in runs
        )
        lines = self.of(phase, kind)
        unseen = {line.name.layer for line in lines if line.verdict in ("unseen", "too coarse")}
        visible = {
            line.name.layer for line in lines if line.verdict not in ("unseen", "too coarse")
        }
        return (unseen | (set(runs[0].layers) if part else set())) - visible

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The position of each layer in the order in which layers run."""
        return {layer: at for at, layer in enumerate(self.comparison.first.layers)}

    def weights(self, layer: str) -> tuple[int, list[TensorVerdict]]:
        """Return the last earlier step after which both runs logged weights, and the results for
        the weights of a layer in that step. For a layer without weights, such as a tied head,
        these are the results for all weights.
        """
        step = self.first.name.step
        by_step: dict[int, list[TensorVerdict]] = {}
        for line in self.comparison.lines:
            name = line.name
            is_weight = (
                name.kind == "weight"
                and name.phase in ("init", "update")
                and line.verdict not in ("unseen", "too coarse")
            )
            if is_weight and name.step < step:
                by_step.setdefault(name.step, []).append(line)
        last = max(by_step, default=-1)
        every = by_step.get(last, [])
        return last, [line for line in every if line.name.layer == layer] or every

    @cached_property
    def entries(self) -> tuple[dict[Name, LoggedTensor], dict[Name, LoggedTensor]]:
        """Return this step's tensors in both runs, by name. If the log of only one rank of A
        differs from B, the tensors of A are this rank's copies.
        """
        step = self.first.name.step
        return _entries_of_step(self.comparison.first, step, self.rank), _entries_of_step(
            self.comparison.second, step
        )

    @property
    def rank(self) -> int | None:
        """The only rank of A that logged other values than B for the first tensor that differs.
        None if several or all ranks of A did so.
        """
        return self.first.ranks[0] if len(self.first.ranks) == 1 else None

    @cached_property
    def before(self) -> tuple[dict[Name, LoggedTensor], dict[Name, LoggedTensor]]:
        """Return the tensors of the last earlier step that both runs logged, by name. The result is
        empty if there is no such step.
        """
        steps = sorted(
            set(self.comparison.first.steps_with_all_tensors)
            & set(self.comparison.second.steps_with_all_tensors),
            reverse=True,
        )
        for step in (step for step in steps if step < self.first.name.step):
            entries = (
                _entries_of_step(self.comparison.first, step, self.rank),
                _entries_of_step(self.comparison.second, step),
            )
            if entries[0] and entries[1]:
                return entries
        return {}, {}

    def pair(self, name: Name) -> tuple[Tensor, Tensor] | None:
        """Return the samples of a tensor in both runs. Return None if a run has no samples, or if
        the numbers of samples differ.
        """
        return pair_of(self.entries[0].get(key_of(name)), self.entries[1].get(key_of(name)))

    def changes(self, name: Name) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return three tensors for the sampled elements of a weight: the change by the update in
        run A, the change in run B, and the values in run B before the update. Return None if the
        values before the update were not logged.
        """
        after, old = self.pair(name), self._last.get(_name_without_part(key_of(name)))
        if after is None or old is None or old[0].shape != after[0].shape:
            return None
        return after[0] - old[0], after[1] - old[1], old[1]

    @cached_property
    def _last(self) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
        # Over more than one update, the difference is not what one update added.
        if any(name.step != self.first.name.step - 1 for name in self.before[0]):
            return {}
        pairs = (
            (_name_without_part(name), pair_of(entry, self.before[1].get(name)))
            for name, entry in self.before[0].items()
            if name.kind == "weight"
        )
        return {name: pair for name, pair in pairs if pair is not None}

    @property
    def settings(self) -> list[SettingDifference]:
        """The settings that differ between the runs and do not describe the layout."""
        return [setting for setting in self.comparison.settings if not setting.layout]

    def factors(
        self, lines: Sequence[TensorVerdict], change: bool = False
    ) -> tuple[float, int] | None:
        """Return the factor by which the values of A differ from those of B in all of these
        tensors, and the number of tensors. With `change`, compare the changes by the update
        instead of the values. Return None if there is no common factor.
        """
        ratios = []
        for line in lines:
            both = self.changes(line.name) if change else self.pair(line.name)
            # Of zeros, every factor is one.
            if both is None or not both[1].any():
                continue
            factor, rest = fit_factor(both[0], both[1])
            # One tensor that is no multiple is enough: then there is no common factor.
            if rest > CLOSE:
                return None
            ratios.append(factor)
        if not ratios or max(abs(factor - median(ratios)) for factor in ratios) > CLOSE * abs(
            median(ratios)
        ):
            return None
        return median(ratios), len(ratios)


def _entries_of_step(
    run: TracedRun, step: int, rank: int | None = None
) -> dict[Name, LoggedTensor]:
    """Return a step's tensors by name. If `rank` logged a different copy of a tensor, the result
    has this copy.
    """
    entries = {}
    for entry in run.entries(step):
        copies = (
            (copy for part, copy in entry.copies() if part.rank == rank)
            if rank is not None
            else iter(())
        )
        entries[key_of(entry.name)] = next(copies, entry)
    return entries


def key_of(name: Name) -> Name:
    return name._replace(layer="", tensor=f"{name.layer}.{name.tensor}".strip("."))


def _name_without_part(name: Name) -> tuple[str, str]:
    return name.kind, name.tensor


def pair_of(one: LoggedTensor | None, other: LoggedTensor | None) -> tuple[Tensor, Tensor] | None:
    if (
        one is None
        or other is None
        or one.samples is None
        or other.samples is None
        or one.samples.shape != other.samples.shape
    ):
        return None
    return one.samples, other.samples
