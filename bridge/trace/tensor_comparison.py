"""Comparing: the comparison of two runs, step by step. Rounding in earlier steps moves the weights
of the two runs apart; the bounds of later steps allow for this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.trace.adaptive import Batch, Updates
from bridge.trace.columns import ColumnReader, Columns, Gathering
from bridge.trace.patterns import pattern_causes
from bridge.trace.record import Name
from bridge.trace.run import LoggedTensor, TracedRun
from bridge.trace.segments import Floats, Places, Segments
from bridge.trace.tensor_pairs import (
    Copy,
    Judged,
    Pairing,
    Pairs,
    Section,
    Table,
    coarsest_epsilon,
    copies_of_pairs,
    phase_and_kind,
    torch_epsilon,
)
from bridge.trace.verdicts import FAULTS, TensorVerdict

SLACK = 8.0
"""Number of successive roundings that the bounds assume for one layer."""

GAIN = 8.0
"""Maximum factor by which values may be farther apart than the weights from which they are
computed.
"""

SURE = 2.0
"""The same in a 16-bit format, if all numbers of a step before agree bit by bit: both runs compute
alike, and what is left is the last rounding.
"""

UNKNOWN = 100.0
"""Factor by which the bounds are widened after an adaptive update of which the logs have no
samples.
"""

COARSE, FEW = 1e-4, 4
"""The largest unit in the last place of formats with 32 bits or more, and the number of samples
that more than a chance changes.
"""

LOSS = "loss"
"""Kind of the number from which backward started."""

RUNNING = ("forward", "backward")
"""Names of the phases in which layers run. A tensor of such a phase is seen only if hooks can see
its layer.
"""


class Half:
    """The pairs of tensors in one half of a step (before the update, or after it), with everything
    about them that is equal in similar steps.
    """

    def __init__(
        self, pairs: Pairs, pairing: Pairing, runs: tuple[TracedRun, TracedRun], late: bool
    ) -> None:
        run = runs[0]
        self.pairs, self.late = pairs, late
        self.names = [one.name for one, _ in pairs.tensors]
        self.copies = tuple(copies_of_pairs(pairs.tensors, pairing.patterns))
        self._rows = tuple(
            (
                np.array([copy.rows[side] for copy in self.copies], np.int64),
                np.array([copy.firsts[side] for copy in self.copies], np.int64),
            )
            for side in (0, 1)
        )
        # Reversed: of two places with one name, the first stays.
        layers = {layer: at + 1 for at, layer in reversed(list(enumerate(run.layers)))}
        places = [layers.get(name.layer, len(run.layers)) for name in self.names]
        # Backward comes after all of forward, and goes from the last layer to the first.
        depths = [
            at if name.phase == "forward" else 2 * len(run.layers) - at + 1
            for at, name in zip(places, self.names, strict=True)
        ]
        self.depths = np.maximum(np.array(depths, np.float64), 1)
        self.starts = np.array([name.phase == "init" for name in self.names], bool)
        # `units`: every format of the run may have rounded on the way; `own_units`: only its own.
        self.units = np.array(
            [coarsest_epsilon(*pair, _formats_of(runs)) for pair in pairs.tensors]
        )
        self.own_units = np.array([coarsest_epsilon(*pair, ()) for pair in pairs.tensors])
        self._apart = {
            at: rows
            for at, pair in enumerate(pairs.tensors)
            if (rows := _common_parts(*pair, pairing))
        }

    def batch(self, condition: Callable[[Name], bool]) -> tuple[Places, Batch]:
        """Return the indices of the pairs that have samples and whose names `condition` accepts,
        and these pairs as a batch.
        """
        rows = np.array(
            [
                at
                for at, name in enumerate(self.names)
                if self.pairs.sample_mask[at] and condition(name)
            ],
            np.int64,
        )
        keys = tuple((self.names[at].layer, self.names[at].tensor) for at in rows.tolist())
        return rows, Batch(keys, Segments.of(self.pairs.segments.lengths[rows].tolist()))

    @cached_property
    def copied(self) -> set[Name]:
        """The names of the tensors of which several ranks logged copies."""
        return {copy.tensors[0].name._replace(step=0) for copy in self.copies}

    @cached_property
    def weights(self) -> tuple[Places, Batch]:
        """The pairs of weights that have samples, in any phase."""
        return self.batch(lambda name: name.kind == "weight")

    @cached_property
    def begins(self) -> tuple[Places, Batch]:
        """The pairs that have samples and were logged before the first step."""
        return self.batch(lambda name: name.phase == "init")

    @cached_property
    def gradients(self) -> tuple[Places, Batch]:
        """The pairs of reduced gradients that have samples."""
        return self.batch(lambda name: phase_and_kind(name) == ("reduce", "gradient"))

    @cached_property
    def all_of(self) -> tuple[Places, Batch]:
        """All pairs with samples."""
        return self.batch(lambda name: True)

    def select_rows(self, values: tuple[Floats, Floats], rows: Places) -> Floats:
        """Return the samples (2, samples) of the pairs `rows` in both runs."""
        elements = self.pairs.segments.elements(rows)
        return np.stack([values[0][elements], values[1][elements]])

    def differing(self, both: tuple[Columns, Columns]) -> list[Copy]:
        """Return the copies in a step whose statistics differ, in one of the runs, from those of
        the copy that the first rank of this run logged.
        """
        if not self.copies:
            return []
        apart = np.zeros(len(self.copies), bool)
        for columns, (rows, firsts) in zip(both, self._rows, strict=True):
            numbers = np.concatenate([columns.raw, columns.factors[:, None]], axis=1)
            apart |= (numbers[rows] != numbers[firsts]).any(axis=1)
        return [self.copies[at] for at in apart.nonzero()[0].tolist()]

    def ranks(self, at: int, first: Columns, second: Columns) -> tuple[int, ...]:
        """Return the ranks of A that logged a part of this tensor which differs from the same part
        in B. The result is empty if all parts differ.
        """
        rows = self._apart.get(at, [])
        odd = [
            rank
            for rank, ours, theirs in rows
            if not _are_close(first.raw[ours].tolist(), second.raw[theirs].tolist())
        ]
        return tuple(sorted(set(odd))) if len(odd) < len(rows) else ()


def _common_parts(
    one: LoggedTensor, other: LoggedTensor, pairing: Pairing
) -> list[tuple[int, int, int]]:
    """Return three numbers for each part of a tensor that both runs logged in the same parts: the
    rank that logged the part in A, and the indices of the part's records in A and in B. Return an
    empty list if the tensor has one part, or other parts in B.
    """
    theirs = {part.record.placement: part for part in other.parts}
    pairs = [(part, theirs.get(part.record.placement)) for part in one.parts]
    if len(pairs) < 2 or any(match is None for _, match in pairs):
        return []
    rows = pairing.patterns[0].rows, pairing.patterns[1].rows
    return [(part.rank, rows[0][id(part)], rows[1][id(match)]) for part, match in pairs]


def _are_close(one: Sequence[float], other: Sequence[float]) -> bool:
    # By squares, smallest and largest: plain sums cancel, and rounding moves them far.
    return one == other or (
        math.isclose(one[4], other[4], rel_tol=1e-6)
        and math.isclose(one[5], other[5], rel_tol=1e-5, abs_tol=1e-12)
        and math.isclose(one[6], other[6], rel_tol=1e-5, abs_tol=1e-12)
    )


class Comparer:
    """Compares the steps of two runs. Steps have to be given in order, because bounds depend on
    earlier steps.
    """

    def __init__(self, first: TracedRun, second: TracedRun) -> None:
        self.runs = first, second
        # In an order that does not depend on which run is A.
        several = sorted((run.about.get("settings", {}) for run in self.runs), key=str)
        settings = {**several[0], **several[1]}
        self.updates = Updates.of(settings) if any(map(_is_adaptive, self.runs)) else None
        self.ratios = _layout_ratios(first, second)
        self._readers = ColumnReader(first), ColumnReader(second)
        self._last: int | None = None
        self._equal, self._since = True, 0
        """Whether both runs had equal weights and buffers before this step, as far as the logs
        show, and the number of steps since they had.
        """
        self._alike = False
        """Whether all numbers of a step before this one agree bit by bit, and all since."""
        self._early_equal = True
        """Whether all tensors of this step before the update are equal, bit by bit."""
        self._first_differing = 0.0
        """The depth of the first layer in this step with a tensor that differs by a bit."""
        self._copied: set[Name] = set()
        self._apart: set[Name] = set()
        """Tensors of which ranks logged different values when they first logged several: each rank
        has its own, as buffers of norms under plain DDP.
        """
        self._known: dict[tuple[int, int], tuple[Pairing, Half, Half]] = {}
        self._seen: tuple[set[Section], set[Section]] = set(), set()
        self._before: dict[tuple[str, str], Floats] = {}
        self._moved: dict[int, NDArray[np.bool_]] = {}
        """By the index of a pair of weights: which samples the last update changed in both runs."""
        self._hidden = {layer for run in self.runs for layer in run.about.get("hidden", ())}
        self.formats: dict[str, tuple[Name, str, str]] = {}
        """By kind of tensor: the first tensor whose number format differs between the runs, with
        the format in A and in B.
        """

    def step(self, step: int) -> list[TensorVerdict]:
        """Compare every tensor of a step. Returns one result for each tensor, in order of
        execution.
        """
        both = self._readers[0].columns(step), self._readers[1].columns(step)
        pairing, early, late = self._pair_columns(both)
        if pairing.ours or pairing.theirs:
            # Updates that were not logged cannot be followed.
            if self._last is not None and step > self._last + 1:
                self._equal, self._since = False, self._since + step - self._last - 1
                if self.updates is not None:
                    self.updates.drift = None
            self._last = step
        for sections, own in zip(self._seen, pairing.sections, strict=True):
            sections |= own
        tables = Table.of(pairing.gatherings[0], both[0]), Table.of(pairing.gatherings[1], both[1])
        scales = pairing.scales(tables)
        equal = [half.pairs.equal(tables) for half in (early, late)]
        self._early_equal = bool(equal[0].all())
        depths = [half.depths[~same] for half, same in zip((early, late), equal, strict=True)]
        self._first_differing = min(np.concatenate(depths), default=math.inf) if self._equal else 0
        results: list[TensorVerdict | None] = [None] * (len(pairing.ours) + len(pairing.alone[1]))
        losses = self._compare_losses(both, step)
        for half in (early, late):
            if half.names:
                self._half(half, pairing, both, tables, scales, step, results)
        if self.updates is not None:
            self.updates.end()
        self._end_step(early, late, equal, losses)
        for at in pairing.alone[0]:
            results[at] = self._alone(pairing.ours[at], step, True)
        for at, row in enumerate(pairing.alone[1], len(pairing.ours)):
            results[at] = self._alone(pairing.theirs[row], step, False)
        sequence = (results[at] for at in pairing.order)
        return [*(line for line in sequence if line is not None), *losses]

    def _end_step(
        self,
        early: Half,
        late: Half,
        equal: Sequence[NDArray[np.bool_]],
        losses: Sequence[TensorVerdict],
    ) -> None:
        """Record whether both runs have equal weights and buffers after this step. They do if all
        of them were logged and are equal, or if no logged number has differed so far.
        """
        whole = len(late.weights[0]) and not any(run.filter.notes() for run in self.runs)
        alike = not losses and all(same.all() for same in equal)
        # What is there before the first step shows nothing of how the runs compute.
        self._alike = alike and (self._alike or not early.starts.all())
        if (whole and equal[1].all()) or (self._equal and alike):
            self._equal, self._since = True, 0
            if self.updates is not None:
                self.updates.forget_drift()
        elif early.names or late.names:
            self._equal, self._since = False, self._since + 1

    def _depths(self, half: Half) -> Floats:
        """Return for each pair the square root of the number of layers, over all steps, in which
        rounding may have moved the runs apart: it begins where the logs first differ.
        """
        depths = half.depths * (self._since + 1)
        if self._equal:
            depths = np.maximum(half.depths - self._first_differing + 1, 1)
        roots: Floats = np.sqrt(depths)
        return roots

    def _compare_losses(self, both: tuple[Columns, Columns], step: int) -> list[TensorVerdict]:
        """Compare the losses from which backward started: rank by rank if the same ranks have one of
        their own, else their means. Losses that rounding explains give no result.
        """
        losses = [list(columns.losses) for columns in both]
        known = [[loss for loss in own if loss is not None] for own in losses]
        # An engine that sums the loss over ranks gives all of them the mean.
        alike = [len(set(own)) == 1 for own in known]
        if [loss is None for loss in losses[0]] != [loss is None for loss in losses[1]] or any(
            one and not other for one, other in (alike, alike[::-1])
        ):
            losses = [[sum(own) / len(own)] if own else [None] for own in known]
        formats = [torch_epsilon(name) for name in _formats_of(self.runs)]
        depths = 2.0 * len(self.runs[0].layers) + 1
        grown = depths * (self._since + 1)
        unit = max(formats, default=torch_epsilon("float32"))
        bound = (SURE if self._alike and unit > COARSE else SLACK) * unit * math.sqrt(grown)
        if self.updates is not None:
            drift = self.updates.drift
            bound = bound * UNKNOWN if drift is None else bound + GAIN * drift
        worst, ranks, exact = 0.0, [], self._equal and self._first_differing == math.inf
        for rank, (one, other) in enumerate(zip(*losses, strict=True)):
            if one is None or other is None or one == other or (one != one and other != other):
                continue
            size = min(abs(one), abs(other))
            # What rounding leaves of terms that cancel out is measured by the terms, about 1.
            size = size if exact else max(size, 1.0)
            distance = abs(one - other) / size if size else math.inf
            worst = max(worst, distance) if distance == distance else math.inf
            ranks += [rank] if not distance <= bound else []
        if not worst > bound:
            return []
        means = [
            float(np.mean([loss for loss in own if loss is not None] or [math.nan]))
            for own in losses
        ]
        cause = f"the loss is {means[0]:.6g} in A, {means[1]:.6g} in B"
        some = tuple(ranks) if len(ranks) < len(losses[0]) else ()
        return [
            TensorVerdict(Name(step, "forward", "", None, LOSS), "fault", worst, bound, cause, some)
        ]

    def _pair_columns(self, both: tuple[Columns, Columns]) -> tuple[Pairing, Half, Half]:
        patterns = both[0].pattern, both[1].pattern
        key = id(patterns[0]), id(patterns[1])
        if key not in self._known:
            partial = any(run.keep.get("ranks") for run in self.runs)
            pairing, runs = Pairing(self.runs[0], patterns, partial), self.runs
            for one, other in (*pairing.early.tensors, *pairing.late.tensors):
                if one.first.dtype != other.first.dtype:
                    formats = one.name, one.first.dtype, other.first.dtype
                    self.formats.setdefault(one.name.kind, formats)
            if len(self._known) > MOST:
                self._known.clear()
            self._known[key] = (
                pairing,
                Half(pairing.early, pairing, runs, False),
                Half(pairing.late, pairing, runs, True),
            )
        return self._known[key]

    def _half(
        self,
        half: Half,
        pairing: Pairing,
        both: tuple[Columns, Columns],
        tables: tuple[Table, Table],
        usual: Mapping[Section, float],
        step: int,
        results: list[TensorVerdict | None],
    ) -> None:
        scales = np.array([usual[phase_and_kind(name)] for name in half.names])
        values = half.pairs.values(tables)
        if self.updates is not None and len(half.begins[0]):
            self.updates.begin(half.begins[1], half.select_rows(values, half.begins[0]))
        rounding, bounds = self._bounds(half, values, scales)
        if half.late and self._equal and self._early_equal:
            scales = np.zeros(len(scales))  # an update from equal numbers rounds each by itself
        judgement = half.pairs.judge(tables, bounds, scales, self.ratios, rounding)
        ranks = {
            at: half.ranks(at, *both)
            for at, verdict in enumerate(judgement.verdicts)
            if verdict in FAULTS
        }
        odd_copies = self._copies(half, pairing, both, judgement, scales, ranks)
        if self.updates is not None and len(half.gradients[0]):
            rows, batch = half.gradients
            # At least one rounding apart, even if the samples happen to be equal.
            noise = np.maximum(half.units[rows], judgement.distances[rows])
            noise[half.pairs.equal(tables)[rows] & self._equal] = 0.0
            self.updates.gradients(
                batch, half.select_rows(values, rows), noise, usual["reduce", "gradient"]
            )
        self._changes(half, judgement, values, odd_copies)
        if half.late:
            self._find_still(judgement, self._equal and self._early_equal)
        rows_ = zip(
            half.pairs.ours.tolist(),
            half.names,
            judgement.verdicts,
            judgement.distances.tolist(),
            judgement.bounds.tolist(),
            strict=True,
        )
        for at, (row, name, verdict, distance, bound) in enumerate(rows_):
            results[row] = TensorVerdict(
                Name(step, *name[1:]),
                verdict,
                distance,
                bound,
                judgement.causes.get(at, ""),
                ranks.get(at, ()),
            )

    def _bounds(
        self, half: Half, values: tuple[Floats, Floats], scales: Floats
    ) -> tuple[Floats | None, Floats]:
        """Return two things: for each sample, the distance between the runs that rounding of
        gradients explains (None without an adaptive optimizer), and for each pair the bound of its
        distance.

        The bound is proportional to the machine epsilon of the coarsest number format that was
        used. It grows with the square root of the number of layers and steps since the logs first
        differ, and with the drift that adaptive updates caused since then.
        """
        # Rounding adds up as a random walk does: with the root of the number of roundings.
        depths, updates = self._depths(half), self.updates
        exact = half.late and self._equal and self._early_equal
        # Each weight is updated by itself: no layer before it has moved it.
        depths = np.ones(len(depths)) if exact else depths
        sure = exact or self._alike
        plain, own = (
            np.where(sure & (units > COARSE), SURE, SLACK) * units * depths
            for units in (half.units, half.own_units)
        )
        if updates is None:
            return None, np.where(half.starts, 0.0, own if exact else plain)
        drift = updates.drift
        if not half.late:
            wider = plain * UNKNOWN if drift is None else plain + GAIN * drift
            return None, np.where(half.starts, 0.0, wider)
        rows, batch = half.all_of
        rounding, _, incomputable = updates.weights(
            batch, half.select_rows(values, rows), scales[rows]
        )
        gaps = np.ones(len(half.names), bool)  # without samples, nothing can be followed
        gaps[rows] = incomputable
        # A weight that is lost leaves unknown what comes after it in order of execution.
        unknown = np.concatenate([[drift is None], (np.cumsum(gaps) > 0)[:-1] | (drift is None)])
        if gaps.any():
            updates.drift = None
        spread = np.zeros(half.pairs.segments.size)
        spread[half.pairs.segments.elements(rows)] = rounding
        if exact:
            return None, own
        return spread, np.where(
            half.pairs.sample_mask, np.where(unknown, own * UNKNOWN, own), plain * UNKNOWN
        )

    def _copies(
        self,
        half: Half,
        pairing: Pairing,
        both: tuple[Columns, Columns],
        judgement: Judged,
        scales: Floats,
        ranks: dict[int, tuple[int, ...]],
    ) -> dict[int, Floats]:
        """Compare the copies of tensors that further ranks logged, rank by rank if both runs have
        a copy of a rank. If one run alone has it, it is a difference only if it also differs from
        the first rank's in its own run, which held copies before. Stores in `ranks`, by pair, the
        ranks whose copy differs. Returns, by pair, the values (2, samples) of copies that differ
        although the first rank's are equal.
        """
        odd = half.differing(both)
        new = {copy.tensors[0].name._replace(step=0) for copy in odd} - self._copied
        self._apart |= {name for name in new if name.kind not in ("weight", "gradient", "moment")}
        self._copied |= half.copied
        if not odd:
            return {}
        each, places = np.array([copy.pair for copy in odd], np.int64), np.arange(len(odd))
        gatherings = tuple(
            Gathering([copy.tensors[side] for copy in odd], both[side].pattern) for side in (0, 1)
        )
        tables = tuple(map(Table.of, gatherings, both))

        def judge(
            sides: tuple[int, int], tensors: Sequence[Any], first: bool
        ) -> tuple[Pairs, Judged]:
            """Compare copies of two sides, or of one side with what its first rank logged."""
            other = pairing.gatherings[sides[1]] if first else gatherings[sides[1]]
            table = Table.of(other, both[sides[1]]) if first else tables[sides[1]]
            which = (half.pairs.ours, half.pairs.theirs)[sides[1]][each] if first else places
            pairs = Pairs((gatherings[sides[0]], other), places, which, tuple(tensors))
            bounds = judgement.bounds[each], scales[each]
            return pairs, pairs.judge((tables[sides[0]], table), *bounds, self.ratios)

        pairs, against = judge((0, 1), [copy.tensors for copy in odd], False)
        single = {copy.side for copy in odd} - {None}
        own = {
            side: judge(
                (side, side),
                [(copy.tensors[side], half.pairs.tensors[copy.pair][side]) for copy in odd],
                True,
            )[1]
            for side in single
            if side is not None
        }
        odd_copies: dict[int, Floats] = {}
        faults = {copy.pair for copy in odd if judgement.verdicts[copy.pair] in FAULTS}
        fine: dict[int, set[int]] = {}
        for at, copy in enumerate(odd):
            beyond = against.verdicts[at] in FAULTS
            if copy.side is not None:
                replica = copy.tensors[0].name._replace(step=0) not in self._apart
                counts = replica and own[copy.side].verdicts[at] in FAULTS
            else:
                counts = True
            if copy.pair in faults and not beyond and copy.side != 1:
                # This copy agrees with B's: its rank is not among those to report.
                fine.setdefault(copy.pair, set()).add(copy.rank)
            elif copy.pair not in faults and copy.pair not in odd_copies and beyond and counts:
                # The first rank's copy is right; this one differs.
                judgement.verdicts[copy.pair], judgement.distances[copy.pair] = (
                    against.verdicts[at],
                    against.distances[at],
                )
                judgement.bounds[copy.pair], judgement.causes[copy.pair] = (
                    against.bounds[at],
                    against.causes.get(at, ""),
                )
                ranks[copy.pair] = (copy.rank,)
                elements = pairs.segments.elements(np.array([at]))
                odd_copies[copy.pair] = np.stack([values[elements] for values in against.values])
        for pair, others in fine.items():
            one = half.pairs.tensors[pair][0]
            ranks[pair] = tuple(
                sorted({part.rank for part in (*one.parts, *one.replicas)} - others)
            )
        return odd_copies

    def _changes(
        self,
        half: Half,
        judgement: Judged,
        values: tuple[Floats, Floats],
        odd_copies: Mapping[int, Floats],
    ) -> None:
        """Describe a difference of weights by the difference of their updates, because the weights
        themselves hardly differ.
        """
        rows, batch = half.weights
        if not len(rows):
            return
        self._moved.clear()
        samples = half.select_rows(values, rows)
        pieces = np.split(samples, np.cumsum(batch.segments.lengths)[:-1], axis=1)
        for at, key, pair in zip(rows.tolist(), batch.keys, pieces, strict=True):
            if judgement.verdicts[at] == "fault" and at not in half.pairs.verdicts_without_values:
                before = self._before.get(key)
                # The copy that differs takes the place of the first rank's.
                now = odd_copies.get(at, pair)
                # Without weights before it, the change is not known: zeros, which say nothing.
                change = (
                    now - before if before is not None and before.shape == now.shape else now - now
                )
                if change.any():
                    own = Segments.of([change.shape[1]])
                    looks = pattern_causes(change[0], change[1], own, {}, ["update"])[0]
                    judgement.causes[at] = f"of the updates: {looks}"
            self._moved[at] = pair != self._before.get(key, pair)
            self._before[key] = pair

    def _find_still(self, judgement: Judged, exact: bool) -> None:
        """Judge as a fault that a weight stays as it is, bit by bit, in one run alone: whatever its
        format, rounding does not undo every change, of equal numbers or of most samples. `exact`
        says whether all numbers before the update are equal.
        """
        for at, moved in self._moved.items():
            counts = moved.sum(axis=1)
            least = FEW if exact else max(FEW, moved.shape[1] / 2)
            if judgement.verdicts[at] == "rounding" and not counts.all() and counts.max() >= least:
                judgement.verdicts[at] = "fault"
                judgement.causes[at] = f"of the updates: {'BA'[counts.argmax()]} is all zeros"

    def _alone(self, entry: LoggedTensor, step: int, ours: bool) -> TensorVerdict:
        name = Name(step, *entry.name[1:])
        if self._unseen(name):
            return TensorVerdict(name, "unseen", ranks=self._some(entry) if ours else ())
        return (
            TensorVerdict(name, "only in A", ranks=self._some(entry))
            if ours
            else TensorVerdict(name, "only in B")
        )

    def _some(self, entry: LoggedTensor) -> tuple[int, ...]:
        """Return the ranks of A that logged a tensor, if other ranks of A lack it; otherwise an
        empty result. The result is also empty if A was set to log only some ranks or one copy.
        """
        # Who logged a tensor then does not tell who has it.
        if self.runs[0].keep.get("ranks") or self.runs[0].keep.get("once"):
            return ()
        some = {part.rank for part in (*entry.parts, *entry.replicas)}
        return tuple(sorted(some)) if len(some) < self.runs[0].about["ranks"] else ()

    def _unseen(self, name: Name) -> bool:
        """Return whether one run has a reason not to log this tensor: a compiler may hide the
        layer, a filter may leave the tensor out, the tensor may be an input, or one run may have
        logged no tensor of this kind so far.
        """
        both = self._seen[0] & self._seen[1]
        chosen = all(run.filter.takes(name) for run in self.runs)
        inside = name.phase in RUNNING and name.layer in self._hidden
        return phase_and_kind(name) not in both or name.kind == "input" or inside or not chosen


MOST = 64
"""Number of pairs of patterns, one of each run, whose pairing is remembered."""


def _formats_of(runs: Sequence[TracedRun]) -> tuple[str, ...]:
    """Return the names of the number formats of both runs."""
    return tuple(name for run in runs for name in run.formats)


def _is_adaptive(run: TracedRun) -> bool:
    """Return whether the optimizer of a run divides gradients by their own size, as Adam does."""
    settings: Mapping[str, Any] = run.about.get("settings", {})
    # An optimizer that no setting names is taken for AdamW, as most are.
    return (
        "sgd" not in str(settings.get("optimizer.name", settings.get("optimizer", "adamw"))).lower()
    )


def _layout_ratios(first: TracedRun, second: TracedRun) -> dict[str, float]:
    """Return, by name, the numbers of ranks along each axis and the numbers of microbatches in
    both runs. If a gradient is wrong by such a factor, it was reduced too often or not at all.
    """
    ratios: dict[str, float] = {}
    for label, run in (("A", first), ("B", second)):
        sizes: Mapping[str, Any] = run.about.get("mesh", {})
        counts = {f"{axis} ranks of {label}": size for axis, size in sizes.items()}
        counts[f"microbatches of {label}"] = run.about.get("accumulation") or 1
        ratios.update({what: float(count) for what, count in counts.items() if count > 1})
    return ratios
