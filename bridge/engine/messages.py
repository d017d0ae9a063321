"""Messages: activations and gradients that pipeline ranks send to each other. A message is tagged
by stage, microbatch and direction, and is freed after it has arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from bridge.engine.comm import Comm, Group, Wait, arrive
from bridge.errors import BridgeError
from bridge.layout.schedule import Action, ActionKind
from bridge.layout.schedule.action import Row
from bridge.layout.step import Sizes
from bridge.layout.traffic import HEADER, HEADER_LENGTH, SEND, SEND_BACKWARD, Traffic

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
)
"""Formats of tensors in a message. A header names them by their index in this tuple."""
SENDS: Mapping[ActionKind, str] = {
    ActionKind.SEND_FORWARD: SEND,
    ActionKind.SEND_BACKWARD: SEND_BACKWARD,
}
ANSWERS = {
    ActionKind.RECEIVE_FORWARD: ActionKind.SEND_FORWARD,
    ActionKind.RECEIVE_BACKWARD: ActionKind.SEND_BACKWARD,
}


@dataclass(frozen=True, slots=True)
class Form:
    """Shape and number format of a tensor in a message. `grad` is true if the tensor takes part in
    backward.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """The form of `tensor`."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor of this form with undefined values."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


Forms = tuple[Form, ...]


class Messages:
    """The messages that one pipeline rank sends and receives in a step.

    The shapes of a stage's inputs are sent before the first microbatch of a step, and hold for the
    other microbatches too. With `variable`, shapes are sent with every microbatch. With `overlap`,
    a receive starts before its action, in the order in which the other rank sends. A sent tensor is
    freed when a later message shows that the other rank has received it. All messages on a link
    have the same direction and a fixed order, so that a backend without tags can send them too.
    """

    def __init__(
        self,
        comm: Comm,
        rows: Sequence[Row],
        homes: Sequence[int],
        microbatches: int,
        device: torch.device,
        variable: bool = False,
        overlap: bool = True,
    ) -> None:
        group = comm.group("pipeline")
        self.comm, self.homes, self.rank, self.device = comm, homes, group.index, device
        self.microbatches, self.variable, self.overlap = microbatches, variable, overlap
        # NCCL runs the messages of a group in the order in which a rank starts them. In one group,
        # a send would wait for a receipt that was started ahead of it, and two ranks could wait for
        # each other forever.
        self._links = {False: group, True: comm.again("pipeline", "down")} if group.size > 1 else {}
        self._places = [{action: place for place, action in enumerate(row)} for row in rows]
        # The sends of each other rank to this one, in the order of its row.
        self._incoming = {
            peer: [
                action
                for action in row
                if action.kind in SENDS and homes[action.stage] == self.rank
            ]
            for peer, row in enumerate(rows)
            if peer != self.rank
        }
        self._sent: dict[int, deque[tuple[Action, list[tuple[Wait, Tensor]]]]] = {
            peer: deque() for peer in self._incoming
        }
        self._forms: dict[int, Forms] = {}
        self.shapes: dict[int, Forms] = {}
        self._posted: dict[Action, list[tuple[Wait, Tensor]]] = {}
        self._next = dict.fromkeys(self._incoming, 0)
        self.returned: Callable[[Action], Forms] = lambda action: ()
        self._open(rows)

    def _open(self, rows: Sequence[Row]) -> None:
        """Open the links between ranks that `rows` use, in the same order on all ranks. They are
        opened before the first message, because opening a link takes both ranks. In interleaved
        schedules, the first rank sends a gradient to the last rank before the last rank is ready to
        receive it. Ranks that opened links only then could wait for each other in a circle.
        """
        ways = (
            (rank, self.homes[action.stage])
            for rank, row in enumerate(rows)
            for action in row
            if action.kind in SENDS
        )
        for source, to in sorted(set(ways)):
            if self.rank in (source, to):
                self.comm.meet(self._links[to < source], source, to, self.device)

    def begin(self) -> None:
        """Start a step, in which the shapes of messages are not known yet."""
        self._forms.clear()
        self._next = dict.fromkeys(self._incoming, 0)

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Start to send the tensors of `action`."""
        peer = self.homes[action.stage]
        waits = (
            self._announce(action, tensors, peer) if action.kind is ActionKind.SEND_FORWARD else []
        )
        for index, tensor in enumerate(tensors):
            whole = tensor.detach().contiguous()
            link = self._link(peer)
            waits.append(
                (
                    self.comm.send(
                        SENDS[action.kind], whole, link, peer, self._tag(action, index + 1)
                    ),
                    whole,
                )
            )
        self._sent[peer].append((action, waits))
        self.comm.ledger.note(str(action))

    def receive(self, action: Action) -> list[Tensor]:
        """Wait for the tensors of the receive `action`, and return them. They take part in backward
        if they did so on the sending rank.
        """
        send = Action(action.stage, ANSWERS[action.kind], action.microbatch)
        peer = self.homes[
            send.stage - 1 if send.kind is ActionKind.SEND_FORWARD else send.stage + 1
        ]
        # The other side sends in its own order. Messages before this one, for which nobody has
        # asked yet, are received first.
        while send not in self._posted:
            self._post(peer)
        if self.overlap and self._has_forms(peer):
            self._post(peer)
        tensors = []
        for wait, tensor in self._posted.pop(send):
            wait()
            tensors.append(tensor)
        # The other side has done everything that stands before this message in its row. What it had
        # received until then needs to be kept no longer.
        sends, places = self._sent[peer], self._places[peer]
        place = places.get(send, -1)
        while sends and places.get(_receipt(sends[0][0]), place) < place:
            _wait_all(sends.popleft()[1])
        self.comm.ledger.note(str(action))
        return tensors

    def sizes(self, tokens: int) -> Sizes:
        """Return the sizes of the messages of a microbatch with `tokens` tokens. The shapes of one
        microbatch must be known.
        """
        forward = {stage: _size(forms) for stage, forms in self.shapes.items()}
        backward = {
            stage: _size(form for form in forms if form.grad)
            for stage, forms in self.shapes.items()
        }
        return Sizes(tokens, forward, backward, self.variable)

    def finish(self) -> None:
        """Wait until all sent messages have arrived."""
        for sends in self._sent.values():
            while sends:
                _wait_all(sends.popleft()[1])

    def send_once(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Send tensors outside the program, as in evaluation, together with their shapes."""
        self._forms.pop(action.stage, None)
        self.send(action, tensors)

    def receive_once(self, action: Action) -> list[Tensor]:
        """Receive the tensors that another rank sends by `send_once`."""
        peer, send = (
            self.homes[action.stage - 1],
            Action(action.stage, ActionKind.SEND_FORWARD, action.microbatch),
        )
        self._forms.pop(action.stage, None)
        waits = self._start(send, peer)
        for wait, _ in waits:
            wait()
        return [tensor for _, tensor in waits]

    def _post(self, peer: int) -> None:
        """Start to receive the next message from `peer`."""
        send = self._incoming[peer][self._next[peer]]
        self._next[peer] += 1
        self._posted[send] = self._start(send, peer)

    def _start(self, send: Action, peer: int) -> list[tuple[Wait, Tensor]]:
        name, link = SENDS[send.kind], self._link(peer, mine=False)
        self.comm.ledger.note(f"{send} awaited")
        receives = []
        for index, form in enumerate(self._forms_of_message(send, peer)):
            tensor = form.empty(self.device)
            receives.append(
                (self.comm.receive(name, tensor, link, peer, self._tag(send, index + 1)), tensor)
            )
            # Activations take part in backward if they did on the other side; gradients never do.
            tensor.requires_grad_(form.grad and send.kind is ActionKind.SEND_FORWARD)
        return receives

    def _has_forms(self, peer: int) -> bool:
        """Return whether the shapes of the next message from `peer` are known already. If not, they
        are in a header that has to arrive first.
        """
        if self._next[peer] == len(self._incoming[peer]):
            return False
        send = self._incoming[peer][self._next[peer]]
        if send.kind is ActionKind.SEND_BACKWARD:
            return bool(self.returned(send))
        return send.stage in self._forms and not self.variable

    def _forms_of_message(self, send: Action, peer: int) -> Forms:
        """Return the shapes and formats of the tensors in the message `send` from `peer`. Gradients
        have the shapes of the outputs to which they belong; all other tensors have the shapes in
        the header.
        """
        if send.kind is ActionKind.SEND_BACKWARD:
            return self.returned(send)
        if self.variable or send.stage not in self._forms:
            header = torch.zeros(HEADER_LENGTH, dtype=torch.int64, device=self.device)
            self.comm.receive(
                HEADER, header, self._link(peer, mine=False), peer, self._tag(send, 0)
            )()
            arrive()
            self._forms[send.stage] = self.shapes[send.stage] = _unpack_forms(header.tolist())
        return self._forms[send.stage]

    def _announce(
        self, action: Action, tensors: Sequence[Tensor], peer: int
    ) -> list[tuple[Wait, Tensor]]:
        """Send a header with the shapes of `tensors`, unless the receiving rank knows these shapes."""
        forms = tuple(map(Form.of, tensors))
        earlier = self._forms.get(action.stage)
        if earlier == forms and not self.variable:
            return []
        if earlier is not None and not self.variable:
            raise BridgeError(
                f"microbatch {action.microbatch}: stage {action.stage} would get tensors {_forms_text(forms)},"
                f" expected {_forms_text(earlier)} as in"
                " earlier microbatches; pad all microbatches to one size, or pass variable_shapes=True to initialize"
            )
        self._forms[action.stage] = self.shapes[action.stage] = forms
        header = torch.tensor(_pack_forms(forms), dtype=torch.int64, device=self.device)
        return [
            (self.comm.send(HEADER, header, self._link(peer), peer, self._tag(action, 0)), header)
        ]

    def _link(self, peer: int, mine: bool = True) -> Group:
        """Return the group for messages between this rank and `peer`. There is one group for
        messages to higher ranks, and one for messages to lower ranks.
        """
        return self._links[not (self.rank < peer if mine else peer < self.rank)]

    def _tag(self, action: Action, index: int) -> int:
        """Return a tag that no other tensor of any stage, microbatch and direction has. `index` is
        0 for the header, and counts tensors from 1.
        """
        microbatch = max(action.microbatch, 0)
        # A message has fewer than HEADER_LENGTH tensors, as its header has at least one number for
        # each.
        return (
            (action.stage * self.microbatches + microbatch) * 2 + (action.kind in _BACKWARD)
        ) * HEADER_LENGTH + index


_BACKWARD = (ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD)


def _size(forms: Iterable[Form]) -> Traffic:
    return sum((Traffic(1, prod(form.shape) * form.dtype.itemsize) for form in forms), Traffic())


def _receipt(send: Action) -> Action:
    kind = (
        ActionKind.RECEIVE_FORWARD
        if send.kind is ActionKind.SEND_FORWARD
        else ActionKind.RECEIVE_BACKWARD
    )
    return Action(send.stage, kind, send.microbatch)


def _wait_all(waits: Sequence[tuple[Wait, Tensor]]) -> None:
    for wait, _ in waits:
        wait()


def _pack_forms(forms: Forms) -> list[int]:
    numbers = [len(forms)]
    for form in forms:
        numbers += [DTYPES.index(form.dtype), int(form.grad), len(form.shape), *form.shape]
    if len(numbers) > HEADER_LENGTH:
        raise BridgeError(
            f"stage output: found tensors {_forms_text(forms)}, too many for a"
            f" header of {HEADER_LENGTH} numbers; return fewer tensors"
        )
    return numbers + [0] * (HEADER_LENGTH - len(numbers))


def _unpack_forms(numbers: Sequence[int]) -> Forms:
    forms, place = [], 1
    for _ in range(numbers[0]):
        dtype, grad, dims = numbers[place : place + 3]
        place += 3
        forms.append(Form(tuple(numbers[place : place + dims]), DTYPES[dtype], bool(grad)))
        place += dims
    return tuple(forms)


def _forms_text(forms: Forms) -> str:
    return ", ".join(f"{tuple(form.shape)} {form.dtype}" for form in forms)
