"""Gradients: flat buffers that backward accumulates into, and their reduction into the slices that
this rank owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bridge.engine.absence import (
    EARLY,
    LINKED,
    SLICE,
    drop_gradient,
    gradient_of,
    hide_gradient,
    is_hidden,
)
from bridge.engine.comm import Comm, Group, Wait
from bridge.engine.formats import TORCH
from bridge.errors import BridgeError
from bridge.layout.shard import Flat, Home, Layout
from bridge.layout.traffic import REDUCE, REPLICAS, TIED

LATE = "reduce late gradients"
MISSING = "find parameters without a gradient"
HAND_OVER = "hand over gradients"


class Gradients:
    """Flat gradients of one rank, summed over microbatches and data ranks, and not divided by their
    number.

    The first gradient of a parameter is copied into its place and later ones are added, so that
    nothing has to be zeroed. A shared buffer passes to the next stage when its reduction has ended.
    If data ranks exchange gradients in another format than they accumulate in, a rounded copy is
    sent. A single data rank sends nothing, but rounds its gradients in the same way. In fp16, each
    rank adds only `share` of its gradients to the sum, so that the sum overflows only if the mean
    does. `holders` are the groups of pipeline ranks that hold the same parameters and sum their
    gradients. Shared buffers, and the slices of flats that use them, have memory only from backward
    to the end of the step, because activations take the most memory when backward begins.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Mapping[str, nn.Parameter],
        comm: Comm,
        device: torch.device,
        holders: Mapping[tuple[int, ...], Group],
    ) -> None:
        self.layout, self.comm, self.group = layout, comm, comm.group("data")
        self.flats = {index: flat for index, flat in enumerate(layout.flats) if flat.trainable}
        self.buffers = {
            home: torch.zeros(size, dtype=TORCH[home.dtype], device=device)
            for home, size in layout.homes("grad").items()
        }
        # A slice of the whole buffer if the flat has it to itself. In a shared buffer the next
        # stage overwrites the sum, so that this rank's slice is kept apart.
        self.shards: dict[int, Tensor] = {}
        for index, flat in self.flats.items():
            whole, part = self.whole(flat), flat.elements_of(self.group.index)
            apart = flat.grad_shared
            self.shards[index] = (
                torch.zeros_like(whole[: flat.shard]) if apart else whole[part.start : part.stop]
            )
        # One share for all flats, as the squared norm adds them up before it is divided by the
        # share.
        half = any("fp16" in (flat.reduce, flat.exchange) for flat in self.flats.values())
        self.share = 1 / self.group.size if half else 1.0
        self._written: set[str] = set()
        self._reduced: set[int] = set()
        self._pending: dict[Home, tuple[int, Wait]] = {}
        self._finished = False
        # The flats that have a shared buffer now, and those whose reduction in this step has begun.
        self._owners: dict[Home, int] = {}
        self._begun: set[int] = set()
        self.active = False
        """Whether gradients are written to buffers now: while the engine itself runs backward."""
        self.parameters = parameters
        self._hooks: list[tuple[Any, int]] = []
        self._touched: set[str] = set()
        self._withheld: list[nn.Parameter] = []
        self._hidden: list[nn.Parameter] = []
        self._handed: dict[str, Tensor] = {}
        self.gathered: list[tuple[Flat, Tensor, Tensor]] = []
        """Sharded flats whose gradients the script has whole: each with this rank's slice, and the whole."""
        self.holds: Callable[[int], bool] = lambda index: True
        """Whether the weights of a flat are whole now."""
        for index, flat in self.flats.items():
            self._hook(index, flat, parameters)
        # By name, which all pipeline ranks know: they number their flats differently, but have to
        # make these sums in one order.
        tied = sorted(
            (flat.slots[0].parameter.name, index)
            for index, flat in self.flats.items()
            if flat.replicas
        )
        self._tied = [
            (self.shards[index], holders[self.flats[index].replicas]) for _, index in tied
        ]
        self.clear()

    def whole(self, flat: Flat) -> Tensor:
        """Return the buffer with all gradients of `flat`, padding included."""
        return self.buffers[flat.grad_home][: flat.padded]

    def acquire(self, stage: int) -> None:
        """Wait until `stage` can run backward: no reduction may still read the buffers that the
        stage writes to.
        """
        for index in self.layout.users[stage]:
            flat = self.layout.flats[index]
            if not flat.trainable:
                continue
            before = self._owners.get(flat.grad_home, index)
            if before != index:
                self._reduce(before, self.flats[before])
            if flat.grad_home in self._pending:
                self._settle(flat.grad_home)
            if flat.grad_shared:
                self._owners[flat.grad_home] = index

    def reduce(self, indices: Iterable[int]) -> None:
        """Start to reduce the flats with these indices. Until a reduction ends, nothing writes to
        its buffer.
        """
        for index in indices:
            self._reduce(index, self.flats[index])

    def left(self) -> list[int]:
        """Return the indices of the flats with gradients that are not reduced yet."""
        return [
            index
            for index, flat in self.flats.items()
            if (
                self._owners.get(flat.grad_home) == index
                if flat.grad_shared
                else index not in self._begun
            )
        ]

    def late(self) -> list[int]:
        """Return the indices of the flats of which a parameter has a gradient outside the buffers: one
        that came when the buffer belonged to another stage, or was reduced already, or by a backward
        pass that the script ran itself.
        """
        return [
            index
            for index, flat in self.flats.items()
            if any(
                gradient_of(self.parameters[slot.parameter.name]) is not None for slot in flat.slots
            )
        ]

    def missing(self) -> list[str]:
        """Return the names of the parameters that got no gradient from this rank in this step. Not
        those that several pipeline ranks hold: a gradient of one rank counts for all.
        """
        return [
            slot.parameter.name
            for flat in self.flats.values()
            if not flat.replicas
            for slot in flat.slots
            if slot.parameter.name not in self._touched
        ]

    def follow_hooks(self) -> None:
        """Have the script's own hooks on gradients run before those that take the gradients away."""
        for parameter, number in self._hooks:
            hooks = parameter._post_accumulate_grad_hooks
            if next(reversed(hooks)) != number:
                hooks[number] = hooks.pop(number)

    def forget(self) -> None:
        """Forget the gradients of the microbatches of this step that have run."""
        for home in tuple(self._pending):
            self._settle(home)
        for marks in (self._written, self._reduced, self._begun, self._touched, self._handed):
            marks.clear()
        for parameter in self.parameters.values():
            drop_gradient(parameter)

    def unhook(self) -> None:
        """Leave the parameters to the script: without hooks, and with gradients that can be read."""
        self._show_all()
        for parameter, number in self._hooks:
            parameter._post_accumulate_grad_hooks.pop(number, None)
        self._hooks.clear()

    def hand_over(self, unit: float) -> None:
        """Give the script the reduced gradients times `unit`, whole and as the parameters' own, until
        `take_back`. If flats are sharded, all data ranks must take part.
        """
        self.finish()
        for index, flat in self.flats.items():
            shard = whole = self.shards[index]
            if unit != 1:
                shard.mul_(unit)
            if flat.sharded:
                whole = shard.new_empty(flat.padded) if flat.grad_shared else self.whole(flat)
                self.comm.all_gather(HAND_OVER, whole, shard, self.group)()
                self.gathered.append((flat, shard, whole))
            for slot in flat.slots:
                parameter = self.parameters[slot.parameter.name]
                place = whole[slot.start : slot.stop].view(slot.parameter.shape)
                if gradient_of(parameter) is not None:
                    continue  # it is late, and this rank's own
                hide_gradient(parameter, "")
                if slot.parameter.name in self._touched or (
                    self.group.size > 1 and bool(place.any())
                ):
                    parameter.grad = self._handed[slot.parameter.name] = place

    def withhold(self, ask: Callable[[], bool] | None = None) -> None:
        """Make it an error to read the gradients of parameters until `take_back`, unless `ask` hands them over."""
        self._hide_all(SLICE, self._withheld, ask)

    def hide(self) -> None:
        """Make it an error to read the gradients of parameters until `show`: later microbatches add to them."""
        self._hide_all(EARLY, self._hidden)

    def show(self) -> None:
        """Allow it again to read the gradients that `hide` has hidden."""
        for parameter in self._hidden:
            hide_gradient(parameter, "")
        self._hidden.clear()

    def _show_all(self) -> None:
        for parameter in self._withheld:
            hide_gradient(parameter, "")
        self._withheld.clear()
        self.show()

    def _hide_all(
        self, reason: str, hidden: list[nn.Parameter], ask: Callable[[], bool] | None = None
    ) -> None:
        for flat in self.flats.values():
            for slot in flat.slots:
                parameter = self.parameters[slot.parameter.name]
                if not is_hidden(parameter):
                    hide_gradient(parameter, reason, ask)
                    hidden.append(parameter)

    def take_back(self) -> None:
        """Take the gradients that `hand_over` gave, with what the script made of them."""
        self._show_all()
        for name, place in self._handed.items():
            parameter = self.parameters[name]
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                raise BridgeError(
                    f"step: the gradient of {name} was set to None between backward and step, but the engine"
                    " cannot leave a parameter out of a step; set it to zero, or freeze the parameter"
                )
            if gradient.data_ptr() != place.data_ptr():
                place.copy_(gradient)
        for flat, shard, whole in self.gathered:
            own = flat.elements_of(self.group.index)
            shard.copy_(whole[own.start : own.stop])  # onto itself where buffers are not shared
        self.gathered.clear()
        self._handed.clear()

    def add_late(self, index: int, unit: float) -> None:
        """Reduce the late gradients of a flat, and add them times `unit` to the sum of the step. All data
        ranks must take part.
        """
        flat, shard = self.flats[index], self.shards[index]
        whole = torch.zeros(flat.padded, dtype=TORCH[flat.reduce], device=shard.device)
        for slot in flat.slots:
            parameter = self.parameters[slot.parameter.name]
            if parameter.grad is not None:
                self._touched.add(slot.parameter.name)
                whole[slot.start : slot.stop].copy_(parameter.grad.reshape(-1))
                parameter.grad = None
        message = whole.mul_(self.share).to(TORCH[flat.exchange])
        if flat.sharded:
            part = torch.empty_like(shard, dtype=message.dtype)
            self.comm.reduce_scatter(LATE, part, message, self.group)()
        else:
            self.comm.all_reduce(LATE, message, self.group)()
            part = message
        shard.add_(part, alpha=unit)

    def finish(self) -> None:
        """Wait for all reductions, and sum the partial gradients of replicas. Each rank's slices
        then hold the gradients of the step. Only the first call in a step does anything.
        """
        if self._finished:
            return
        self._finished = True
        for home in tuple(self._pending):
            self._settle(home)
        for index, shard in self.shards.items():
            # No stage of this rank reduced it in this step.
            if _claim(shard) or index not in self._begun:
                shard.zero_()
        # One collective for each format: these parameters (norms and biases) are many and small.
        for parts in self._partial().values():
            whole = torch.cat(parts)
            self.comm.all_reduce(REPLICAS, whole, self.comm.group("tensor"))()
            torch._foreach_copy_(parts, list(torch.split(whole, [len(part) for part in parts])))
        # All are started before the first is waited for.
        for wait in [self.comm.all_reduce(TIED, shard, group) for shard, group in self._tied]:
            wait()

    def _partial(self) -> dict[torch.dtype, list[Tensor]]:
        """The gradients of partial replicas that this rank owns, by number format."""
        shards: dict[torch.dtype, list[Tensor]] = {}
        for flat, shard in self.parts():
            place = flat.own(flat.partial, self.group.index)
            if place:
                shards.setdefault(shard.dtype, []).append(shard[place.start : place.stop])
        return shards

    def clear(self) -> None:
        """Begin a new step."""
        self._written.clear()
        self._reduced.clear()
        self._begun.clear()
        self._owners.clear()
        self._touched.clear()
        self._finished = False
        for index, flat in self.flats.items():
            if flat.grad_shared:
                _free(self.buffers[flat.grad_home])
                _free(self.shards[index])

    def tensors(self) -> Iterable[Tensor]:
        """Return all tensors that store gradients, each only once."""
        yield from self.buffers.values()
        yield from (shard for index, shard in self.shards.items() if self.flats[index].grad_shared)

    def _open(self, index: int) -> bool:
        """Return whether gradients of a flat can be written to its buffer now."""
        flat = self.flats[index]
        if not self.active or (index in self._begun and not flat.grad_shared):
            return False
        return not flat.grad_shared or self._owners.get(flat.grad_home) == index

    def _hook(self, index: int, flat: Flat, parameters: Mapping[str, nn.Parameter]) -> None:
        for slot in flat.slots:
            place = self.whole(flat)[slot.start : slot.stop].view(slot.parameter.shape)
            parameter: Any = parameters[slot.parameter.name]
            buffer = self.buffers[flat.grad_home] if flat.grad_shared else None
            write = self._writer(slot.parameter.name, index, buffer, place)
            self._hooks.append((parameter, parameter.register_post_accumulate_grad_hook(write).id))

    def _writer(
        self, name: str, index: int, buffer: Tensor | None, place: Tensor
    ) -> Callable[[Tensor], None]:
        """Return a hook that adds a parameter's gradient to its place. `buffer` is given if its
        memory may be free. If the place is not open, the gradient stays with the parameter: the next
        one adds to it, or the end of the step (`add_late`).
        """

        def write(parameter: Tensor) -> None:
            is_linked = id(parameter) in LINKED
            LINKED.discard(id(parameter))
            if is_linked:
                self._keep_own(parameter)
                return
            if not self.holds(index):
                raise BridgeError(
                    f"{name}: got a gradient outside of its layer's turn, while its values are not whole;"
                    " use zero.stage 2, or return what the loss needs from the model"
                )
            gradient = gradient_of(parameter)
            if not self._open(index) or gradient is None:
                self._keep_own(parameter)
                return
            # Autograd's own gradient is freed at once, so that a whole second set of gradients
            # never stands.
            drop_gradient(parameter)
            if buffer is not None:
                _claim(buffer)
            self._touched.add(name)
            if name in self._written:
                place.add_(gradient)
            else:
                place.copy_(gradient)
                self._written.add(name)

        return write

    def _keep_own(self, parameter: Any) -> None:
        """Make it an error to read a gradient that is this rank's own until the end of the step."""
        if self.group.size > 1:
            hide_gradient(parameter, SLICE)
            self._withheld.append(parameter)

    def _reduce(self, index: int, flat: Flat) -> None:
        self._begun.add(index)
        if self._owners.get(flat.grad_home) == index:
            del self._owners[flat.grad_home]
        _claim(self.buffers[flat.grad_home])
        whole = self.whole(flat)
        self._zero_untouched(flat, whole)
        # The flat may be written again within the step, by another microbatch: its first
        # contribution is then copied.
        self._written.difference_update(slot.parameter.name for slot in flat.slots)
        self.comm.ledger.note(f"reduce {index} starts")
        self._pending[flat.grad_home] = index, self._start(index, flat, whole)

    def _start(self, index: int, flat: Flat, whole: Tensor) -> Wait:
        if self.share != 1:
            whole.mul_(self.share)
        message = whole.to(TORCH[flat.exchange])  # `whole` itself if the format is the same
        if not flat.sharded:
            wait = self.comm.all_reduce(REDUCE, message, self.group)
            return wait if message is whole else partial(_take, wait, whole, message)
        shard, first = self.shards[index], index not in self._reduced
        _claim(shard)
        self._reduced.add(index)
        # The first sum of a step can go straight into the slice. Later ones are added to it,
        # through a tensor of their own.
        if first and message is whole:
            return self.comm.reduce_scatter(REDUCE, shard, whole, self.group)
        part = torch.empty_like(shard, dtype=message.dtype)
        wait = self.comm.reduce_scatter(REDUCE, part, message, self.group)
        return partial(_take if first else _add, wait, shard, part)

    def _zero_untouched(self, flat: Flat, whole: Tensor) -> None:
        """Set to zero the elements of `whole` to which no gradient was written in this step: the
        padding, and the places of parameters without a gradient. These elements still have values
        of another stage or step.
        """
        if flat.padded > flat.size:  # a kernel takes its time for nothing, too
            whole[flat.size :].zero_()
        for slot in flat.slots:
            if slot.parameter.name not in self._written:
                whole[slot.start : slot.stop].zero_()

    def _settle(self, home: Home) -> None:
        index, wait = self._pending.pop(home)
        wait()
        self.comm.ledger.note(f"reduce {index} ends")

    def parts(self) -> Iterator[tuple[Flat, Tensor]]:
        """Yield each trainable flat with this rank's slice of its gradients. Raises an error
        outside a step.
        """
        for index, flat in self.flats.items():
            # To read freed memory ends the process.
            if not self.shards[index].untyped_storage().nbytes():
                raise BridgeError(
                    "gradients: found none outside a step; read them between backward and the update"
                )
            yield flat, self.shards[index]


def _claim(tensor: Tensor) -> bool:
    """Give memory to a tensor whose memory was freed, and so to all views of the tensor. Return
    whether memory had to be given; the values are then undefined.
    """
    if tensor.untyped_storage().nbytes():
        return False
    tensor.untyped_storage().resize_(tensor.nbytes)
    return True


def _free(tensor: Tensor) -> None:
    """Free the memory of a tensor that shares its storage only with its own views. These views can
    be used again after `_claim`.
    """
    tensor.untyped_storage().resize_(0)


def _take(wait: Wait, total: Tensor, part: Tensor) -> None:
    wait()
    total.copy_(part)


def _add(wait: Wait, total: Tensor, part: Tensor) -> None:
    wait()
    total.add_(part)
