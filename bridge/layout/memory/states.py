"""States: bytes of weights, gradients, masters and moments of one rank, by the rules of the stack
that shards them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import lcm
from typing import Literal, NamedTuple

from bridge.layout.memory.terms import Kind, Term, product
from bridge.layout.shard import BYTES, Format, Layout, Parameter
from bridge.plan.plan import Plan
from bridge.stack.memory_rules import MemoryRules


class Rank(NamedTuple):
    """One pipeline rank: its parameters, the number of its stages, and the number of ranks that
    hold the same weights.
    """

    parameters: Sequence[Parameter]
    stages: int
    shards: int


Moment = Literal["forward", "loss", "output", "block", "reduce", "step"]
"""A moment of a step: a forward pass, the loss, the backward pass of the output layer, of a block in
its middle or at its end, where its gradients are whole, or the optimizer's step.
"""


class _Widths(NamedTuple):
    """Bytes of one element of each state. `master` is 0 if the weights are their own master."""

    weight: int
    gradient: int
    master: int
    moments: int
    compute: int
    reduce: int
    frozen: float
    frozen_matrix: float


def state_terms(plan: Plan, rank: Rank, rules: MemoryRules) -> list[Term]:
    """Return the bytes that `rank` keeps between steps, and the buffers that its sharding needs
    during a step.
    """
    terms = list(_SHARDING[rules.sharding](plan, rank, _widths_of(plan, rules)))
    return list(_move_offloaded(plan, [term for term in terms if term.bytes]))


def step_terms(plan: Plan, rank: Rank, rules: MemoryRules) -> list[Term]:
    """Return what `rank` needs beside its states while the optimizer steps.

    DeepSpeed flattens the gradients of its part and copies them to the master's format
    (runtime/zero/stage_1_and_2.py: step; runtime/fp16/fused_optimizer.py: step). Torch's foreach
    optimizers make a copy of the second moment (torch/optim/adam.py: _multi_tensor_adam).
    """
    widths = _widths_of(plan, rules)
    if plan.zero.offload.optimizer not in (None, "none"):
        return []
    trained = sum(one.size for one in rank.parameters if one.trainable)
    own = -(-trained // (rank.shards if plan.zero.effective_stage else 1))
    terms = []
    if rules.sharding == "deepspeed" and widths.gradient < widths.master:
        what = "gradients, flattened and in the master's format"
        each = (widths.gradient + widths.master, "bytes")
        terms.append(product("gradients", what, (own, "elements"), each))
    if rules.foreach:
        width = (widths.moments / max(Format.of(plan).moments, 1), "bytes")
        terms.append(product("moments", "copy of a moment", (own, "elements"), width))
    return terms


def _widths_of(plan: Plan, rules: MemoryRules) -> _Widths:
    format_ = Format.of(plan)
    compute = format_.compute or "fp32"
    master = plan.precision.master or rules.loaded or format_.master_of(compute)
    reduce = format_.reduce_of(compute)
    moments = sum(BYTES[dtype] for dtype in plan.precision.moments or ())
    if not moments or format_.moments != 2:
        moments = format_.moments * BYTES[master]
    frozen = BYTES[rules.loaded or format_.master_of(compute, frozen=True)]
    stored = BYTES[master] if rules.sharding in ("fsdp", "ddp") else BYTES[compute]
    # FSDP and DDP keep the weights that are trained in the master's format; what computes is a copy
    # of a unit, or autocast's.
    # ZeRO of DeepSpeed has a copy of its part even where weights are in fp32 (stage_1_and_2.py:
    # single_partition_of_fp32_groups; stage3.py: fp32_partitioned_groups_flat).
    zero = rules.sharding == "deepspeed" and (plan.zero.effective_stage or 0) > 0
    apart = zero or stored != BYTES[master]
    return _Widths(
        stored,
        stored if rules.sharding in ("fsdp", "ddp") else BYTES[reduce],
        BYTES[master] if apart else 0,
        moments,
        BYTES[compute],
        BYTES[reduce],
        frozen,
        rules.quantised or frozen,
    )


def _weight_terms(
    group: Sequence[Parameter], widths: _Widths, what: str, size: Callable[[Parameter], float]
) -> Iterator[Term]:
    """Yield the bytes of weights: those that are trained, and frozen ones, whose matrices in blocks
    may be quantised. `size` gives the number of elements of a parameter on this rank.
    """
    kinds: dict[tuple[str, float], float] = {}
    for one in group:
        quantised = not one.trainable and len(one.shape) > 1 and one.name.startswith("block")
        if one.trainable:
            kind = what, float(widths.weight)
        elif quantised and widths.frozen_matrix != widths.frozen:
            kind = f"frozen {what}, quantised", widths.frozen_matrix
        else:
            kind = f"frozen {what}", widths.frozen
        kinds[kind] = kinds.get(kind, 0) + size(one)
    for (name, width), number in kinds.items():
        yield product("weights", name, (number, "elements"), (width, "bytes"))


def _move_offloaded(plan: Plan, terms: Sequence[Term]) -> Iterator[Term]:
    offload = plan.zero.offload
    moved: dict[Kind, float] = {}
    if offload.optimizer not in (None, "none"):
        share = 1.0 if offload.optimizer_ratio is None else offload.optimizer_ratio
        moved |= {"master": share, "moments": share}
    if offload.parameters not in (None, "none"):
        moved["weights"] = 1.0
    for term in terms:
        share = moved.get(term.kind, 0.0)
        away = round(term.bytes * share)
        if away:
            yield Term(
                "host", f"{term.what} ({term.kind})", away, f"{share:.10g} of: {term.formula}"
            )
        if term.bytes - away:
            note = f", less {share:.10g} of it on the host" if away else ""
            yield Term(term.kind, term.what, term.bytes - away, term.formula + note)


def _native_terms(plan: Plan, rank: Rank, widths: _Widths) -> Iterator[Term]:
    layout = Layout.of(plan, rank.parameters, rank.stages, rank.shards)
    for kind, size in layout.bytes().items():
        how = f"{layout.parameters:,} elements in flats of ZeRO {layout.level}, padding included"
        yield Term(kind, "all parameters", size, how)  # type: ignore[arg-type]


def _groups(rank: Rank) -> Iterator[tuple[str, list[Parameter], int]]:
    """Yield the parameters of experts and all others, with the number of ranks that hold the same
    ones.
    """
    experts = [one for one in rank.parameters if one.same]
    others = [one for one in rank.parameters if not one.same]
    if others:
        yield "parameters", others, rank.shards
    if experts:
        yield "experts", experts, experts[0].same


def _megatron_terms(plan: Plan, rank: Rank, widths: _Widths) -> Iterator[Term]:
    """Yield the states of Megatron's DDP. With the distributed optimizer, master and moments are
    divided over the ranks of a group, and a parameter starts at a multiple of 64 elements
    (core/distributed/param_and_grad_buffer.py).
    """
    level = plan.zero.effective_stage or 0
    if level >= 2:
        yield from _fsdp_terms(plan, rank, widths)
        return
    for what, group, ranks in _groups(rank):
        trained = [one for one in group if one.trainable]
        buffer = sum(one.size for one in trained)
        if level:
            unit = lcm(ranks, 128)
            padded = sum(-(-one.size // 64) * 64 for one in trained)
            buffer = -(-padded // unit) * unit
        shards = max(1, ranks // (plan.zero.replicas or 1)) if level else 1
        yield from _weight_terms(group, widths, what, lambda one: one.size)
        yield product("gradients", what, (buffer, "elements"), (widths.gradient, "bytes"))
        each = ((buffer, "elements"), (1 / shards, f"(1/{shards} of a rank)"))
        yield product("master", what, *each, (widths.master, "bytes"))
        yield product("moments", what, *each, (widths.moments, "bytes"))


def _ddp_terms(plan: Plan, rank: Rank, widths: _Widths) -> Iterator[Term]:
    """Yield the states of torch's DDP: gradients lie in buckets and, unless they are views of the
    buckets, once more beside them (torch/csrc/distributed/c10d/reducer.cpp).
    """
    trained = sum(one.size for one in rank.parameters if one.trainable)
    yield from _weight_terms(rank.parameters, widths, "parameters", lambda one: one.size)
    yield product("gradients", "parameters", (trained, "elements"), (widths.gradient, "bytes"))
    yield product("moments", "parameters", (trained, "elements"), (widths.moments, "bytes"))
    autocast = plan.precision.autocast
    if autocast and BYTES[autocast] < widths.weight:
        # A forward pass keeps what autocast makes of weights until its backward pass.
        each = ((trained, "elements"), (BYTES[autocast], "bytes"))
        yield product("buffers", "weights in the format of autocast", *each)
    if rank.shards > 1:
        each = ((trained, "elements"), (widths.gradient, "bytes"))
        yield product("buffers", "DDP's buckets of gradients", *each)


def _shard_size(parameter: Parameter, ranks: int) -> int:
    """Number of elements of the first rank's shard: torch cuts along the first dimension, and all
    shards are as large as the largest (torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
    """
    if not parameter.shape:
        return 1
    rows, *rest = parameter.shape
    size = -(-rows // ranks)
    for length in rest:
        size *= length
    return size


def _fsdp_terms(plan: Plan, rank: Rank, widths: _Widths) -> Iterator[Term]:
    """Yield the states of FSDP2: every parameter is cut along its first dimension. Two units, the
    blocks, may be whole at once: the one in use and the next.
    """
    replicas = plan.zero.replicas or 1
    level = plan.zero.effective_stage
    for what, group, ranks in _groups(rank):
        shards = max(1, ranks // replicas) if level != 0 else 1
        trained = sum(_shard_size(one, shards) for one in group if one.trainable)
        each = "elements of this rank's shards"
        yield from _weight_terms(group, widths, what, partial(_shard_size, ranks=shards))
        yield product("gradients", what, (trained, each), (widths.weight, "bytes"))
        yield product("moments", what, (trained, each), (widths.moments, "bytes"))
        if widths.master:
            yield product("master", what, (trained, each), (widths.master, "bytes"))


def buffer_terms(plan: Plan, rank: Rank, rules: MemoryRules, moment: Moment) -> list[Term]:
    """Return the weights that sharding has whole at a moment of a step, and the gradients that it
    has not reduced yet.
    """
    sharded = rules.sharding == "fsdp" or (
        rules.sharding == "megatron" and (plan.zero.effective_stage or 0) >= 2
    )
    single = rank.shards == 1 and rules.units == "blocks"
    if not sharded or single or moment == "step":
        return []
    widths, level = _widths_of(plan, rules), plan.zero.effective_stage
    sizes = _unit_sizes(rank, trained=False)
    gradients = _unit_sizes(rank, trained=True)
    root = sizes.pop("root", 0)
    gradients.pop("root", None)
    head = [one for one in rank.parameters if one.trainable and one.name.startswith("head")]
    block = max(sizes.values(), default=0)
    if rules.units == "layers":
        output = sum(one.size for one in rank.parameters if one.name.startswith("head"))
        # The last unit stays whole until its backward pass; a backward pass gathers the next unit
        # ahead (torch/distributed/fsdp: _root_pre_forward; BackwardPrefetch.BACKWARD_PRE).
        ahead = block if len(sizes) > 1 else root - output
        whole = {"forward": 0, "loss": output, "output": output}.get(moment, block + ahead)
    else:
        # The root, which holds what no block does, is whole from the first forward to the last
        # backward pass, and so are its gradients from the output layer's backward pass on.
        ahead = {"forward": 2, "loss": 0, "output": 1, "block": 2, "reduce": 2}[moment]
        blocks = sorted(sizes.values())[-ahead:] if level == 3 else sizes.values()
        whole = root + (sum(blocks) if ahead or level != 3 else 0)
    parts = [("gathered weights", whole, widths.compute)]
    if moment in ("block", "reduce") and rules.units == "blocks":
        # The head's gradient comes first; the embedding's is the last of a step.
        parts.append(
            ("gradients of the head, whole", sum(one.size for one in head), widths.compute)
        )
    if moment == "reduce":
        of = max(gradients.values(), default=0)
        parts.append(("gradients of a block, whole", of, widths.compute))
        parts.append(("gradients of a block, being reduced", of, widths.reduce))
    return [
        product("buffers", what, (number, "elements"), (width, "bytes"))
        for what, number, width in parts
        if number
    ]


def _unit_sizes(rank: Rank, trained: bool) -> dict[str, int]:
    units: dict[str, int] = {}
    for one in rank.parameters:
        if one.trainable or not trained:
            layer = one.name.partition(".")[0]
            unit = layer if layer.startswith("block") else "root"
            units[unit] = units.get(unit, 0) + one.size
    return units


def _deepspeed_terms(plan: Plan, rank: Rank, widths: _Widths) -> Iterator[Term]:
    """Yield the states of DeepSpeed: flat groups, padded to a multiple of the ranks
    (runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py).
    """
    level = plan.zero.effective_stage or 0
    trained = sum(one.size for one in rank.parameters if one.trainable)
    ranks = max(1, rank.shards // (plan.zero.replicas or 1)) if level else 1
    own = -(-trained // ranks)
    per = "elements of this rank's part"
    # At level 3 the parts of a parameter are rounded up, each for itself (partition_parameters.py).
    parts = ranks if level == 3 else 1
    yield from _weight_terms(
        rank.parameters, widths, "parameters", lambda one: -(-one.size // parts)
    )
    number = own if level >= 2 else trained
    yield product("gradients", "parameters", (number, per), (widths.gradient, "bytes"))
    if widths.gradient > widths.compute and level < 2:
        # The sums are in fp32, and what backward wrote stays until the step.
        what = "gradients as backward wrote them"
        yield product("gradients", what, (trained, "elements"), (widths.compute, "bytes"))
    yield product("master", "parameters", (own, per), (widths.master, "bytes"))
    yield product("moments", "parameters", (own, per), (widths.moments, "bytes"))
    if level:
        yield from _bucket_terms(plan, rank, widths, level, trained)


LIVE = 10**9
"""Number of elements that ZeRO 3 may keep whole at once (stage3_max_live_parameters)."""


def _bucket_terms(
    plan: Plan, rank: Rank, widths: _Widths, level: int, trained: int
) -> Iterator[Term]:
    buckets = 2 if plan.zero.overlap else 1
    bucket = min(plan.zero.bucket or 5 * 10**8, trained)
    yield product(
        "buffers",
        "buckets of gradients",
        (bucket, "elements"),
        (buckets, "buckets"),
        (widths.gradient, "bytes"),
    )
    if level == 3:
        whole = min(LIVE, sum(one.size for one in rank.parameters))
        yield product("buffers", "gathered weights", (whole, "elements"), (widths.compute, "bytes"))


_SHARDING = {
    "native": _native_terms,
    "megatron": _megatron_terms,
    "deepspeed": _deepspeed_terms,
    "fsdp": _fsdp_terms,
    "ddp": _ddp_terms,
}
