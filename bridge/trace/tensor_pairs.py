"""Pairing: finds the tensors of two runs that have to be compared, once for all similar steps."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bridge.trace.columns import Columns, Gathering, Pattern
from bridge.trace.patterns import pattern_causes
from bridge.trace.record import MEMORY, SHARD, Name
from bridge.trace.run import LoggedPart, LoggedTensor, TracedRun, without_replicas
from bridge.trace.segments import Floats, Places, Segments, join_ranges
from bridge.trace.verdicts import Verdict

OWNED = ("weight", "gradient", "moment", "replica", "buffer")
"""Kinds of tensors that belong to a parameter or buffer. The two logs may divide the name of such
a tensor into layer and rest in different ways.
"""
STATISTICS = 5
"""Number of statistics that are compared if a tensor has no samples: mean, standard deviation,
root mean square, smallest and largest element.
"""
Section = tuple[str, str]
"""Phase and kind."""


def matching_name(name: Name, words: bool = False) -> Name:
    """Return the name by which a tensor of one run is found in the other. For a parameter, the
    name of the layer is moved into the name of the tensor, because the runs may divide the full
    name differently. An input is found by its keyword if `words` is true, otherwise by its number.
    """
    if name.kind == "input":
        return name._replace(tensor=re.sub(r"^\d+:" if words else r":\S+", "", name.tensor))
    return (
        name._replace(layer="", tensor=f"{name.layer}.{name.tensor}".strip("."))
        if name.kind in OWNED
        else name
    )


def keywords_of(entries: Iterable[LoggedTensor]) -> dict[str, None]:
    """Return the keywords with which a script passes the inputs among these tensors, in order."""
    names = (entry.name.tensor for entry in entries if entry.name.kind == "input")
    return {name.partition(":")[2].partition(" ")[0]: None for name in names if ":" in name}


def phase_and_kind(name: Name) -> Section:
    """Return the phase and kind of a tensor, by which tensors of similar size are grouped."""
    return name.phase, name.kind


def _match_entries(
    ours: Sequence[LoggedTensor], theirs: Sequence[LoggedTensor]
) -> tuple[list[LoggedTensor], list[LoggedTensor]]:
    """Return the tensors of a step of both runs. If the runs logged a tensor for different
    microbatches, the microbatches are joined; then only statistics of the tensor can be compared,
    and no samples.
    """
    numbers: list[dict[Name, set[int | None]]] = []
    for entries in (ours, theirs):
        microbatches: dict[Name, set[int | None]] = defaultdict(set)
        for entry in entries:
            microbatches[entry.name._replace(microbatch=None)].add(entry.name.microbatch)
        numbers.append(microbatches)
    apart = {
        name
        for name in numbers[0].keys() & numbers[1].keys()
        if numbers[0][name] != numbers[1][name]
    }
    return _join_entries(ours, apart), _join_entries(theirs, apart)


def _join_entries(entries: Sequence[LoggedTensor], names: Collection[Name]) -> list[LoggedTensor]:
    groups: dict[Name, list[LoggedTensor]] = {}
    for entry in entries:
        whole = entry.name._replace(microbatch=None)
        groups.setdefault(whole if whole in names else entry.name, []).append(entry)
    return [
        LoggedTensor(name, tuple(part for entry in parts for part in entry.parts), joined=True)
        if name in names
        else parts[0]
        for name, parts in groups.items()
    ]


@dataclass(frozen=True, eq=False)
class Table:
    """The numbers of all tensors of a step: the statistics (tensors, 7), and the samples of one
    tensor after the other.
    """

    figures: Floats
    samples: Floats

    @classmethod
    def of(cls, gathering: Gathering, columns: Columns) -> Table:
        """Make the table from the records of a step."""
        return cls(gathering.figures(columns), gathering.samples(columns))

    @cached_property
    def finite(self) -> Floats:
        """For each tensor, the number of elements that are neither NaN nor infinite."""
        counts: Floats = self.figures[:, 0] - self.figures[:, 1] - self.figures[:, 2]
        return counts

    @cached_property
    def sizes(self) -> Floats:
        """The root mean square of each tensor; 0 if a tensor has no finite element."""
        with np.errstate(all="ignore"):
            return np.where(
                self.finite != 0, np.sqrt(self.figures[:, 4]) / np.sqrt(self.finite), 0.0
            )

    def statistics(self) -> Floats:
        """Return the statistics (tensors, 5) that are compared if a tensor has no samples."""
        with np.errstate(all="ignore"):
            finite = np.where(self.finite != 0, self.finite, np.nan)
            mean = self.figures[:, 3] / finite
            std = np.sqrt(np.maximum(0.0, self.figures[:, 4] / finite - mean**2))
        return np.stack([mean, std, self.sizes, self.figures[:, 5], self.figures[:, 6]], axis=1)


@dataclass(frozen=True, eq=False)
class Judged:
    """The results of comparing pairs of tensors, in the order of the pairs: verdicts, distances
    and bounds, descriptions of faults by the index of the pair, and the compared values.
    """

    verdicts: list[Verdict]
    distances: Floats
    bounds: Floats
    causes: dict[int, str]
    values: tuple[Floats, Floats]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of tensors to compare. `tensors` are the pairs; `ours` and `theirs` are the indices of
    their tensors among all tensors of run A and of run B.
    """

    gatherings: tuple[Gathering, Gathering]
    ours: Places
    theirs: Places
    tensors: tuple[tuple[LoggedTensor, LoggedTensor], ...]
    partial: bool = False
    """Whether one of the runs was set to log only some ranks. Then only samples that both runs
    have are compared.
    """

    @cached_property
    def verdicts_without_values(self) -> Mapping[int, tuple[Verdict, float, str]]:
        """By the index of a pair whose values cannot be compared: its verdict, distance and
        reason.
        """
        verdicts: dict[int, tuple[Verdict, float, str]] = {}
        for at, (one, other) in enumerate(self.tensors):
            if one.joined != other.joined or (one.shape != other.shape and not one.joined):
                verdicts[at] = "other shape", 0.0, f"{list(one.shape)} against {list(other.shape)}"
            elif (one.missing or other.missing) and self.partial and self.sample_mask[at]:
                continue
            elif (one.missing or other.missing) and self.partial:
                verdicts[at] = "unseen", 0.0, ""
            elif (one.missing or other.missing) and not _have_equal_parts(one, other):
                verdicts[at] = (
                    "fault",
                    math.inf,
                    f"no rank logged {one.missing or other.missing} elements of this tensor",
                )
            elif not (
                self.gatherings[0].told[self.ours[at]] and self.gatherings[1].told[self.theirs[at]]
            ):
                verdicts[at] = (
                    "too coarse",
                    0.0,
                    "the logs have no values, because their level is below 2",
                )
        return verdicts

    @cached_property
    def sample_mask(self) -> NDArray[np.bool_]:
        """For each pair, whether both runs have samples of the tensor, and equally many."""
        lengths = self.gatherings[0].lengths[self.ours]
        mask: NDArray[np.bool_] = (lengths == self.gatherings[1].lengths[self.theirs]) & (
            lengths >= 0
        )
        return mask

    @cached_property
    def segments(self) -> Segments:
        """The range of each pair in the array of compared values. The values are samples, or
        statistics if the pair has no samples.
        """
        return Segments.of(
            np.where(self.sample_mask, self.gatherings[0].lengths[self.ours], STATISTICS).tolist()
        )

    @cached_property
    def _reading(self) -> tuple[Places, Places, Places, Places]:
        """The indices with which `values` fills its arrays: where samples go, where they are in
        the tables of A and of B, and where statistics go.
        """
        rows, others = self.sample_mask.nonzero()[0], (~self.sample_mask).nonzero()[0]
        lengths = self.segments.lengths[rows]
        first, second = (
            join_ranges(gathering.begins[which[rows]], lengths)
            for gathering, which in zip(self.gatherings, (self.ours, self.theirs), strict=True)
        )
        return self.segments.elements(rows), first, second, self.segments.elements(others)

    def values(self, tables: tuple[Table, Table]) -> tuple[Floats, Floats]:
        """Return the values to compare of run A and of run B: samples or statistics, one tensor
        after the other.
        """
        to, first, second, rest = self._reading
        arrays = np.empty(self.segments.size), np.empty(self.segments.size)
        for values, table, places, which in zip(
            arrays, tables, (first, second), (self.ours, self.theirs), strict=True
        ):
            values[to] = table.samples[places]
            if len(rest):
                values[rest] = table.statistics()[which[~self.sample_mask]].reshape(-1)
        if self.partial:
            unseen = np.isnan(arrays[0]) | np.isnan(arrays[1])
            # The same in both: it adds nothing to their distance.
            arrays[0][unseen] = arrays[1][unseen] = 0.0
        return arrays

    def equal(self, tables: tuple[Table, Table]) -> NDArray[np.bool_]:
        """Return for each pair whether both runs logged the same numbers, bit by bit. Pairs of
        which a log has no values count as equal.
        """
        differ = (~_are_equal(*self.values(tables))).astype(np.float64)
        figures = tables[0].figures[self.ours] == tables[1].figures[self.theirs]
        result: NDArray[np.bool_] = (self.segments.sums(differ) == 0) & figures.all(axis=1)
        for at, (verdict, *_) in self.verdicts_without_values.items():
            result[at] = verdict in ("unseen", "too coarse")
        return result

    def judge(
        self,
        tables: tuple[Table, Table],
        bounds: Floats,
        scales: Floats,
        ratios: Mapping[str, float],
        rounding: Floats | None = None,
    ) -> Judged:
        """Compare the pairs. `bounds` are the largest distances that count as rounding. `scales`
        are the usual sizes of such tensors, with which a tensor that is nearly zero is compared.
        `rounding` is the part of each sample's distance that has a known cause and does not
        count.
        """
        values = self.values(tables)
        with np.errstate(all="ignore"):
            apart = np.where(_are_equal(*values), 0.0, np.abs(values[0] - values[1]))
            apart = apart if rounding is None else np.maximum(apart - rounding, 0)
            # The smaller of both: so neither run is measured by what went wrong in the other.
            each = [self.segments.rms(np.where(np.isfinite(one), one, 0.0)) for one in values]
            sizes = np.maximum(np.minimum(*each), scales)
            # From zeros, every other value is infinitely far.
            whole = np.where(np.maximum(*each) > 0, np.inf, 0.0)
            distances = np.where(sizes != 0, self.segments.rms(apart) / sizes, whole)
        # Not `>`: so a distance that is NaN is beyond its bound.
        beyond = ~(distances <= bounds)
        figures = tables[0].figures[self.ours, 1:3], tables[1].figures[self.theirs, 1:3]
        counts = (figures[0] != figures[1]).any(axis=1)
        odd = [
            at for at in np.flatnonzero(counts).tolist() if at not in self.verdicts_without_values
        ]
        verdicts: list[Verdict] = ["rounding" if far else "equal" for far in distances.tolist()]
        for at in np.flatnonzero(beyond).tolist():
            verdicts[at] = "fault"
        words: dict[int, str] = {}
        bounds = bounds.copy()
        for at in odd:
            first, second = (tuple(int(count) for count in own[at]) for own in figures)
            verdicts[at], distances[at] = "nan", math.inf
            words[at] = f"the numbers of NaNs and infinities are {first} in A, {second} in B"
        for at, (verdict, distance, why) in self.verdicts_without_values.items():
            verdicts[at], distances[at], words[at] = verdict, distance, why
            bounds[at] = bounds[at] if verdict == "fault" else 0.0
        faults = np.array(
            [at for at, verdict in enumerate(verdicts) if verdict == "fault" and at not in words],
            np.int64,
        )
        return Judged(
            verdicts, distances, bounds, words | self.looks(faults, values, ratios), values
        )

    def looks(
        self, which: Places, values: tuple[Floats, Floats], ratios: Mapping[str, float]
    ) -> dict[int, str]:
        """Return a description of the difference between the tensors of each pair in `which`, by
        the pair's index.
        """
        if not len(which):
            return {}
        elements = self.segments.elements(which)
        phases = [self.tensors[at][0].name.phase for at in which.tolist()]
        own = Segments.of(self.segments.lengths[which].tolist())
        return dict(
            zip(
                which.tolist(),
                pattern_causes(values[0][elements], values[1][elements], own, ratios, phases),
                strict=True,
            )
        )


def _are_equal(one: Floats, other: Floats) -> NDArray[np.bool_]:
    """Return for each number whether it is the same in both arrays; NaN is the same as NaN."""
    result: NDArray[np.bool_] = (one == other) | (np.isnan(one) & np.isnan(other))
    return result


def _have_equal_parts(one: LoggedTensor, other: LoggedTensor) -> bool:
    """Return whether both runs logged the same parts of a tensor, so that these can be compared
    although others are missing.
    """
    places = [{part.record.placement for part in entry.parts} for entry in (one, other)]
    return places[0] == places[1]


@dataclass(frozen=True, eq=False)
class Copy:
    """A copy of a part of a tensor that a further rank logged in A, in B or in both. `pair` is the
    index of the tensor's pair. For A and for B: `rows` are the indices of the copy's records,
    `firsts` those of the records with which the first rank logged this part, and `tensors` the
    tensors, made with the copy instead of the first rank's part.
    """

    pair: int
    rank: int
    rows: tuple[int, int]
    firsts: tuple[int, int]
    tensors: tuple[LoggedTensor, LoggedTensor]
    side: int | None
    """The only run in which this rank logged a copy (0 for A, 1 for B); None if both have it."""


def copies_of_pairs(
    pairs: Sequence[tuple[LoggedTensor, LoggedTensor]], patterns: tuple[Pattern, Pattern]
) -> Iterator[Copy]:
    """Yield the copies that further ranks logged, for the tensors of all pairs. If a run lacks the
    copy of a rank, the first rank's part takes its place.
    """
    for at, pair in enumerate(pairs):
        if not (pair[0].replicas or pair[1].replicas):
            continue
        firsts = [
            {without_replicas(part.record.placement): part for part in entry.parts}
            for entry in pair
        ]
        copies = [_copies_by_place(entry) for entry in pair]
        for place in dict.fromkeys((*copies[0], *copies[1])):
            rows, first_rows, tensors, sides = [], [], [], []
            for side, entry in enumerate(pair):
                first = firsts[side].get(place[0])
                copy = copies[side].get(place, first)
                number = 0 if first is None else patterns[side].rows[id(first)]
                first_rows.append(number)
                rows.append(number if copy is None else patterns[side].rows[id(copy)])
                parts = tuple(copy if part is first else part for part in entry.parts)
                tensors.append(LoggedTensor(entry.name, parts, joined=entry.joined))  # type: ignore[arg-type]
                if copy is not None and copy.rank == place[1]:
                    sides.append(side)
            yield Copy(
                at,
                place[1],
                (rows[0], rows[1]),
                (first_rows[0], first_rows[1]),
                (tensors[0], tensors[1]),
                sides[0] if len(sides) == 1 else None,
            )


def _copies_by_place(entry: LoggedTensor) -> dict[tuple[Any, int, int], LoggedPart]:
    """Return the copies of a tensor's parts by placement, rank, and number among those of the rank."""
    places: dict[tuple[Any, int, int], LoggedPart] = {}
    counts: dict[tuple[Any, int], int] = {}
    for copy in entry.replicas:
        key = without_replicas(copy.record.placement), copy.rank
        counts[key] = counts.get(key, 0) + 1
        places[*key, counts[key]] = copy
    return places


def coarsest_epsilon(one: LoggedTensor, other: LoggedTensor, formats: Iterable[str]) -> float:
    """Return the machine epsilon of the coarsest among the number formats of both tensors and
    `formats`; 0 if none of these is a floating-point format.
    """
    return max(map(torch_epsilon, {one.first.dtype, other.first.dtype, *formats}))


def torch_epsilon(name: str) -> float:
    """Return the machine epsilon of a torch number format; 0 if it is no floating-point format."""
    dtype = getattr(torch, name)
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


class Pairing:
    """The pairs of tensors in all steps of two runs that have these patterns. `early` are pairs
    from before the update, `late` from after it, and `alone` are tensors that only one run has.
    """

    def __init__(self, first: TracedRun, patterns: tuple[Pattern, Pattern], partial: bool) -> None:
        self.patterns, self._partial = patterns, partial
        # Memory and shards belong to one layout: the other run has nothing to hold against them.
        comparable = (
            [entry for entry in pattern.entries if entry.name.kind not in (MEMORY, SHARD)]
            for pattern in patterns
        )
        self.ours, self.theirs = _match_entries(*comparable)
        self.gatherings = Gathering(self.ours, patterns[0]), Gathering(self.theirs, patterns[1])
        self.sections = tuple(
            {phase_and_kind(entry.name) for entry in entries}
            for entries in (self.ours, self.theirs)
        )
        words = all(map(keywords_of, (self.ours, self.theirs)))
        places = {matching_name(entry.name, words): at for at, entry in enumerate(self.theirs)}
        # What is left of `places` is in B alone.
        pairs = [
            (at, places.pop(matching_name(entry.name, words), None))
            for at, entry in enumerate(self.ours)
        ]
        self.alone = [at for at, other in pairs if other is None], list(places.values())
        both = [(at, other) for at, other in pairs if other is not None]
        late = [self.ours[at].name.phase == "update" for at, _ in both]
        self.early, self.late = (
            self._pairs([pair for pair, is_late in zip(both, late, strict=True) if is_late is flag])
            for flag in (False, True)
        )
        names = [
            *(self.ours[at].name for at, _ in pairs),
            *(self.theirs[at].name for at in self.alone[1]),
        ]
        self.order = sorted(range(len(names)), key=lambda at: first.order(names[at]))
        self._by_section: tuple[dict[Section, list[int]], ...] = (
            defaultdict(list),
            defaultdict(list),
        )
        for side, entries in enumerate((self.ours, self.theirs)):
            for at, entry in enumerate(entries):
                if self.gatherings[side].told[at]:
                    self._by_section[side][phase_and_kind(entry.name)].append(at)

    def _pairs(self, rows: Sequence[tuple[int, int]]) -> Pairs:
        ours, theirs = (np.array([row[side] for row in rows], np.int64) for side in (0, 1))
        return Pairs(
            self.gatherings,
            ours,
            theirs,
            tuple((self.ours[at], self.theirs[other]) for at, other in rows),
            self._partial,
        )

    def scales(self, tables: tuple[Table, Table]) -> Mapping[Section, float]:
        """Return the usual size of tensors, by phase and kind: the median of their root mean
        squares in the run in which it is smaller.
        """
        medians: dict[Section, float] = {}
        for table, sections in zip(tables, self._by_section, strict=True):
            for name, rows in sections.items():
                sizes = table.sizes[rows][table.finite[rows] != 0]
                if len(sizes):
                    # The median: one tensor that exploded must not widen the bounds of all others.
                    size = float(np.median(sizes))
                    medians[name] = min(size, medians.get(name, size))
        return defaultdict(float, medians)
