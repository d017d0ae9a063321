"""Desync checks: several ranks hold copies of one tensor, and digests of the copies are compared
once a step, before the update.

Hooks compute digests and call no collectives. At a point of the step that every rank reaches, ranks
first compare the number and the names of their digests, so that different lists lead to a report
and not to a hang. Then they compare the digests. Only if all ranks agree which digests differ, they
gather the tensors themselves.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bridge.engine.comm import Comm, Group
from bridge.errors import BridgeError
from bridge.trace.digest import digest_tensor, hash_bits, hash_hastily
from bridge.trace.findings import Findings, TraceFinding
from bridge.trace.gather import gather_tensor
from bridge.trace.placement import Placement
from bridge.trace.record import PHASES, Name
from bridge.trace.source import Kind, Moment, TraceSource
from bridge.trace.tracer import OUTPUT, Sight

FIRST = 2
"""Number of first steps in which everything is compared."""
HEADER = "desync header"
DIGESTS = "desync digests"
VERDICT = "desync verdict"
CULPRIT = "desync values"

PIPELINE = "pipeline"
Replicas = tuple[tuple[str, ...], tuple[int, ...]]
"""The ranks that hold copies of one tensor: the axes along which they lie, and their indices along
the pipeline axis (empty: all).
"""

Action = Literal["log", "raise", "dump"]
ACTIONS: tuple[Action, ...] = ("log", "raise", "dump")
logger = logging.getLogger("bridge.trace")


class DesyncError(BridgeError):
    """Raised if ranks hold different tensors where they must hold copies of one. `mismatches`
    lists the tensors.
    """

    def __init__(self, mismatches: Sequence[Mismatch], dump: Path | None = None) -> None:
        note = (
            ()
            if dump is None
            else (
                f"desync: the tensors that differ were written into {dump}, one file for each rank",
            )
        )
        super().__init__(*(str(mismatch) for mismatch in mismatches), *note)
        self.mismatches, self.dump = tuple(mismatches), dump


@dataclass(frozen=True, slots=True)
class Policy:
    """When and how precisely copies of tensors are compared between ranks, and the reaction to a
    difference.

    Ranks are compared in every step that is a multiple of `every`. Values may differ by `ulps`
    units in the last place (if this is above 0, activations are stored until the end of a step). At
    most `reports` tensors are examined in a step. The reaction is `action`: "log" logs a
    difference, "raise" raises `DesyncError`, and "dump" writes the tensors to `folder` and then
    raises. In steps that are multiples of `thorough`, and in the first two steps, all tensors are
    compared, by digests that detect nearly every change. The other steps compare activations,
    counters and, by quicker digests, updated weights.
    """

    every: int = 1
    action: Action = "raise"
    ulps: int = 0
    reports: int = 8
    folder: Path = Path("desync")
    thorough: int = 1


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor that differs between `ranks`, or, if this is one rank, between two passes of this
    rank. If more than half of the ranks agree, `culprits` are the others.
    """

    name: Name
    ranks: tuple[int, ...]
    culprits: tuple[int, ...]
    detail: str

    def __str__(self) -> str:
        return f"desync: {self.name}: {self.who}; {self.detail}"

    @property
    def who(self) -> str:
        """The ranks that disagree, as text for a message."""
        if len(self.ranks) == 1:
            return f"two passes on rank {self.ranks[0]} differ"
        if not self.culprits:
            return f"ranks {_join_values(self.ranks)} disagree"
        differ = "rank {} differs" if len(self.culprits) == 1 else "ranks {} differ"
        return f"of ranks {_join_values(self.ranks)}, {differ.format(_join_values(self.culprits))} from the others"


@dataclass
class Queued:
    """A tensor to compare, with its digest. The tensor is None if its values are not stored. The
    digest is None as long as it is not computed.
    """

    name: Name
    facts: str
    tensor: Tensor | None
    digest: Tensor | None


@dataclass
class DesyncCheck:
    """The observer that collects the tensors of which several ranks hold copies, and has the
    copies compared before the update.
    """

    source: TraceSource
    desync: Desync
    findings: Findings = field(default_factory=Findings)
    _microbatch: int | None = None
    _seeded: bool = True
    """Whether the random generators of all ranks had the same state at the start. If not, as in a
    script that sets no seed, later steps do not compare them.
    """

    def wants(self, kind: str) -> bool:
        return True

    def saw(self, sight: Sight) -> None:
        if not self.desync.due(sight.name.step):
            return
        if (
            sight.name.kind == OUTPUT
            and self.source.recomputes
            and self.desync.thorough(sight.name.step)
        ):
            self.desync.record_output(sight)
        if not sight.again:
            # A tolerance needs the values to the end of the step; for bits, digests are enough.
            if sight.microbatch != self._microbatch and not self.desync.policy.ulps:
                self._microbatch = sight.microbatch
                self.desync.forget_activations()
            self.desync.add(_apart_by_microbatch(sight), sight.tensor, sight.placement)

    def reach_moment(self, moment: Moment | None) -> None:
        step = self.source.now().step
        if moment is None:
            # First and alone: whether generators agree decides if later steps compare them.
            self._add_held(step - 1, "init", ("generator",))
            self._seeded = not self.desync.differing(step - 1)
            self._add_config(step - 1)
            self._add_held(step - 1, "init", ("weight", "replica", "state"))
            self._compare(step - 1)
        elif moment == "reduced" and self.desync.due(step):
            every: tuple[Kind, ...] = ("gradient", "weight", "replica", "moment", "state")
            self._add_held(
                step, "reduce", every if self.desync.thorough(step) else ("replica", "state")
            )
            self._add_held(step, "reduce", ("generator",) if self._seeded else ())
            self._compare(step)
        elif moment == "updated" and self.desync.due(step):
            self._add_held(step, "update", ("weight", "replica"))
            self._compare(step)

    def _compare(self, step: int) -> None:
        for mismatch in self.desync.compare(step):
            id = "recompute-differs" if len(mismatch.ranks) == 1 else "replicas-differ"
            # Without the step: a finding is reported once for each place.
            where = str(mismatch.name).partition("/")[2]
            self.findings.add(
                [
                    TraceFinding(
                        id, step, where, mismatch.detail, mismatch.culprits or mismatch.ranks
                    )
                ],
                False,
            )

    def _add_config(self, step: int) -> None:
        """Queue the settings for the comparison, because all ranks must have the same settings."""
        axes = tuple(self.desync.comm.mesh.sizes)
        for path, value in self.source.settings().items():
            # Settings have any type; a hash of their text is a tensor like the others.
            number = torch.tensor([_hash_texts([repr(value)])])
            self.desync.hold(
                Name(step, "init", "", None, "config", path), number, Placement.full((1,), axes)
            )

    def _add_held(self, step: int, phase: str, kinds: tuple[Kind, ...]) -> None:
        # One rank has nobody to compare with, and to name all of its tensors takes time.
        for kind in kinds if self.desync.shared else ():
            for part in self.source.tensors(kind):
                name = Name(step, phase, part.layer, None, part.kind, part.tensor)
                self.desync.hold(name, part.local, part.placement, part.holders)


def _apart_by_microbatch(sight: Sight) -> Name:
    return sight.name._replace(microbatch=sight.microbatch)


@dataclass
class Desync:
    """The tensors that one rank has queued for comparison, and the comparison with other ranks.
    Each set in `holders` has the pipeline ranks that hold copies of one tensor. `found` has all
    reported mismatches.
    """

    comm: Comm
    policy: Policy = field(default_factory=Policy)
    holders: Sequence[tuple[int, ...]] = ()
    found: list[Mismatch] = field(default_factory=list)
    _queues: dict[Replicas, list[Queued]] = field(default_factory=dict)
    _forwards: dict[Name, list[Tensor]] = field(default_factory=dict)
    _differing: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sizes = {axis: size for axis, size in self.comm.mesh.sizes.items() if size > 1}
        sets = [
            (),
            *(places for places in self.holders if 1 < len(places) < self._sizes.get(PIPELINE, 1)),
        ]
        # Every choice of at least one axis. Making a group is a collective call: all ranks make the
        # same ones in the same order, also those that they do not belong to.
        names = tuple(self._sizes)
        choices = [
            tuple(axis for place, axis in enumerate(names) if mask >> place & 1)
            for mask in range(1, 1 << len(names))
        ]
        self._groups: dict[Replicas, Group] = {}
        for places in sets:
            for axes in choices:
                if places and PIPELINE in axes:
                    others = (axis for axis in axes if axis != PIPELINE)
                    self._groups[axes, places] = self.comm.part(PIPELINE, places, *others)
                elif not places:
                    self._groups[axes, places] = self.comm.along(axes)
        self._queues = {key: [] for key in self._groups}

    def due(self, step: int) -> bool:
        """Whether ranks are compared in a step."""
        return step % self.policy.every == 0

    def thorough(self, step: int) -> bool:
        """Whether everything is compared in a step."""
        return step <= FIRST or step % self.policy.thorough == 0

    def add(self, name: Name, tensor: Tensor, placement: Placement) -> None:
        """Queue `tensor` with the digest of its present values, for comparison with the ranks that
        hold copies of it.
        """
        queue = self._queue(placement)
        if queue is not None:
            queue.append(
                Queued(name, _tensor_facts(name, tensor), tensor.detach(), digest_tensor(tensor))
            )

    @property
    def shared(self) -> bool:
        """Whether there are other ranks, which may hold copies."""
        return bool(self._sizes)

    def hold(
        self, name: Name, tensor: Tensor, placement: Placement, holders: tuple[int, ...] = ()
    ) -> None:
        """Queue `tensor` for comparison with the ranks that hold copies of it. The values must not
        change before the comparison.
        """
        queue = self._queue(placement, holders)
        if queue is not None:
            queue.append(Queued(name, _tensor_facts(name, tensor), tensor.detach(), None))

    def _queue(self, placement: Placement, holders: tuple[int, ...] = ()) -> list[Queued] | None:
        """Return the queue for tensors that are copied along the axes of `placement`, or None if
        no other rank holds a copy.
        """
        axes = tuple(axis for axis in self._sizes if axis in placement.replicas)
        some = PIPELINE in axes and len(holders) < self._sizes[PIPELINE]
        return self._queues[axes, holders if some else ()] if axes else None

    def record_output(self, sight: Sight) -> None:
        """Record the digest of an output. If backward computes the output again, `compare`
        compares the two digests.
        """
        self._forwards.setdefault(_apart_by_microbatch(sight), []).append(
            digest_tensor(sight.tensor)
        )

    def forget_activations(self) -> None:
        """Release the queued activations, which belong to an earlier microbatch. Only their
        digests are kept.
        """
        for queue in self._queues.values():
            for entry in queue:
                entry.tensor = None

    def compare(self, step: int) -> tuple[Mismatch, ...]:
        """Compare all queued tensors, and return those that differ; all ranks must call this.

        Unless the action of the policy is "log", every rank raises `DesyncError` if any rank found
        a difference.
        """
        mismatches = self.differing(step)
        mismatches += [
            Mismatch(
                name,
                (self.comm.rank,),
                (),
                "the recomputation in backward gave other bits than the forward pass",
            )
            for name, (first, *again) in self._forwards.items()
            if any(not torch.equal(first, other) for other in again)
        ]
        self._forwards.clear()
        self.found += mismatches
        if self.policy.action == "log":
            for mismatch in mismatches:
                logger.error("%s", mismatch)
            self._differing.clear()
            return tuple(mismatches)
        # All ranks raise or none: one that raised alone would leave the others in their next call.
        there = self._gather_tensor(VERDICT, torch.tensor([int(bool(mismatches))]), self.comm.world)
        if there.any():
            dump = self._dump_tensors(step) if self.policy.action == "dump" else None
            name = Name(step, "reduce", "", None, "elsewhere")
            remote = Mismatch(
                name, self.comm.world.ranks, (), "other ranks report tensors that differ"
            )
            raise DesyncError(mismatches or [remote], dump)
        self._differing.clear()
        return tuple(mismatches)

    def _dump_tensors(self, step: int) -> Path:
        """Write this rank's copies of the tensors that differ into a file, by name. Returns the
        folder of the file.
        """
        folder = self.policy.folder / f"step-{step:08d}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(self._differing, folder / f"rank-{self.comm.rank:05d}.safetensors")
        except (OSError, SafetensorError) as error:
            raise BridgeError(
                *(str(mismatch) for mismatch in self.found), f"{folder}: cannot be written: {error}"
            ) from None
        return folder

    def differing(self, step: int) -> list[Mismatch]:
        """Compare all queued tensors, and return those that differ between ranks. The queues are
        empty afterwards. All ranks must call this; differences are returned, not raised.
        """
        for (axes, _), queue in self._queues.items():
            # Stages run their layers in other orders, so that there the name decides too.
            queue.sort(key=_when_and_what if PIPELINE in axes else _sorting_key)
        rows = []
        for queue in self._queues.values():
            # How a queue falls into runs, how many tensors it has, which, and what else is alike.
            lengths = _hash_texts(str(len(run)) for run in _adjoining_runs(queue))
            facts = _hash_texts(entry.facts for entry in queue)
            rows.append([lengths, len(queue), facts, step, self._policy_hash])
        # One call for all queues, before any other: with other lists, ranks would make other calls.
        own = torch.tensor(rows, dtype=torch.int64).view(-1, 5)
        headers = self._gather_tensor(HEADER, own, self.comm.world)
        mismatches: list[Mismatch] = []
        for at, (key, queue) in enumerate(self._queues.items()):
            mismatches += self._compare_digests(
                self._groups[key], queue, step, headers[list(self._groups[key].ranks), at]
            )
            queue.clear()
        return mismatches

    @cached_property
    def _policy_hash(self) -> int:
        """A hash of the policy. All ranks compare it first, because ranks with different policies
        would call different collectives.
        """
        return _hash_texts([repr(self.policy)])

    def _compare_digests(
        self, group: Group, queue: list[Queued], step: int, headers: Tensor
    ) -> Iterator[Mismatch]:
        """Compare one digest for each sequence of tensors that adjoin in memory. If it differs,
        compare one digest for each tensor of the sequence. Yields the tensors that differ.
        """
        # Columns: lengths of runs, count, names, step, policy. The first alone may differ.
        alike = (headers == headers[0]).all(0)
        if not alike[1:].all():
            yield self._lists(group, queue, step, headers)
            return
        # Ranks whose tensors lie otherwise in memory compare them one by one.
        runs = list(_adjoining_runs(queue)) if alike[0] else [[entry] for entry in queue]
        hash_function = hash_bits if self.thorough(step) else hash_hastily
        odd, _ = self._differ(group, [_digest_of(run, hash_function) for run in runs])
        suspects = [entry for index in odd for entry in runs[index]]
        indices, digests = self._differ(group, [_digest_of_queued(entry) for entry in suspects])
        for index in indices[: self.policy.reports]:
            mismatch = self._examine_tensor(group, suspects[index], digests[:, index])
            if mismatch:
                yield mismatch

    def _differ(self, group: Group, digests: Sequence[Tensor]) -> tuple[list[int], Tensor]:
        """Return the indices of the `digests` that differ between the ranks of a group, and the
        digests of all ranks.
        """
        if group.size == 1 or not digests:
            return [], torch.empty(0)
        every = self._gather_tensor(DIGESTS, torch.stack(tuple(digests)), group)
        return (every != every[0]).any(0).any(-1).nonzero().view(-1).tolist(), every

    def _gather_tensor(self, name: str, tensor: Tensor, group: Group) -> Tensor:
        """Return the tensors that the ranks of the group passed to this call, as one tensor
        (ranks, ...).
        """
        return gather_tensor(self.comm, name, tensor, group)

    def _lists(self, group: Group, queue: list[Queued], step: int, headers: Tensor) -> Mismatch:
        """Return the mismatch that reports different queues: some ranks queued other tensors than
        others. It names the first tensor of the queues that is not the same on all ranks.
        """
        texts = _gather_texts(self, group, "\n".join(entry.facts for entry in queue))
        lists = [text.splitlines() for text in texts]
        place = next(
            (at for at, facts in enumerate(zip(*lists, strict=False)) if len(set(facts)) > 1),
            min(map(len, lists)),
        )
        items = [facts[place] if place < len(facts) else "nothing more" for facts in lists]
        differing_items = "; ".join(
            f"rank {rank} has {item}" for rank, item in zip(group.ranks, items, strict=True)
        )
        policies = (
            ""
            if len(set(headers[:, 4].tolist())) == 1
            else "; the policies of the ranks differ too"
        )
        counts = _join_values(headers[:, 1].tolist())
        name = Name(step, "reduce", "", None, "list")
        return Mismatch(
            name,
            group.ranks,
            _minority_ranks(group, items),
            f"the ranks compare {counts} tensors, and tensor {place + 1} differs: {differing_items}{policies}",
        )

    def _examine_tensor(self, group: Group, entry: Queued, digests: Tensor) -> Mismatch | None:
        """Gather the copies of a tensor from the ranks of a group, and return their difference.
        Return None if the copies differ only within the policy's tolerance.
        """
        nans = digests[:, 1].tolist()
        culprits = _minority_ranks(group, [tuple(row) for row in digests.tolist()])
        nan_note = f"; NaNs: {_join_values(nans)}" if any(nans) else ""
        tensor, has_values = entry.tensor, torch.tensor([int(entry.tensor is not None)])
        # A rank without the values could not take part in the next call: then none does.
        if not bool(self._gather_tensor(CULPRIT, has_values, group).all()) or tensor is None:
            return Mismatch(entry.name, group.ranks, culprits, f"its values are gone{nan_note}")
        values = self._gather_tensor(CULPRIT, tensor.contiguous(), group)
        # Of a rank that holds what most hold; without a majority, of the first.
        place = next((at for at, rank in enumerate(group.ranks) if rank not in culprits), 0)
        reference = values[place]
        worst = max(
            (_measure_difference(other, reference) for other in values),
            key=lambda difference: difference.ulps,
        )
        if worst.elements and worst.ulps <= self.policy.ulps and len(set(nans)) == 1:
            return None
        self._differing[str(entry.name)] = tensor.detach().contiguous().cpu().clone()
        return Mismatch(entry.name, group.ranks, culprits, f"{worst}{nan_note}")


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between two copies of a tensor: the number of elements that differ, the
    number of all elements, the index of the first that differs, and the largest difference, also
    in units in the last place.
    """

    elements: int
    of: int
    first: tuple[int, ...]
    largest: float
    ulps: int

    def __str__(self) -> str:
        if not self.elements:
            return "the tensors had different digests, but were overwritten since and are equal now"
        return (
            f"{self.elements} of {self.of} elements, first at {list(self.first)},"
            f" largest difference {self.largest:.3g} ({self.ulps} ulps)"
        )


def _measure_difference(one: Tensor, other: Tensor) -> Difference:
    words = [_as_ordered_integers(tensor) for tensor in (one, other)]
    differ = (words[0] != words[1]) & ~(_nan_mask(one) & _nan_mask(other))
    places = differ.nonzero()
    if not len(places):
        return Difference(0, one.numel(), (), 0.0, 0)
    # Ordered words of neighbours are one apart: the distance is in units in the last place.
    gaps = (words[0] - words[1]).abs()[differ]
    largest = (one.double() - other.double()).abs()[differ].max()
    return Difference(
        len(places), one.numel(), tuple(places[0].tolist()), float(largest), int(gaps.max())
    )


def _nan_mask(tensor: Tensor) -> Tensor:
    return (
        tensor.isnan() if tensor.is_floating_point() else torch.zeros_like(tensor, dtype=torch.bool)
    )


def _as_ordered_integers(tensor: Tensor) -> Tensor:
    """Return int64 numbers with the same order as the values, such that neighbouring values have
    neighbouring numbers. Negative zero has the number -1, positive zero 0.
    """
    if not tensor.is_floating_point():
        return tensor.long()
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.contiguous().view(word).long()
    lowest = torch.iinfo(word).min
    # Floats are sign and magnitude: below zero, words grow as the values fall.
    return torch.where(bits < 0, lowest - bits - 1, bits)


def _minority_ranks(group: Group, values: Sequence[object]) -> tuple[int, ...]:
    """Return the ranks whose value differs from the value that more than half of the group has.
    Return no ranks if there is no such value.
    """
    value, count = Counter(values).most_common(1)[0]
    if count < 2 or count * 2 <= len(values):
        return ()
    return tuple(rank for rank, other in zip(group.ranks, values, strict=True) if other != value)


def _gather_texts(check: Desync, group: Group, text: str) -> list[str]:
    # frombuffer refuses an empty buffer.
    raw = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    sizes = check._gather_tensor(CULPRIT, torch.tensor([len(raw)]), group).view(-1).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(raw)] = raw
    rows = check._gather_tensor(CULPRIT, padded, group)
    return [
        bytes(row[:size].tolist()).decode().strip() for row, size in zip(rows, sizes, strict=True)
    ]


def _hash_texts(texts: Iterable[str]) -> int:
    """Return a hash of texts as a signed 64-bit integer. The order of the texts counts."""
    hasher = blake2b(digest_size=8)
    for text in texts:
        # A separator: without it, texts that are cut elsewhere hash alike.
        hasher.update(text.encode() + b"\0")
    return int.from_bytes(hasher.digest(), "little", signed=True)


def _tensor_facts(name: Name, tensor: Tensor) -> str:
    return f"{name} {tuple(tensor.shape)} {tensor.dtype}"


def _adjoining_runs(queue: Iterable[Queued]) -> Iterator[list[Queued]]:
    """Yield the queue as sequences of tensors that adjoin in memory, each as long as possible, so
    that one digest can cover a whole sequence.
    """
    run: list[Queued] = []
    for entry in queue:
        if run and not _adjoin(run[-1], entry):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


def _adjoin(one: Queued, other: Queued) -> bool:
    first, second = one.tensor, other.tensor
    if first is None or second is None or one.digest is not None or other.digest is not None:
        return False
    if first.dtype != second.dtype or not (first.is_contiguous() and second.is_contiguous()):
        return False
    end = first.storage_offset() + first.numel()
    return (
        end == second.storage_offset()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    )


def _digest_of(run: Sequence[Queued], hash_function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return one digest (2,) of a sequence of tensors that adjoin in memory. It depends on the
    payloads of NaNs, so it may differ between ranks although the tensors count as equal. Where it
    differs, ranks then compare `_digest_of_queued` of each tensor, which decides whether the tensor differs.
    """
    first = run[0]
    if first.digest is not None or first.tensor is None:
        return _digest_of_queued(first)
    size = sum(entry.tensor.numel() for entry in run if entry.tensor is not None)
    # One view over all of them: they adjoin in one storage.
    whole = (
        first.tensor.as_strided((size,), (1,), first.tensor.storage_offset())
        if len(run) > 1
        else first.tensor
    )
    digest = hash_function(whole)
    return torch.stack([digest, torch.zeros_like(digest)])


def _digest_of_queued(entry: Queued) -> Tensor:
    """Return the digest (2,) of one tensor. It does not depend on the payloads of NaNs."""
    if entry.digest is None:
        assert entry.tensor is not None, "expected the values of a tensor that has no digest"
        entry.digest = digest_tensor(entry.tensor)
    return entry.digest


def _sorting_key(entry: Queued) -> tuple[int, int]:
    """Return the sorting key of a tensor by phase and microbatch, so that the order does not
    depend on the schedule.
    """
    return PHASES.index(entry.name.phase), entry.name.microbatch or 0


def _when_and_what(entry: Queued) -> tuple[tuple[int, int], str]:
    """Return the sorting key of a tensor by phase, microbatch and name, for ranks that run
    different layers and so queue tensors in different orders.
    """
    return _sorting_key(entry), entry.facts


def _join_values(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
