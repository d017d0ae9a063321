"""Communication: the only caller of torch.distributed. Every collective is named and counted, and
recorded if asked.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from itertools import count
from math import inf, nan
from threading import Event, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bridge.errors import BridgeError, ConfigError
from bridge.layout.mesh import Mesh
from bridge.layout.traffic import Traffic

Wait = Callable[[], None]
Said = TypeVar("Said")


def _wait_for_nothing() -> None:
    """Return at once: the wait function of a collective that moves nothing."""


@dataclass(frozen=True)
class Group:
    """Some ranks of the world, and this rank's index among them. With one rank, every collective is
    a no-op.

    Groups of the same ranks but different `purpose` do not wait for each other.
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
        """Torch's own group. None for a single rank, or after this process has left the group."""
        return _HANDLES.get((self.ranks, self.purpose))


PATIENCE = timedelta(seconds=5)
"""Time for which an exiting process waits for each unfinished collective."""


SILENT, GIVEN_UP = "STAGEBRIDGE_SILENCE", "STAGEBRIDGE_TIMEOUT"
"""Names of the environment variables that set `SILENCE` and `TIMEOUT`, for any program that uses
the engine.
"""


def _seconds(variable: str, usual: float, least: float) -> float:
    """Return the value of an environment variable, or `usual` if the variable is not set. Raises
    `ConfigError` unless the value is a number of seconds, at least `least`.
    """
    text = os.environ.get(variable)
    try:
        seconds = usual if text is None else float(text)
    except ValueError:
        seconds = nan  # which no comparison holds for
    if not least <= seconds < inf:
        raise ConfigError(
            f"{variable}: found {text!r}, expected a number of seconds, at least {least:g}"
        )
    return seconds


SILENCE = _seconds(SILENT, 60, 0)
"""Seconds after which a rank that waits prints which rank it waits for; 0: never."""
TIMEOUT = _seconds(GIVEN_UP, 600, 1)
"""Seconds after which waiting for another rank is an error."""


def patient(silence: float | None, timeout: float | None) -> None:
    """Set the limits in seconds for groups that are joined from now on. None: the environment's
    limit, or the default.
    """
    global SILENCE, TIMEOUT
    SILENCE = _seconds(SILENT, 60, 0) if silence is None else silence
    TIMEOUT = _seconds(GIVEN_UP, 600, 1) if timeout is None else timeout


_UNDER_WAY: set[dist.Work] = set()
"""Collectives that were started and that no caller has waited for yet."""

_ON_DEVICE: deque[Awaited] = deque()
"""Collectives that the device still waits for after the host's wait has returned, the oldest first."""

_HANDLES: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
"""Torch's process groups by ranks and purpose. There are no other references to these groups, so
that `_abandon` destroys them by clearing this dictionary.
"""


@dataclass(frozen=True, eq=False)
class Awaited:
    """A collective that the device waits for: torch's handle, the name, the other ranks, and the
    time of the host's wait.
    """

    work: dist.Work
    name: str
    peers: Sequence[int]
    since: float


@dataclass
class Ledger:
    """For each collective, by name: the number of calls, and the bytes of the tensors that the
    calls moved. A tensor that is sharded counts with its full size. `events` lists the recorded
    events in order, and is None while no events are recorded.
    """

    totals: dict[str, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    events: list[str] | None = None

    def count(self, name: str, tensor: Tensor) -> None:
        """Count one call of the collective `name`, which moves `tensor`."""
        self.totals[name] += Traffic(1, tensor.numel() * tensor.element_size())

    def note(self, event: str) -> None:
        """Add `event` to the recorded events, if events are being recorded."""
        if self.events is not None:
            self.events.append(event)

    def clear(self) -> None:
        """Forget the totals."""
        self.totals.clear()


class Comm:
    """The groups of one rank, and the collectives over these groups. Each collective returns a
    function that waits for the result.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank, self.ledger = mesh, rank, Ledger()
        self._groups: dict[tuple[str, ...], Group] = {}
        # One group along each axis, and one of all ranks.
        for axes in (*((axis,) for axis in mesh.sizes), tuple(mesh.sizes)):
            self._groups[axes] = self._make(mesh.groups(*axes))

    def _make(self, groups: Sequence[tuple[int, ...]], purpose: str = "") -> Group:
        """Make the torch groups of all `groups`. Return the group that contains this rank, or a
        group of this rank alone.
        """
        mine = next((ranks for ranks in groups if self.rank in ranks), (self.rank,))
        # Groups without this rank are made too: torch's new_group has to be called by all ranks, in
        # the same order.
        for ranks in groups:
            _open(ranks, self.mesh.world, purpose)
        return Group(mine, mine.index(self.rank), purpose)

    def part(self, axis: str, indices: Sequence[int], *others: str) -> Group:
        """Return a part of this rank's group along `axis` and `others`: the ranks whose index along
        `axis` is in `indices`. If the index of this rank is not in `indices`, return a group of
        this rank alone. All ranks must call this.
        """
        groups, place = self.mesh.groups(axis, *others), self.mesh.coordinate
        return self._make(
            [tuple(rank for rank in ranks if place(rank, axis) in indices) for ranks in groups]
        )

    def again(self, axis: str, purpose: str) -> Group:
        """Return a second group of this rank's ranks along `axis`. Messages of this group do not
        wait for messages of the first group. All ranks must call this.
        """
        return self._make(self.mesh.groups(axis), purpose)

    def group(self, axis: str) -> Group:
        """Return the group of this rank along `axis`."""
        return self._groups[(axis,)]

    def along(self, axes: tuple[str, ...]) -> Group:
        """Return the group of ranks that differ from this rank only along `axes`. At the first
        call, all ranks of the world must take part.
        """
        if axes not in self._groups:
            self._groups[axes] = self._make(self.mesh.groups(*axes))
        return self._groups[axes]

    @property
    def world(self) -> Group:
        """All ranks."""
        return self._groups[tuple(self.mesh.sizes)]

    def all_gather(self, name: str, whole: Tensor, shard: Tensor, group: Group) -> Wait:
        """Fill `whole` with the shards of all ranks, in order. `shard` may be this rank's slice of
        `whole`.
        """
        return self._start(
            name, whole, group, lambda: _all_gather(whole, shard, group=group.handle, async_op=True)
        )

    def reduce_scatter(self, name: str, shard: Tensor, whole: Tensor, group: Group) -> Wait:
        """Sum `whole` over ranks and put this rank's slice of the sum into `shard`, which may be
        that slice of `whole`.

        Over gloo, ranks exchange slices, and each rank sums the slices that it received. This moves
        as many bytes as gloo's own call and takes a fraction of the time. Until the wait ends, a
        second buffer of the size of `whole` is needed.
        """
        if group.size == 1 or dist.get_backend(group.handle) != "gloo":
            return self._start(
                name,
                whole,
                group,
                lambda: _reduce_scatter(shard, whole, group=group.handle, async_op=True),
            )
        parts = torch.empty_like(whole)
        wait = self._start(
            name,
            whole,
            group,
            lambda: dist.all_to_all_single(parts, whole, group=group.handle, async_op=True),
        )
        return partial(_add_up, wait, parts, shard)

    def all_reduce(self, name: str, tensor: Tensor, group: Group, op: str = "sum") -> Wait:
        """Replace `tensor` by its sum over the ranks, or by its maximum or minimum if `op` is "max"
        or "min".
        """
        return self._start(
            name,
            tensor,
            group,
            lambda: dist.all_reduce(tensor, _OPS[op], group=group.handle, async_op=True),
        )

    def broadcast(self, name: str, tensor: Tensor, group: Group, source: int = 0) -> Wait:
        """Copy `tensor` from the rank with index `source` in the group to the others."""
        return self._start(
            name,
            tensor,
            group,
            lambda: dist.broadcast(tensor, group.ranks[source], group=group.handle, async_op=True),
        )

    def send(self, name: str, tensor: Tensor, group: Group, to: int, tag: int) -> Wait:
        """Send `tensor` to the rank with index `to` in the group. The tensor must not change before
        the wait ends.
        """
        peer, payload = group.ranks[to], tensor
        if _through_host(tensor, group):
            payload = tensor.cpu()
        return self._start(
            name, tensor, group, lambda: dist.isend(payload, peer, group.handle, tag), (peer,)
        )

    def receive(self, name: str, tensor: Tensor, group: Group, source: int, tag: int) -> Wait:
        """Fill `tensor` with the message that the rank with index `source` in the group sends with
        the same `tag`.
        """
        # Not counted: the sender counts the message.
        peer, buffer = group.ranks[source], tensor
        if _through_host(tensor, group):
            buffer = torch.empty_like(tensor, device="cpu", requires_grad=False)
        wait = self._begin_operation(
            name, group, lambda: dist.irecv(buffer, peer, group.handle, tag), (peer,)
        )
        return wait if buffer is tensor else partial(_copy_arrival, wait, buffer, tensor)

    def meet(self, group: Group, source: int, to: int, device: torch.device) -> None:
        """Open the connection for messages from the rank with index `source` in the group to the
        rank with index `to`. Both ranks call this, because NCCL opens a connection at the first
        message, and then the two ranks wait for each other.
        """
        token = torch.zeros(1, device=device)
        if _through_host(token, group):
            token = token.cpu()
        peer = group.ranks[to if group.index == source else source]
        send = partial(
            dist.isend if group.index == source else dist.irecv, token, peer, group.handle
        )
        self._begin_operation("open a link", group, send, (peer,))()

    def _start(
        self,
        name: str,
        tensor: Tensor,
        group: Group,
        start: Callable[[], dist.Work | None],
        peers: Sequence[int] = (),
    ) -> Wait:
        if group.size == 1:
            return _wait_for_nothing
        self.ledger.count(name, tensor)
        return self._begin_operation(name, group, start, peers)

    def _begin_operation(
        self, name: str, group: Group, start: Callable[[], dist.Work | None], peers: Sequence[int]
    ) -> Wait:
        """Start an operation with `peers` (if empty: with the whole group). Returns the function
        that waits for its end.
        """
        if group.handle is None:
            raise BridgeError(
                f"{name}: this process has left the process group; keep the engine open until the last collective"
            )
        others = peers or [rank for rank in group.ranks if rank != self.rank]
        with _telling(name, others):
            work = start()
        assert work is not None, "torch returned no handle for an asynchronous collective"
        return _waiting(work, name, others)


def connect(
    rank: int,
    world: int,
    address: str,
    backend: str,
    timeout: float | None = None,
    alone: bool = False,
) -> None:
    """Join the process group at `address` (host:port), unless this process has joined a process
    group already. A single rank joins none; with `alone` it makes one of itself, for libraries that
    ask torch for rank and world size.

    `timeout` is in seconds (default: `TIMEOUT`). A process that ends leaves the group and does not
    wait for the other ranks. To wait for them, call `leave` before the end.
    """
    if world == 1 and not alone:
        return
    # Functions at exit run last in, first out. Registered anew, this one comes before those of
    # modules imported meanwhile.
    atexit.unregister(_abandon)
    atexit.register(_abandon)
    if not dist.is_initialized():
        # The functions of this module take the group of all ranks as a default when they are
        # defined. Any optimizer imports it. Defined later, they would hold the group beyond its
        # end, and its threads would meet an interpreter that is gone.
        import_module("torch.distributed.nn.functional")
        place: Any = (
            {"init_method": f"tcp://{address}"}
            if world > 1
            else {"store": torch._C._distributed_c10d.HashStore()}
        )
        dist.init_process_group(
            backend, **place, rank=rank, world_size=world, timeout=_timeout(backend, timeout)
        )
        if SILENCE > 0 and world > 1:
            _watch(rank)


def _timeout(backend: str, seconds: float | None = None) -> timedelta:
    """Return torch's own limit for a collective. NCCL ends the whole process at its limit, which is
    therefore later than ours (`arrive`).
    """
    return timedelta(seconds=(seconds or TIMEOUT) * (1.5 if "nccl" in backend else 1.0))


def leave() -> None:
    """Wait for all ranks, then leave the process group, so that no rank ends while another still
    communicates with it.
    """
    if rank_and_world() is not None:
        with announce_operation("leave"):
            # NCCL would guess the device from the rank's number.
            nccl = dist.get_backend() == "nccl"
            dist.barrier(device_ids=[torch.cuda.current_device()] if nccl else None)
        _abandon()


def arrive() -> None:
    """Wait on the host until every collective that this rank has waited for is done. Call this
    before the host reads a result.

    A wait for NCCL returns at once and makes only the device wait. The host would then hang where
    it reads, and could not name the ranks that it waits for. Raises `LostRank` after `TIMEOUT`
    seconds.
    """
    while _ON_DEVICE:
        receipt = _ON_DEVICE[0]
        began = time.monotonic()
        with _telling(receipt.name, receipt.peers):
            HERE.enter(receipt.name, receipt.peers)
            while not receipt.work.is_completed():
                if time.monotonic() - began > TIMEOUT:
                    raise RuntimeError(f"timed out after {TIMEOUT:g} s")
                time.sleep(POLL)
            HERE.leave(receipt.name)
        _ON_DEVICE.popleft()


POLL = 2e-5
"""Seconds between two looks at a collective on the device."""


def _abandon() -> None:
    """Leave the process group when the process ends, for whatever reason, and wait at most
    `PATIENCE` for each unfinished collective.
    """
    for work in tuple(_UNDER_WAY):
        with suppress(RuntimeError):
            work.wait(PATIENCE)
    until = time.monotonic() + PATIENCE.total_seconds()
    while _under_way() and time.monotonic() < until:
        time.sleep(0.01)
    for watcher in _WATCHERS:
        watcher.ended.set()
        watcher.join(PATIENCE.total_seconds())
    # A collective that hangs on the device would keep NCCL from leaving.
    end = dist.distributed_c10d._abort_process_group if _under_way() else dist.destroy_process_group
    _WATCHERS.clear()
    _UNDER_WAY.clear()
    _ON_DEVICE.clear()
    _HANDLES.clear()
    if rank_and_world() is not None:
        end()


def rank_and_world() -> tuple[int, int] | None:
    """Return rank and world size in the process group that this process has joined, or None if it
    has joined none.
    """
    return (
        (dist.get_rank(), dist.get_world_size())
        if dist.is_available() and dist.is_initialized()
        else None
    )


def everyones(value: Said) -> list[Said]:
    """Return the `value` of each rank of the process group, in order of ranks. Values are pickled,
    so use this only for tests and reports.
    """
    values: list[Any] = [None] * dist.get_world_size() if rank_and_world() else [value]
    if rank_and_world():
        with announce_operation("compare"):
            dist.all_gather_object(values, value)
    return values


def together(patience: float) -> bool:
    """Return whether all ranks have called this function, after at most `patience` seconds of
    waiting. With `patience` 0, a rank only records the call and does not wait.

    The calls are counted in the store of the process group, and no collective runs. So this also
    works while other ranks wait for this rank in a collective.
    """
    if not rank_and_world():
        return True
    store, key = (
        dist.distributed_c10d._get_default_store(),
        f"stagebridge/together/{next(_MEETINGS)}",
    )
    came, until = store.add(key, 1), time.monotonic() + patience
    while came < dist.get_world_size() and time.monotonic() < until:
        time.sleep(0.05)
        came = store.add(key, 0)  # reads the count
    return bool(came == dist.get_world_size())


_MEETINGS = count()
"""Counter of calls of `together`. The numbers agree on all ranks, because all ranks make the same
calls.
"""


@contextmanager
def announce_operation(name: str) -> Iterator[None]:
    """Context of an operation of all ranks that does not go through `Comm`. If a rank is lost, the
    error names the operation and the ranks.
    """
    here = rank_and_world() or (0, 1)
    peers = [rank for rank in range(here[1]) if rank != here[0]]
    with _telling(name, peers):
        HERE.enter(name, peers)
        yield
        HERE.leave(name)


@dataclass(frozen=True)
class Board:
    """Text messages that ranks leave for each other in the store of the process group, without
    collectives. In the store, the name of each message begins with `turn`, a text that differs from
    board to board.
    """

    store: dist.distributed_c10d.Store
    rank: int
    world: int
    turn: str

    def post(self, name: str, text: str) -> None:
        """Write the message `name` of this rank, for other ranks to read."""
        self.store.set(f"{self.turn}/{name}", text)

    def read(self, name: str, rank: int) -> str:
        """Wait for the message `name` of rank `rank` and return it. After each `SILENCE` seconds a
        warning names the rank. After `TIMEOUT` seconds, raise `LostRank`.
        """
        key, seconds = f"{self.turn}/{name}", 0.0
        while not self._there(key, min(SILENCE, TIMEOUT)):
            seconds += SILENCE
            message = f"rank {rank} has not reached {name!r} for {seconds:g} s"
            if seconds >= TIMEOUT:
                raise LostRank(f"{message}; see the messages of that rank")
            warnings.warn(message, stacklevel=2)
        return str(self.store.get(key).decode())

    def meet(self, name: str, patience: float | None = None) -> bool:
        """Wait at most `patience` seconds (default: `SILENCE`) until all ranks have called this with the same
        `name`, and return whether they have. Ranks that are late raise no error.
        """
        patience = min(SILENCE or TIMEOUT, TIMEOUT) if patience is None else patience
        # The first rank keeps the store, and should not end before others have read it.
        if self.store.add(f"{self.turn}/{name}", 1) == self.world:
            self.post(f"all {name}", "")
        return self._there(f"{self.turn}/all {name}", patience)

    def _there(self, key: str, seconds: float) -> bool:
        try:
            self.store.wait([key], timedelta(seconds=seconds))
        except RuntimeError as error:
            if not self.store.check([key]):
                return False
            raise LostRank(f"{key}: {error}") from None
        return True


_TURNS = count()
"""Counter of boards. The numbers agree on all ranks, because all ranks create the same boards."""


def board() -> Board | None:
    """Return a new board for messages between all ranks, or None if there is a single rank. All
    ranks must create their boards in the same order.
    """
    here = rank_and_world()
    if here is None or here[1] == 1:
        return None
    return Board(dist.distributed_c10d._get_default_store(), *here, f"stagebridge/{next(_TURNS)}")


def _open(ranks: tuple[int, ...], world: int, purpose: str = "") -> None:
    """Make torch's process group of `ranks`, unless it exists. All ranks of the world must take
    part.
    """
    if len(ranks) == 1 or (ranks, purpose) in _HANDLES:
        return
    handle = (
        dist.group.WORLD
        if len(ranks) == world and not purpose
        else dist.new_group(list(ranks), timeout=_timeout(dist.get_backend()))
    )
    assert handle is not None, (
        "the default process group must exist before a group of some ranks is made"
    )
    _HANDLES[ranks, purpose] = handle


def _add_up(wait: Wait, parts: Tensor, total: Tensor) -> None:
    """Wait for `parts`, which has one slice of the size of `total` for each rank, and write the sum
    of the slices into `total`.
    """
    wait()
    torch.sum(parts.view(-1, *total.shape), 0, out=total)


def _through_host(tensor: Tensor, group: Group) -> bool:
    """Return whether messages with `tensor` have to go through the memory of the host: gloo sends
    no tensors of a device.
    """
    return tensor.device.type != "cpu" and dist.get_backend(group.handle) == "gloo"


@torch.no_grad()
def _copy_arrival(wait: Wait, arrival: Tensor, tensor: Tensor) -> None:
    """Wait for `arrival`, and copy it into `tensor` on the device."""
    wait()
    tensor.copy_(arrival)


def _waiting(work: dist.Work, name: str, peers: Sequence[int]) -> Wait:
    _UNDER_WAY.add(work)

    def wait() -> None:
        with _telling(name, peers):
            HERE.enter(name, peers)
            work.wait()
            HERE.leave(name)
        _UNDER_WAY.discard(work)
        _under_way()
        if not work.is_completed():
            _ON_DEVICE.append(Awaited(work, name, peers, time.monotonic()))

    return wait


def _under_way() -> Awaited | None:
    """Return the oldest collective that the device still waits for, and forget those before it."""
    while _ON_DEVICE and _ON_DEVICE[0].work.is_completed():
        _ON_DEVICE.popleft()
    return _ON_DEVICE[0] if _ON_DEVICE else None


@dataclass
class Presence:
    """The state of this process, for other ranks to read: the step and the action, the collective
    that the process waits in, the ranks that it waits for, the last finished collective, and the
    time of the last change.
    """

    step: int = 0
    action: object = "start"
    waits: str = ""
    peers: Sequence[int] = ()
    last: str = ""
    since: float = field(default_factory=time.monotonic)

    def enter(self, name: str, peers: Sequence[int]) -> None:
        """Record that the process begins to wait for `peers` in the collective `name`."""
        self.since, self.peers, self.waits = time.monotonic(), peers, name

    def leave(self, name: str) -> None:
        """Record that the process has left the collective `name`."""
        self.since, self.waits, self.last = time.monotonic(), "", name

    def waiting(self) -> tuple[str, Sequence[int], float]:
        """Return the collective in which the host waits, or else the oldest one in which only the
        device does: its name ("" if there is none), the ranks, and the time since when.
        """
        waits, peers, since = self.waits, self.peers, self.since
        device = None if waits else next(iter(tuple(_ON_DEVICE)), None)
        if device is None or device.work.is_completed():
            return waits, peers, since
        return device.name, device.peers, device.since

    def state_as_json(self, tick: int) -> str:
        """Return the state as JSON, for other ranks. `tick` counts the reports: a rank whose `tick`
        does not change is silent.
        """
        waits, _, since = self.waiting()
        last = f"step {self.step}, {self.action}" + (f", after {self.last}" if self.last else "")
        return json.dumps(
            {"tick": tick, "waits": waits, "last": last, "for": time.monotonic() - since}
        )


HERE = Presence()
"""The state of this process, which the watcher reports to the other ranks."""


class Watcher(Thread):
    """A thread that reports the state of this rank to other ranks. If this rank has waited for
    `SILENCE` seconds, the thread prints the ranks that this rank waits for.
    """

    def __init__(
        self, store: dist.distributed_c10d.Store, rank: int, say: Callable[[str], None]
    ) -> None:
        super().__init__(daemon=True)
        self.store, self.rank, self.say, self.ended = store, rank, say, Event()
        self._seen: dict[int, int] = {}
        self._named = 0.0

    def run(self) -> None:
        """Check the other ranks four times in `SILENCE` seconds, until the process ends or the
        store is gone.
        """
        tick = 0
        # The store lives in the first rank. Its end is noticed and named by whoever waits in a
        # collective.
        with suppress(RuntimeError):
            while not self.ended.wait(SILENCE / 4):
                tick += 1
                self.store.set(f"stagebridge/now/{self.rank}", HERE.state_as_json(tick))
                self._look()

    def _look(self) -> None:
        waits, peers, since = HERE.waiting()
        seconds = time.monotonic() - since
        if not waits or seconds < SILENCE / 2:
            return
        states = {peer: self._read(peer) for peer in peers}
        # Those to name: ranks that never told anything, that tell the same as at the last look, or
        # that wait for nobody. Of ranks that wait themselves, none may be to blame; they are named
        # only if there are no others.
        silent = [
            peer
            for peer, now in states.items()
            if not now or now["tick"] == self._seen.get(peer) or not now["waits"]
        ]
        self._seen = {peer: now["tick"] for peer, now in states.items() if now}
        if seconds < SILENCE or self._named == since:  # too early, or named in this wait before
            return
        self._named = since
        for peer in silent or peers:
            self.say(
                f"rank {self.rank} waits in {waits!r} for rank {peer}; {_silence_text(peer, states[peer])};"
                f" rank {self.rank} gives up after {TIMEOUT:g} s"
            )

    def _read(self, peer: int) -> dict[str, Any]:
        key = f"stagebridge/now/{peer}"
        state: dict[str, Any] = json.loads(self.store.get(key)) if self.store.check([key]) else {}
        return state


def _silence_text(rank: int, now: Mapping[str, Any]) -> str:
    if not now:
        return f"rank {rank} has not reported anything yet"
    if now["waits"]:
        return f"rank {rank} waits in {now['waits']!r} (step and last action: {now['last']})"
    return (
        f"rank {rank} has been silent for {now['for']:.0f} s or more (last action: {now['last']})"
    )


_WATCHERS: list[Watcher] = []


def _watch(rank: int) -> None:
    """Start the watcher of this process, with its own connection to the store if torch can clone
    the store.
    """
    # Over a shared connection it could wait behind a `get` of the process, which blocks until the
    # key is there.
    store = dist.distributed_c10d._get_default_store()
    clone = getattr(store, "clone", None)
    _WATCHERS.append(
        Watcher(
            clone() if clone else store,
            rank,
            lambda line: print(f"note: {line}", file=sys.stderr, flush=True),
        )
    )
    _WATCHERS[-1].start()


class LostRank(BridgeError, RuntimeError):
    """Raised when another rank no longer answers."""


LOST = re.compile(
    r"onnection|peer|timed? ?out|broken pipe|remote process|NCCL communicator was aborted",
    re.IGNORECASE,
)
"""Pattern that matches torch's errors about a rank that no longer answers."""


@contextmanager
def _telling(name: str, peers: Sequence[int]) -> Iterator[None]:
    """Context of the operation `name` with the ranks `peers`. If these ranks no longer answer,
    raise a `LostRank` that names the ranks.
    """
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        if not LOST.search(reason):
            raise
        who = (
            f"rank {peers[0]}" if len(peers) == 1 else f"one of ranks {', '.join(map(str, peers))}"
        )
        raise LostRank(
            f"{name}: {who} is gone or silent ({reason}); see the messages of that rank, then resume the run"
        ) from None


_OPS: Mapping[str, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
# Torch renames these; older releases have the second name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
