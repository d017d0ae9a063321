"""Shards: the flat buffers of each stage, the slice that each data rank owns, and their bytes by kind."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Literal, NamedTuple

from bridge.plan import Dtype, Plan

BYTES: Mapping[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Number of bytes of one element, by format."""

MOMENTS: Mapping[str, int] = {"adam": 2, "adamw": 2, "sgd": 0, "lion": 1}
"""Number of tensors of optimizer state for each parameter, in the master format; momentum adds one
to sgd.
"""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter in a layout.

    `shape` is the shape on one tensor rank, and `stages` are the stages that use the parameter, in
    order. `split` is the dimension that tensor ranks divide: `whole` is the total size of this
    dimension, and this rank's share begins at `start`. If `split` is None, every tensor rank holds
    a replica. If the replica is `partial`, each tensor rank computes only a share of the gradient,
    and the shares must be summed. `replicas` are the pipeline ranks whose stages use the parameter,
    empty if there is only one such rank. `same` is the number of data ranks with the same values,
    for experts that are divided among ranks (0: all data ranks).
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    stages: tuple[int, ...]
    trainable: bool = True
    split: int | None = None
    start: int = 0
    whole: int = 0
    partial: bool = False
    replicas: tuple[int, ...] = ()
    same: int = 0

    @property
    def size(self) -> int:
        """Number of elements on one tensor rank."""
        return prod(self.shape)


def holders_of(parameter: Parameter, homes: Sequence[int]) -> tuple[int, ...]:
    """The pipeline ranks whose stages use a parameter."""
    return tuple(sorted({homes[stage] for stage in parameter.stages}))


def on_rank(parameters: Iterable[Parameter], homes: Sequence[int], rank: int) -> list[Parameter]:
    """Return the parameters that a pipeline rank holds. The stages of these parameters are numbered
    within the rank.
    """
    local = [stage for stage, home in enumerate(homes) if home == rank]
    found = []
    for parameter in parameters:
        stages, holders = (
            tuple(local.index(stage) for stage in parameter.stages if stage in local),
            holders_of(parameter, homes),
        )
        if stages:
            found.append(
                replace(parameter, stages=stages, replicas=holders if len(holders) > 1 else ())
            )
    return found


@dataclass(frozen=True, slots=True)
class Slot:
    """The position of a parameter in its flat buffer, in elements."""

    parameter: Parameter
    start: int

    @property
    def stop(self) -> int:
        """End of the slot."""
        return self.start + self.parameter.size


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of elements of one parameter in a slice of a flat buffer. `start` and `stop` count
    elements of the flattened parameter, and `offset` counts from the start of the slice.
    """

    parameter: Parameter
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of a tensor: its offset and its size along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that cover elements `start` to `stop` of a tensor. Elements are counted in
    row-major order, and the boxes are in this order too.
    """
    if stop <= start:
        return
    if len(shape) < 2:
        yield Box((start,) if shape else (), (stop - start,) if shape else ())
        return
    row = prod(shape[1:])
    # Rows `first` to `last` - 1 are covered whole; the run may begin and end within other rows.
    first, last = -(-start // row), stop // row
    if first > last:
        # The run begins and ends within the same row.
        yield from _in_row(shape, last, start, stop)
        return
    # The end of the row before the whole ones, the whole ones as one box, the beginning of the row behind them. The first and
    # the last are empty if the run begins or ends at the edge of a row.
    yield from _in_row(shape, first - 1, start, first * row)
    if last > first:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that cover elements `start` to `stop`, which are all in row `index` of the first
    dimension.
    """
    row = prod(shape[1:])
    # A row is a tensor with one dimension less, in which the elements count from its own beginning.
    for box in boxes(shape[1:], start - index * row, stop - index * row):
        yield Box((index, *box.offsets), (1, *box.sizes))


@dataclass(frozen=True, slots=True)
class Format:
    """Number formats of a run, and the number of moments of its optimizer, with defaults filled in.

    If `compute` is None, each parameter keeps its own format. With `frozen_in_master`, frozen
    weights have a master too. If `communicate` is None, gradients are exchanged in the format
    `reduce`.
    """

    compute: Dtype | None
    master: Dtype | None
    reduce: Dtype | None
    moments: int
    frozen_in_master: bool = False
    communicate: Dtype | None = None

    @classmethod
    def of(cls, plan: Plan) -> Format:
        """The number formats that `plan` asks for."""
        optimizer, precision = plan.optimizer, plan.precision
        name = optimizer.name or "adamw"
        moments = 1 if name == "sgd" and optimizer.momentum else MOMENTS.get(name, 2)
        frozen = precision.frozen == "master"
        return cls(
            precision.compute,
            precision.master,
            precision.reduce,
            moments,
            frozen,
            precision.communicate,
        )

    def master_of(self, dtype: Dtype, frozen: bool = False) -> Dtype:
        """Return the format of the weights between steps: the format of the optimizer's master, or
        `dtype` for frozen weights.
        """
        return dtype if frozen and not self.frozen_in_master else self.master or _full(dtype)

    def reduce_of(self, dtype: Dtype) -> Dtype:
        """Format in which gradients are accumulated and reduced."""
        return self.reduce or _full(dtype)

    def exchange_of(self, dtype: Dtype) -> Dtype:
        """Format in which data ranks exchange and sum gradients."""
        return self.communicate or self.reduce_of(dtype)


def _full(dtype: Dtype) -> Dtype:
    return "fp32" if dtype in ("bf16", "fp16") else dtype


class Home(NamedTuple):
    """Key of a buffer that holds one flat at a time. `place` is the buffer's number in its pool,
    and the other fields identify the pool.
    """

    tied: bool
    frozen: bool
    dtype: Dtype
    place: int
    same: int = 0


@dataclass(frozen=True)
class Flat:
    """One flat buffer: the parameters of one stage that share a format and are all trainable or all
    frozen.

    `shards` data ranks own one slice each (1: every rank owns the whole flat). `weight_home` and
    `grad_home` are the keys of the buffers in which the flat is whole. `weight_shared` and
    `grad_shared` are true if flats of other stages use these buffers too.
    """

    stage: int
    slots: tuple[Slot, ...]
    shards: int
    weight_home: Home
    grad_home: Home
    weight_shared: bool
    grad_shared: bool
    dtype: Dtype
    master: Dtype
    reduce: Dtype
    exchange: Dtype
    trainable: bool
    tied: bool

    @cached_property
    def size(self) -> int:
        """Elements, padding left out."""
        return self.slots[-1].stop

    @cached_property
    def padded(self) -> int:
        """Number of elements with padding, a multiple of `shards`."""
        # Rounded up, so that all slices are equal: torch gathers into one tensor only slices of
        # equal length.
        return -(-self.size // self.shards) * self.shards

    @property
    def shard(self) -> int:
        """Number of elements of one rank's slice, padding included."""
        return self.padded // self.shards

    @property
    def replicas(self) -> tuple[int, ...]:
        """The pipeline ranks that hold this flat and sum its gradients; empty if only one rank
        holds it.
        """
        return self.slots[0].parameter.replicas

    @property
    def alone(self) -> bool:
        """Whether each data rank holds different parameters in this flat, so that its gradients
        need no reduction.
        """
        return self.slots[0].parameter.same == 1

    @property
    def sharded(self) -> bool:
        """Whether the data ranks own different slices of this flat."""
        return self.shards > 1

    @property
    def master_is_weight(self) -> bool:
        """Whether the master weights are the owned slice of the weight buffer itself, so that no
        second copy is stored.
        """
        return not self.weight_shared and self.master == self.dtype

    @property
    def kept_as(self) -> Literal["weights", "master"]:
        """Kind under which the bytes of an owned slice outside the weight buffer are counted:
        "weights" for frozen weights, else "master".
        """
        return "master" if self.trainable or self.master != self.dtype else "weights"

    def owned(self, index: int) -> range:
        """The slice of data rank `index`, in elements of the padded buffer."""
        # Flats of experts may have fewer shards than there are data ranks; then ranks `shards`
        # apart own the same slice.
        start = self.shard * (index % self.shards)
        return range(start, start + self.shard)

    def pieces(self, index: int) -> Iterator[Piece]:
        """Yield the ranges of parameters that data rank `index` owns. Padding belongs to no
        parameter.
        """
        owned = self.owned(index)
        for slot in self.slots:
            start, stop = max(slot.start, owned.start), min(slot.stop, owned.stop)
            if start < stop:
                yield Piece(
                    slot.parameter, start - slot.start, stop - slot.start, start - owned.start
                )

    @cached_property
    def split(self) -> range:
        """The leading elements of the flat, which hold parameters split over tensor ranks. Replicas
        follow.
        """
        return range(
            sum(slot.parameter.size for slot in self.slots if slot.parameter.split is not None)
        )

    @cached_property
    def partial(self) -> range:
        """The last elements of the flat, which hold parameters whose gradients tensor ranks must
        sum.
        """
        return range(
            self.size - sum(slot.parameter.size for slot in self.slots if slot.parameter.partial),
            self.size,
        )

    def own(self, part: range, index: int) -> range:
        """Return the elements of `part` that data rank `index` owns, counted from the start of its
        slice.
        """
        owned = self.owned(index)
        start, stop = max(part.start, owned.start), min(part.stop, owned.stop)
        # Without overlap, `stop` is before `start`, and the range has to be empty rather than
        # negative.
        return range(start - owned.start, max(start, stop) - owned.start)


@dataclass(frozen=True)
class Counts:
    """Number of data ranks to shard over, and number of stages whose weights or gradients may be whole at once."""

    shards: int
    weights: int | None
    grads: int | None

    @classmethod
    def of(cls, plan: Plan, data: int) -> Counts:
        """Return the counts for `plan` on `data` ranks. Buffer counts that the plan sets override
        the ZeRO level. None means all stages.
        """
        zero = plan.zero
        stage = zero.stage or 0
        # Two whole buffers: one is in use while the other is gathered into or reduced from.
        weights = zero.weight_buffers or (2 if stage == 3 else None)
        grads = zero.grad_buffers or (2 if stage >= 2 else None)
        replicated = stage == 0 and weights is None and grads is None
        return cls(1 if replicated else data, weights, grads)


@dataclass(frozen=True)
class Layout:
    """Every flat buffer of one pipeline rank, by stage. Flats of one stage are adjacent, and flats
    of tied parameters come last.
    """

    stages: int
    flats: tuple[Flat, ...]
    data: int
    format: Format

    @classmethod
    def of(cls, plan: Plan, parameters: Sequence[Parameter], stages: int, data: int) -> Layout:
        """Distribute `parameters` over `stages` local stages and `data` ranks."""
        format_, counts = Format.of(plan), Counts.of(plan, data)
        return cls(stages, tuple(_flats(parameters, stages, format_, counts)), data, format_)

    def of_stage(self, stage: int) -> tuple[Flat, ...]:
        """Return the flats that must be whole while `stage` computes: the flats of this stage, and
        the flats of tied parameters that the stage uses.
        """
        return tuple(self.flats[index] for index in self.users[stage])

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the indices of the flats that must be whole while the stage computes."""
        found: list[list[int]] = [[] for _ in range(self.stages)]
        for index, flat in enumerate(self.flats):
            for stage in sorted({stage for slot in flat.slots for stage in slot.parameter.stages}):
                found[stage].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def first_trained(self) -> int:
        """The first stage with a trainable parameter, or `stages` if no parameter is trainable. No
        earlier stage runs backward.
        """
        used = (
            slot.parameter.stages[0] for flat in self.flats if flat.trainable for slot in flat.slots
        )
        return min(used, default=self.stages)

    @property
    def level(self) -> int:
        """The ZeRO level that corresponds to these buffers."""
        if not any(flat.sharded for flat in self.flats):
            return 0
        if any(flat.weight_shared for flat in self.flats):
            return 3
        return 2 if any(flat.grad_shared for flat in self.flats) else 1

    @property
    def parameters(self) -> int:
        """Number of elements on one rank of a tensor group, without padding."""
        return sum(flat.size for flat in self.flats)

    def homes(self, kind: str) -> dict[Home, int]:
        """Return the number of elements of each whole buffer of `kind` ("weight" or "grad"). Each
        buffer is large enough for its largest stage.
        """
        sizes: dict[Home, int] = defaultdict(int)
        for flat in self.flats:
            if kind == "weight" or flat.trainable:
                home = flat.weight_home if kind == "weight" else flat.grad_home
                sizes[home] = max(sizes[home], flat.padded)
        return dict(sizes)

    def bytes(self) -> dict[str, int]:
        """Bytes on one rank by kind: weights, gradients, master, moments."""
        found = {
            "weights": _buffers(self.homes("weight")),
            "gradients": _buffers(self.homes("grad")),
            "master": 0,
            "moments": 0,
        }
        for flat in self.flats:
            for kind, size in self.slices(flat).items():
                found[kind] += size
        return found

    def slices(self, flat: Flat) -> dict[str, int]:
        """Return the bytes of `flat` that one rank stores in slices outside the whole buffers, by
        kind.
        """
        each = {"weights": 0, "gradients": 0, "master": 0, "moments": 0}
        if not flat.master_is_weight:
            each[flat.kept_as] = BYTES[flat.master]
        if flat.trainable:
            each["moments"] = BYTES[flat.master] * self.format.moments
            # A gradient buffer that other stages use is free again after the reduction; the owned sums stay in a slice.
            each["gradients"] = BYTES[flat.reduce] if flat.grad_shared else 0
        return {kind: flat.shard * size for kind, size in each.items()}


def _buffers(homes: Mapping[Home, int]) -> int:
    return sum(size * BYTES[home.dtype] for home, size in homes.items())


Kind = tuple[bool, bool, Dtype, int]
"""The kind of a parameter: tied or not, frozen or not, its format, and the number of data ranks
with the same values. Parameters of different kinds are in different pools.
"""


def _flats(
    parameters: Sequence[Parameter], stages: int, format_: Format, counts: Counts
) -> Iterator[Flat]:
    groups = list(_groups(parameters, format_))
    numbers, places = Counter(kind for kind, _ in groups), Counter[Kind]()
    for kind, group in groups:
        yield _flat(kind, group, places[kind], numbers[kind], format_, counts)
        places[kind] += 1


def _groups(
    parameters: Sequence[Parameter], format_: Format
) -> Iterator[tuple[Kind, list[Parameter]]]:
    """Group the parameters by kind and stage, in the order of stages, with tied parameters last.

    A parameter that other pipeline ranks hold too gets its own flat, because only the ranks that
    hold the parameter sum its gradients.
    """

    def key(parameter: Parameter) -> tuple[bool, int, bool, Dtype, str, int]:
        tied, alone = (
            len(parameter.stages) > 1 or bool(parameter.replicas),
            parameter.name if parameter.replicas else "",
        )
        return (
            tied,
            parameter.stages[0],
            not parameter.trainable,
            format_.compute or parameter.dtype,
            alone,
            parameter.same,
        )

    for (tied, _, frozen, dtype, _, same), group in groupby(sorted(parameters, key=key), key):
        yield (tied, frozen, dtype, same), list(group)


def _flat(
    kind: Kind, group: list[Parameter], index: int, number: int, format_: Format, counts: Counts
) -> Flat:
    tied, frozen, dtype, same = kind
    # Experts are sharded only over the ranks that hold the same ones.
    shards = same if same and counts.shards > 1 else counts.shards
    master, reduce = format_.master_of(dtype, frozen), format_.reduce_of(dtype)
    # Several stages use a tied parameter, so its buffers stay whole. Unsharded weights without a separate master stay whole too:
    # no other copy could refill a buffer that is used for another stage.
    whole = tied or (shards == 1 and master == dtype)
    weights = number if whole or counts.weights is None else min(counts.weights, number)
    grads = number if tied or shards == 1 or counts.grads is None else min(counts.grads, number)
    return Flat(
        stage=group[0].stages[0],
        slots=tuple(_slots(group)),
        shards=shards,
        weight_home=Home(tied, frozen, dtype, index % weights, same),
        grad_home=Home(tied, frozen, reduce, index % grads, same),
        weight_shared=_shared(index, weights, number),
        grad_shared=_shared(index, grads, number),
        dtype=dtype,
        master=master,
        reduce=reduce,
        exchange=format_.exchange_of(dtype),
        trainable=not frozen,
        tied=tied,
    )


def _slots(group: Iterable[Parameter]) -> Iterator[Slot]:
    """Sort parameters for one flat: split parameters first, partial replicas last, so that each
    kind is contiguous.
    """
    start = 0
    for parameter in sorted(
        group, key=lambda parameter: (parameter.split is None, parameter.partial)
    ):
        yield Slot(parameter, start)
        start += parameter.size


def _shared(index: int, buffers: int, number: int) -> bool:
    """Return whether two of `number` flats share a buffer, if the flats use `buffers` buffers in
    turn.
    """
    # Flat i lies in buffer i modulo `buffers`, so the others of its buffer are `buffers` places
    # before and behind it.
    followed, preceded = index + buffers < number, index >= buffers
    return followed or preceded
