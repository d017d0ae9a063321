"""Shards: the flat buffers of each stage, the slice of each flat that a data rank owns, and the
bytes of both.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Literal, NamedTuple

from bridge.plan.plan import Dtype, Plan

BYTES: Mapping[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Number of bytes of one element, by number format."""

MOMENTS: Mapping[str, int] = {"adam": 2, "adamw": 2, "sgd": 0, "lion": 1}
"""Number of tensors that an optimizer keeps for each parameter, all in the format of the master
weights. SGD with momentum keeps one tensor more.
"""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as one rank holds it.

    `shape` is the shape on one tensor rank, and `stages` are the stages that use the parameter, in
    order. `split` is the dimension that is divided among tensor ranks: `whole` is the full size of
    this dimension, and the part of this rank begins at `start`. If `split` is None, every tensor
    rank holds a replica. With `partial`, each tensor rank computes only a share of the replica's
    gradient, and the shares must be summed. `replicas` are the pipeline ranks that hold the
    parameter, or () if only one does. `same` is the number of data ranks that hold equal values,
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
    """Return the pipeline ranks that hold `parameter`. `homes` has the rank of each stage."""
    return tuple(sorted({homes[stage] for stage in parameter.stages}))


def on_rank(parameters: Iterable[Parameter], homes: Sequence[int], rank: int) -> list[Parameter]:
    """Return those of `parameters` that a pipeline rank holds. In the result, `stages` counts only
    the stages on this rank, from 0. `homes` has the rank of each stage.
    """
    local = [stage for stage, home in enumerate(homes) if home == rank]
    result = []
    for parameter in parameters:
        stages, holders = (
            tuple(local.index(stage) for stage in parameter.stages if stage in local),
            holders_of(parameter, homes),
        )
        if stages:
            result.append(
                replace(parameter, stages=stages, replicas=holders if len(holders) > 1 else ())
            )
    return result


@dataclass(frozen=True, slots=True)
class Slot:
    """The position of a parameter in a flat buffer. `start` is the index of the first element."""

    parameter: Parameter
    start: int

    @property
    def stop(self) -> int:
        """Index of the first element behind the parameter."""
        return self.start + self.parameter.size


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """The part of a parameter that lies in one rank's slice of a flat buffer. `start` and `stop`
    count elements of the flattened parameter, and `offset` counts from the start of the slice.
    """

    parameter: Parameter
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Format:
    """Number formats of a run, and the number of moments that the optimizer keeps for each weight.

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
        """The number formats of `plan`."""
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
        """Return the format in which the optimizer keeps a weight of format `dtype` between steps.
        A frozen weight keeps `dtype`, unless `frozen_in_master` is true.
        """
        return dtype if frozen and not self.frozen_in_master else self.master or _full_format(dtype)

    def reduce_of(self, dtype: Dtype) -> Dtype:
        """Return the format in which gradients of a weight of format `dtype` are accumulated and
        reduced.
        """
        return self.reduce or _full_format(dtype)

    def exchange_of(self, dtype: Dtype) -> Dtype:
        """Return the format in which data ranks exchange the gradients of a weight of format
        `dtype`.
        """
        return self.communicate or self.reduce_of(dtype)


def _full_format(dtype: Dtype) -> Dtype:
    return "fp32" if dtype in ("bf16", "fp16") else dtype


class Home(NamedTuple):
    """Identifies a buffer that flats of the same kind use in turn. `place` is the number of the
    buffer among the buffers of this kind, and the other fields are the kind.
    """

    tied: bool
    frozen: bool
    dtype: Dtype
    place: int
    same: int = 0


@dataclass(frozen=True)
class Flat:
    """One flat: parameters of one stage that have the same format and are all trainable or all
    frozen.

    The flat is cut into `shards` slices, and each data rank owns one of them. If `shards` is 1,
    every rank owns the whole flat. `weight_home` and `grad_home` identify the buffers in which the
    weights and the gradients are whole. `weight_shared` and `grad_shared` are true if other flats
    use the same buffer in turn.
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
        """Number of elements without padding."""
        return self.slots[-1].stop

    @cached_property
    def padded(self) -> int:
        """Number of elements with padding. It is a multiple of `shards`."""
        # Rounded up, so that all slices are equal: torch gathers into one tensor only slices of
        # equal length.
        return -(-self.size // self.shards) * self.shards

    @property
    def shard(self) -> int:
        """Number of elements of one rank's slice, padding included."""
        return self.padded // self.shards

    @property
    def replicas(self) -> tuple[int, ...]:
        """The pipeline ranks that hold this flat and sum its gradients, or () if only one rank
        holds the flat.
        """
        return self.slots[0].parameter.replicas

    @property
    def alone(self) -> bool:
        """Whether each data rank holds other experts in this flat, so that gradients are not
        reduced over data ranks.
        """
        return self.slots[0].parameter.same == 1

    @property
    def sharded(self) -> bool:
        """Whether each data rank owns only a slice of this flat."""
        return self.shards > 1

    @property
    def master_is_weight(self) -> bool:
        """Whether the weight buffer also serves as the master, so that no second copy of the
        weights is stored.
        """
        return not self.weight_shared and self.master == self.dtype

    @property
    def accounting_kind(self) -> Literal["weights", "master"]:
        """The kind under which the bytes of the rank's own slice of weights are counted: "master"
        if the flat is trainable or its master has another format than its weights, and else
        "weights".
        """
        return "master" if self.trainable or self.master != self.dtype else "weights"

    def elements_of(self, index: int) -> range:
        """The elements of the padded flat that data rank `index` owns."""
        # Flats of experts may have fewer shards than there are data ranks; then ranks `shards`
        # apart own the same slice.
        start = self.shard * (index % self.shards)
        return range(start, start + self.shard)

    def pieces(self, index: int) -> Iterator[FlatPiece]:
        """Yield the part of each parameter that data rank `index` owns. Padding belongs to no
        parameter.
        """
        elements = self.elements_of(index)
        for slot in self.slots:
            start, stop = max(slot.start, elements.start), min(slot.stop, elements.stop)
            if start < stop:
                yield FlatPiece(
                    slot.parameter, start - slot.start, stop - slot.start, start - elements.start
                )

    @cached_property
    def split(self) -> range:
        """The elements at the start of the flat that hold parameters split over tensor ranks. All
        elements behind them are replicas.
        """
        return range(
            sum(slot.parameter.size for slot in self.slots if slot.parameter.split is not None)
        )

    @cached_property
    def partial(self) -> range:
        """The elements at the end of the flat that hold replicas whose gradients must be summed
        over tensor ranks.
        """
        return range(
            self.size - sum(slot.parameter.size for slot in self.slots if slot.parameter.partial),
            self.size,
        )

    def own(self, part: range, index: int) -> range:
        """Return the elements of the range `part` that data rank `index` owns. They are counted
        from the start of the slice of this rank.
        """
        elements = self.elements_of(index)
        start, stop = max(part.start, elements.start), min(part.stop, elements.stop)
        # Without overlap, `stop` is before `start`, and the range has to be empty rather than
        # negative.
        return range(start - elements.start, max(start, stop) - elements.start)


@dataclass(frozen=True)
class Counts:
    """The number of data ranks over which a flat is sharded (`shards`), and the numbers of stages
    whose weights or gradients may be whole at the same time (None: all stages).
    """

    shards: int
    weights: int | None
    grads: int | None

    @classmethod
    def of(cls, plan: Plan, data: int) -> Counts:
        """Return the numbers for `plan` on `data` ranks. They follow from the ZeRO level, unless
        the plan sets a number of buffers.
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
    """The flats of one pipeline rank, ordered by stage. Flats of tied parameters come last."""

    stages: int
    flats: tuple[Flat, ...]
    data: int
    format: Format

    @classmethod
    def of(cls, plan: Plan, parameters: Sequence[Parameter], stages: int, data: int) -> Layout:
        """Return the flats that hold `parameters`. `stages` is the number of stages on this
        pipeline rank, and `data` the number of data ranks.
        """
        format_, counts = Format.of(plan), Counts.of(plan, data)
        return cls(stages, tuple(_make_flats(parameters, stages, format_, counts)), data, format_)

    def of_stage(self, stage: int) -> tuple[Flat, ...]:
        """Return the flats that must be whole while `stage` computes: the flats of this stage, and
        the flats of tied parameters that this stage uses.
        """
        return tuple(self.flats[index] for index in self.users[stage])

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the indices of the flats that must be whole while this stage computes."""
        result: list[list[int]] = [[] for _ in range(self.stages)]
        for index, flat in enumerate(self.flats):
            for stage in sorted({stage for slot in flat.slots for stage in slot.parameter.stages}):
                result[stage].append(index)
        return tuple(map(tuple, result))

    @cached_property
    def first_trained(self) -> int:
        """The first stage with a trainable parameter, or `stages` if no parameter is trainable.
        Stages before it do not run backward.
        """
        used = (
            slot.parameter.stages[0] for flat in self.flats if flat.trainable for slot in flat.slots
        )
        return min(used, default=self.stages)

    @property
    def level(self) -> int:
        """The ZeRO level that leads to the flats and buffers of this layout."""
        if not any(flat.sharded for flat in self.flats):
            return 0
        if any(flat.weight_shared for flat in self.flats):
            return 3
        return 2 if any(flat.grad_shared for flat in self.flats) else 1

    @property
    def parameters(self) -> int:
        """Number of elements of all flats, without padding. Each flat counts only one tensor rank's
        part of a parameter.
        """
        return sum(flat.size for flat in self.flats)

    def homes(self, kind: str) -> dict[Home, int]:
        """Return the number of elements of each buffer for weights (`kind` "weight") or gradients
        ("grad"). A buffer is as large as the largest flat that uses it.
        """
        sizes: dict[Home, int] = defaultdict(int)
        for flat in self.flats:
            if kind == "weight" or flat.trainable:
                home = flat.weight_home if kind == "weight" else flat.grad_home
                sizes[home] = max(sizes[home], flat.padded)
        return dict(sizes)

    def bytes(self) -> dict[str, int]:
        """Return the number of bytes on one rank, for each of weights, gradients, master and
        moments.
        """
        sizes = {
            "weights": _count_buffers(self.homes("weight")),
            "gradients": _count_buffers(self.homes("grad")),
            "master": 0,
            "moments": 0,
        }
        for flat in self.flats:
            for kind, size in self.slices(flat).items():
                sizes[kind] += size
        return sizes

    def slices(self, flat: Flat) -> dict[str, int]:
        """Return the number of bytes of a rank's slices of `flat`, for each of weights, gradients,
        master and moments. Whole buffers are not included.
        """
        each = {"weights": 0, "gradients": 0, "master": 0, "moments": 0}
        if not flat.master_is_weight:
            each[flat.accounting_kind] = BYTES[flat.master]
        if flat.trainable:
            each["moments"] = BYTES[flat.master] * self.format.moments
            # A gradient buffer that other stages use is free again after the reduction; the owned sums stay in a slice.
            each["gradients"] = BYTES[flat.reduce] if flat.grad_shared else 0
        return {kind: flat.shard * size for kind, size in each.items()}


def _count_buffers(homes: Mapping[Home, int]) -> int:
    return sum(size * BYTES[home.dtype] for home, size in homes.items())


Kind = tuple[bool, bool, Dtype, int]
"""Properties that flats must share to use the same buffers: tied or not, frozen or not, the number
format, and the number of data ranks that hold equal values.
"""


def _make_flats(
    parameters: Sequence[Parameter], stages: int, format_: Format, counts: Counts
) -> Iterator[Flat]:
    groups = list(_group_parameters(parameters, format_))
    numbers, places = Counter(kind for kind, _ in groups), Counter[Kind]()
    for kind, group in groups:
        yield _make_flat(kind, group, places[kind], numbers[kind], format_, counts)
        places[kind] += 1


def _group_parameters(
    parameters: Sequence[Parameter], format_: Format
) -> Iterator[tuple[Kind, list[Parameter]]]:
    """Yield the parameters that form a flat together, with what they have in common. Flats are
    ordered by stage, and flats of tied parameters come last.

    A parameter that several pipeline ranks hold forms a flat alone, because only these ranks sum
    its gradients.
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


def _make_flat(
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
        slots=tuple(_slots_of_group(group)),
        shards=shards,
        weight_home=Home(tied, frozen, dtype, index % weights, same),
        grad_home=Home(tied, frozen, reduce, index % grads, same),
        weight_shared=_shares_buffer(index, weights, number),
        grad_shared=_shares_buffer(index, grads, number),
        dtype=dtype,
        master=master,
        reduce=reduce,
        exchange=format_.exchange_of(dtype),
        trainable=not frozen,
        tied=tied,
    )


def _slots_of_group(group: Iterable[Parameter]) -> Iterator[Slot]:
    """Yield the position of each parameter in a flat. Parameters that are split over tensor ranks
    come first, and replicas with partial gradients come last.
    """
    start = 0
    for parameter in sorted(
        group, key=lambda parameter: (parameter.split is None, parameter.partial)
    ):
        yield Slot(parameter, start)
        start += parameter.size


def _shares_buffer(index: int, buffers: int, number: int) -> bool:
    """Return whether flat `index` of `number` flats shares its buffer with another flat, if the
    flats use `buffers` buffers in turn.
    """
    # Flat i lies in buffer i modulo `buffers`, so the others of its buffer are `buffers` places
    # before and behind it.
    has_after, has_before = index + buffers < number, index >= buffers
    return has_after or has_before
