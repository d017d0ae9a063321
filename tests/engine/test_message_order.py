"""Messages between pipeline ranks keep one order on both sides, as backends without tags need it: under every schedule, what one
rank sends to another over a link is received in that order, each link goes one way, and no first use of a link waits in a circle.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor

from bridge.engine.comm import Group, Ledger
from bridge.engine.messages import Form, Forms, Messages
from bridge.errors import ConfigError
from bridge.layout.schedule import (
    SCHEDULES,
    Action,
    ActionKind,
    Schedule,
    ScheduleShape,
    generate_schedule,
    program_rows,
    trim_backward,
)

MANY = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=int(os.environ.get("SCHEDULES", "200")),
)
CPU = torch.device("cpu")
SENDS, RECEIVES = (
    (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD),
    (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD),
)
Link = tuple[str, int, int]
"""A group by its purpose, with the rank that sends and the one that receives."""


class Wires:
    """All links between ranks. As under NCCL, nothing but the order on a link says which receipt gets which message."""

    def __init__(self) -> None:
        self.sent: dict[Link, list[tuple[int, Tensor]]] = defaultdict(list)
        self.received: dict[Link, list[int]] = defaultdict(list)
        self.log: dict[int, list[tuple[str, Link, int]]] = defaultdict(list)
        """What each rank does, in order: `meet`, `send`, `post` a receipt, `wait` for it, with its place on the link."""

    def comm(self, rank: int, ranks: int) -> Any:
        """What `Messages` asks of a `Comm`."""
        return Wired(self, rank, ranks)


class Wired:
    """One rank's end of the links."""

    def __init__(self, wires: Wires, rank: int, ranks: int) -> None:
        self.wires, self.rank, self.ledger = wires, rank, Ledger()
        self.ranks = tuple(range(ranks))

    def group(self, axis: str) -> Group:
        return Group(self.ranks, self.rank)

    def again(self, axis: str, purpose: str) -> Group:
        return Group(self.ranks, self.rank, purpose)

    def meet(self, group: Group, source: int, to: int, device: torch.device) -> None:
        self.wires.log[self.rank].append(("meet", (group.purpose, source, to), -1))

    def send(
        self, name: str, tensor: Tensor, group: Group, to: int, tag: int
    ) -> Callable[[], None]:
        link = group.purpose, self.rank, to
        self.wires.log[self.rank].append(("send", link, len(self.wires.sent[link])))
        self.wires.sent[link].append((tag, tensor.clone()))
        return lambda: None

    def receive(
        self, name: str, tensor: Tensor, group: Group, source: int, tag: int
    ) -> Callable[[], None]:
        link = group.purpose, source, self.rank
        place = len(self.wires.received[link])
        self.wires.received[link].append(tag)
        self.wires.log[self.rank].append(("post", link, place))

        def wait() -> None:
            self.wires.log[self.rank].append(("wait", link, place))
            known, value = self.wires.sent[link][place]
            assert known == tag, (
                f"rank {self.rank} gets message {known} of {link} where it waits for {tag}"
            )
            assert value.shape == tensor.shape
            tensor.data.copy_(value)

        return wait


class Rank:
    """One rank: its row, its messages, and which passes have run."""

    def __init__(
        self,
        wires: Wires,
        schedule: Schedule,
        rows: Sequence[Any],
        rank: int,
        widths: Sequence[int],
        more: Any,
    ) -> None:
        self.row, self.place, self.widths, self.homes = rows[rank], 0, widths, schedule.homes
        self.forward: set[tuple[int, int]] = set()
        comm = wires.comm(rank, len(rows))
        self.messages = Messages(comm, rows, schedule.homes, schedule.microbatches, CPU, **more)
        self.messages.returned = self._returned
        self.messages.begin()

    def content(self, stage: int, microbatch: int) -> list[Tensor]:
        """What stage `stage` gives for a microbatch: as many tensors as it is wide, with numbers that tell them apart."""
        number = 100.0 * stage + microbatch
        return [
            torch.full((place + 1,), number + place / 8).requires_grad_()
            for place in range(self.widths[stage])
        ]

    def _returned(self, action: Action) -> Forms:
        """Forms of gradients are known once forward has run, as in the executor."""
        there = (action.stage, action.microbatch) in self.forward
        return tuple(map(Form.of, self.content(action.stage, action.microbatch))) if there else ()

    def step(self, done: set[Action]) -> bool:
        """Run the next action if what it waits for was sent; whether it ran."""
        if self.place == len(self.row):
            return False
        action = self.row[self.place]
        if action.kind in RECEIVES:
            twin = (
                ActionKind.SEND_FORWARD
                if action.kind is ActionKind.RECEIVE_FORWARD
                else ActionKind.SEND_BACKWARD
            )
            if Action(action.stage, twin, action.microbatch) not in done:
                return False
            source = action.stage - 1 if action.kind is ActionKind.RECEIVE_FORWARD else action.stage
            found = self.messages.receive(action)
            expected = self.content(source, action.microbatch)
            assert [part.tolist() for part in found] == [part.tolist() for part in expected]
        elif action.kind in SENDS:
            source = action.stage - 1 if action.kind is ActionKind.SEND_FORWARD else action.stage
            self.messages.send(action, self.content(source, action.microbatch))
        elif action.kind is ActionKind.FORWARD:
            self.forward.add((action.stage, action.microbatch))
        done.add(action)
        self.place += 1
        return True


def ran(
    schedule: Schedule, rows: Sequence[Any], widths: Sequence[int], more: Any, reverse: bool
) -> Wires:
    """All ranks' rows with the engine's own messages, in turns."""
    wires, done = Wires(), set[Action]()
    ranks = [Rank(wires, schedule, rows, rank, widths, more) for rank in range(len(rows))]
    moved = True
    while moved:
        moved = False
        for rank in reversed(ranks) if reverse else ranks:
            while rank.step(done):
                moved = True
    assert all(rank.place == len(rank.row) for rank in ranks)
    for rank in ranks:
        rank.messages.finish()
    return wires


def waits_in_a_circle(wires: Wires) -> list[str]:
    """Ranks that never come to an end where the first use of a link waits until the other side uses it too, as NCCL opens it."""
    places, opened, sent = dict.fromkeys(wires.log, 0), defaultdict(set), defaultdict(int)
    moved = True
    while moved:
        moved = False
        for rank, log in wires.log.items():
            while places[rank] < len(log):
                kind, link, number = log[places[rank]]
                if kind == "wait":
                    ready = sent[link] > number
                else:
                    moved = moved or rank not in opened[link]
                    opened[link].add(rank)
                    ready = len(opened[link]) == 2
                if not ready:
                    break
                sent[link] += kind == "send"
                places[rank] += 1
                moved = True
    return [
        f"rank {rank} at {log[places[rank]]}"
        for rank, log in wires.log.items()
        if places[rank] < len(log)
    ]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Sequence[Any], Sequence[int], Any, bool]:
    """A schedule over stages whole or in parts, of which the first may be frozen; tensors by stage; how messages are sent."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    ranks, virtual = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    shape = ScheduleShape(
        ranks,
        ranks * virtual,
        draw(st.integers(ranks, 3 * ranks)),
        draw(st.integers(1, 8)),
        draw(st.integers(1, 3)),
    )
    try:
        found = generate_schedule(name, shape)
    except ConfigError:
        assume(False)
        raise
    if draw(st.booleans()):
        found = found.split_stages(
            draw(st.lists(st.integers(1, 3), min_size=found.stages, max_size=found.stages))
        )
    first = draw(st.integers(0, found.stages - 1)) if draw(st.booleans()) else 0
    rows = [trim_backward(row, first) for row in program_rows(found)]
    widths = draw(st.lists(st.integers(1, 3), min_size=found.stages, max_size=found.stages))
    more = {"variable": draw(st.booleans()), "overlap": draw(st.booleans())}
    return found, rows, widths, more, draw(st.booleans())


@MANY
@given(cases())
def test_each_link_has_one_order_on_both_sides(case: Any) -> None:
    schedule, rows, widths, more, reverse = case
    wires = ran(schedule, rows, widths, more, reverse)
    for link, tags in wires.received.items():
        assert tags == [tag for tag, _ in wires.sent[link]], link
    ways = {(purpose, *sorted(pair)): pair for purpose, *pair in wires.sent}
    assert len(ways) == len(wires.sent), "a link between two ranks goes one way"
    assert not waits_in_a_circle(wires)


def test_a_crossing_is_seen() -> None:
    """The proof above would fail if a rank asked for messages in its own order instead of the sender's."""
    wires = Wires()
    here, there = wires.comm(0, 2), wires.comm(1, 2)
    for tag in (1, 2):
        here.send("x", torch.tensor([float(tag)]), here.group("pipeline"), 1, tag)
    wait = there.receive("x", torch.zeros(1), there.group("pipeline"), 0, 2)
    with pytest.raises(AssertionError, match=r"gets message 1 .* where it waits for 2"):
        wait()


def test_interleaved_schedules_would_wait_in_a_circle_if_links_opened_by_themselves() -> None:
    schedule = generate_schedule("interleaved_1f1b", ScheduleShape(4, 8, 11, 7))
    rows = [trim_backward(row, 0) for row in program_rows(schedule)]
    wires = ran(schedule, rows, [1] * schedule.stages, {"variable": False, "overlap": True}, False)
    assert not waits_in_a_circle(wires)
    for log in wires.log.values():
        log[:] = [step for step in log if step[0] != "meet"]
    assert waits_in_a_circle(wires)


def test_a_circle_of_first_uses_is_seen() -> None:
    wires = Wires()
    for rank in (0, 1):
        comm = wires.comm(rank, 2)
        comm.send("x", torch.zeros(1), comm.group("pipeline"), 1 - rank, 1)
        comm.receive("x", torch.zeros(1), comm.group("pipeline"), 1 - rank, 1)
    assert waits_in_a_circle(wires)
