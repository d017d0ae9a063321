"""Communication: the only caller of torch.distributed; every collective is named, counted and, if asked,
recorded.
"""

from __future__ import annotations

import atexit
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bridge.errors import BridgeError
from bridge.layout.mesh import Mesh
from bridge.layout.traffic import Traffic

Wait = Callable[[], None]
Said = TypeVar("Said")


def _done() -> None:
    """What a collective that has nothing to wait for returns."""


@dataclass(frozen=True)
class Group:
    """Some ranks of the world, and this rank's place among them; with one rank every collective is a no-op.

    Groups of the same ranks with another `purpose` do not wait for each other.
    """

    ranks: tuple[int, ...]
    index: int
    purpose: str = ""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def handle(self) -> dist.ProcessGroup | None:
        """Torch's own group; None where there is one rank, or once this process has left."""
        return _HANDLES.get((self.ranks, self.purpose))


PATIENCE = timedelta(seconds=5)
"""What a process gives a collective that is under way when it ends."""

_UNDER_WAY: set[dist.Work] = set()
"""Collectives that nobody has waited for yet."""

_HANDLES: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
"""Torch's groups by ranks and purpose, held here alone so that leaving ends them before the interpreter does."""


@dataclass
class Ledger:
    """Collectives by name, with number and bytes of whole tensors; `events` holds what happened, in order,
    once asked for.
    """

    totals: dict[str, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    events: list[str] | None = None

    def count(self, name: str, tensor: Tensor) -> None:
        """Add one call that moves `tensor`."""
        self.totals[name] += Traffic(1, tensor.numel() * tensor.element_size())

    def note(self, event: str) -> None:
        """Record `event` if anyone is listening."""
        if self.events is not None:
            self.events.append(event)

    def clear(self) -> None:
        """Forget the totals."""
        self.totals.clear()

    @contextmanager
    def recording(self) -> Iterator[list[str]]:
        """Collect events while inside."""
        events: list[str] = []
        self.events = events
        try:
            yield events
        finally:
            self.events = None


class Comm:
    """The groups of one rank and the collectives over them. Collectives return a function that waits for the
    result.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank, self.ledger = mesh, rank, Ledger()
        self._groups: dict[tuple[str, ...], Group] = {}
        for axes in (*((axis,) for axis in mesh.sizes), tuple(mesh.sizes)):
            self._groups[axes] = self._make(mesh.groups(*axes))

    def _make(self, groups: Sequence[tuple[int, ...]], purpose: str = "") -> Group:
        mine = next((ranks for ranks in groups if self.rank in ranks), (self.rank,))
        for ranks in groups:
            _open(ranks, self.mesh.world, purpose)
        return Group(mine, mine.index(self.rank), purpose)

    def part(self, axis: str, indices: Sequence[int], *others: str) -> Group:
        """Those of this rank's group along `axis` and `others` whose place along `axis` is among `indices` (this rank alone,
        if its own is not). All ranks must take part.
        """
        groups, place = self.mesh.groups(axis, *others), self.mesh.coordinate
        return self._make([tuple(rank for rank in ranks if place(rank, axis) in indices) for ranks in groups])

    def again(self, axis: str, purpose: str) -> Group:
        """Another group along `axis`, whose messages do not wait for those of the first. All ranks must take part."""
        return self._make(self.mesh.groups(axis), purpose)

    def group(self, axis: str) -> Group:
        """This rank's group along `axis`."""
        return self._groups[(axis,)]

    def along(self, axes: tuple[str, ...]) -> Group:
        """Ranks that differ from this one along `axes` only. The first time, all ranks of the world must take part."""
        if axes not in self._groups:
            self._groups[axes] = self._make(self.mesh.groups(*axes))
        return self._groups[axes]

    @property
    def world(self) -> Group:
        """All ranks."""
        return self._groups[tuple(self.mesh.sizes)]

    def all_gather(self, name: str, whole: Tensor, shard: Tensor, group: Group) -> Wait:
        """Fill `whole` with the shards of all ranks, in order; `shard` may be this rank's slice of it."""
        return self._start(name, whole, group, lambda: _all_gather(whole, shard, group=group.handle, async_op=True))

    def reduce_scatter(self, name: str, shard: Tensor, whole: Tensor, group: Group) -> Wait:
        """Sum `whole` over ranks, this rank's slice into `shard`, which may be that slice of `whole`.

        Over gloo, ranks swap slices and each adds up what it got: the same bytes move, in a fraction of the time that gloo's
        own call takes, and as much memory as `whole` has is needed until the wait is over.
        """
        if group.size == 1 or dist.get_backend(group.handle) != "gloo":
            return self._start(name, whole, group, lambda: _reduce_scatter(shard, whole, group=group.handle, async_op=True))
        parts = torch.empty_like(whole)
        wait = self._start(name, whole, group, lambda: dist.all_to_all_single(parts, whole, group=group.handle, async_op=True))
        return partial(_add_up, wait, parts, shard)

    def all_reduce(self, name: str, tensor: Tensor, group: Group, op: str = "sum") -> Wait:
        """Sum (or "max", "min") of `tensor` over ranks, in place."""
        return self._start(name, tensor, group, lambda: dist.all_reduce(tensor, _OPS[op], group=group.handle, async_op=True))

    def broadcast(self, name: str, tensor: Tensor, group: Group, source: int = 0) -> Wait:
        """Copy `tensor` from the rank at place `source` of the group to the others."""
        return self._start(
            name,
            tensor,
            group,
            lambda: dist.broadcast(tensor, group.ranks[source], group=group.handle, async_op=True),
        )

    def send(self, name: str, tensor: Tensor, group: Group, to: int, tag: int) -> Wait:
        """Send `tensor` to the rank at place `to` of the group; it must not change before the wait ends."""
        peer = group.ranks[to]
        return self._start(name, tensor, group, lambda: dist.isend(tensor, peer, group.handle, tag), (peer,))

    def receive(self, name: str, tensor: Tensor, group: Group, source: int, tag: int) -> Wait:
        """Fill `tensor` with what the rank at place `source` of the group sends under the same `tag`; the sender counts it."""
        peer = group.ranks[source]
        return self._begun(name, group, lambda: dist.irecv(tensor, peer, group.handle, tag), (peer,))

    def _start(
        self, name: str, tensor: Tensor, group: Group, start: Callable[[], dist.Work | None], peers: Sequence[int] = ()
    ) -> Wait:
        if group.size == 1:
            return _done
        self.ledger.count(name, tensor)
        return self._begun(name, group, start, peers)

    def _begun(self, name: str, group: Group, start: Callable[[], dist.Work | None], peers: Sequence[int]) -> Wait:
        """Start what is done with `peers` (none named: the whole group); the function that waits for its end."""
        if group.handle is None:
            raise BridgeError(f"{name}: this process has left its group; keep the engine open until the last collective")
        others = peers or [rank for rank in group.ranks if rank != self.rank]
        with _telling(name, others):
            work = start()
        assert work is not None, "an asynchronous collective always returns its handle"
        return _waiting(work, name, others)


def connect(rank: int, world: int, address: str, backend: str, timeout: float = 600.0) -> None:
    """Join the process group at `address` (host:port) unless this process has; `timeout` in seconds.

    The process leaves it when it ends; see `leave` for ending in good order.
    """
    if world == 1:
        return
    atexit.unregister(_abandon)
    atexit.register(_abandon)
    if not dist.is_initialized():
        # Its functions have the group of all ranks as a default from when they are defined, and any optimizer imports it. Defined
        # later, they would hold the group beyond its end, and its threads would meet an interpreter that is gone.
        import_module("torch.distributed.nn.functional")
        dist.init_process_group(
            backend,
            init_method=f"tcp://{address}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )


def leave() -> None:
    """Wait for all ranks and leave the process group, so that none ends while another still talks to it."""
    if joined() is not None:
        dist.barrier()
        _abandon()


def _abandon() -> None:
    """Leave without waiting for others longer than what is under way needs: at the end of a process, whatever its reason."""
    for work in tuple(_UNDER_WAY):
        with suppress(RuntimeError):
            work.wait(PATIENCE)
    _UNDER_WAY.clear()
    _HANDLES.clear()
    if joined() is not None:
        dist.destroy_process_group()


def joined() -> tuple[int, int] | None:
    """Rank and world size of the process group that this process is in, if any."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else None


def everyones(value: Said) -> list[Said]:
    """What each rank of the process group says, in order of ranks; plain objects, for tests and reports."""
    found: list[Any] = [None] * dist.get_world_size() if joined() else [value]
    if joined():
        dist.all_gather_object(found, value)
    return found


def _open(ranks: tuple[int, ...], world: int, purpose: str = "") -> None:
    """Make torch's group of `ranks` unless there is one; all ranks of the world must take part."""
    if len(ranks) == 1 or (ranks, purpose) in _HANDLES:
        return
    handle = dist.group.WORLD if len(ranks) == world and not purpose else dist.new_group(list(ranks))
    assert handle is not None, "the process group exists before its parts do"
    _HANDLES[ranks, purpose] = handle


def _add_up(wait: Wait, parts: Tensor, total: Tensor) -> None:
    """Once `parts` are there, their sum."""
    wait()
    torch.sum(parts.view(-1, *total.shape), 0, out=total)


def _waiting(work: dist.Work, name: str, peers: Sequence[int]) -> Wait:
    _UNDER_WAY.add(work)

    def wait() -> None:
        with _telling(name, peers):
            work.wait()
        _UNDER_WAY.discard(work)

    return wait


class LostRank(BridgeError, RuntimeError):
    """Another rank does not answer any more."""


LOST = re.compile(r"onnection|peer|timed? ?out|broken pipe", re.IGNORECASE)
"""What torch's errors say when another rank does not answer any more."""


@contextmanager
def _telling(name: str, peers: Sequence[int]) -> Iterator[None]:
    """Say which ranks are at the other end of `name`, if they do not answer any more."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        if not LOST.search(reason):
            raise
        who = f"rank {peers[0]}" if len(peers) == 1 else f"one of ranks {', '.join(map(str, peers))}"
        raise LostRank(f"{name}: {who} is gone or silent ({reason}); see its messages, then resume") from None


_OPS: Mapping[str, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
