"""Weights: the whole buffers with which stages compute, the slices that this rank owns, and gathers
from slices into buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from bridge.engine.absence import NAME, change, state_of
from bridge.engine.comm import Comm, Wait
from bridge.engine.formats import TORCH
from bridge.errors import BridgeError
from bridge.layout.residency import Residency
from bridge.layout.shard import Flat, FlatPiece, Layout, Slot
from bridge.layout.traffic import GATHER

EXPORT = "export weights"
SAMPLE = 256
"""How many elements of a slice are looked at to find weights that a script wrote past the engine."""
_APART = (
    "the script or the model wrote into this weight, but the engine keeps its own values apart, which the"
    " next layer or step would bring back; call safe_set_full_fp32_param(weight, value), or use zero.stage 0"
    " with weights in fp32"
)


class Weights:
    """The flat weights of one rank. Parameters of the model are views of whole buffers. The
    optimizer updates the masters, which are slices.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Mapping[str, nn.Parameter],
        comm: Comm,
        device: torch.device,
    ) -> None:
        self.layout, self.comm, self.group = layout, comm, comm.group("data")
        self.buffers = {
            home: torch.zeros(size, dtype=TORCH[home.dtype], device=device)
            for home, size in layout.homes("weight").items()
        }
        # The owned slice, in the master format: part of the whole buffer itself if it keeps both
        # its content and its format.
        self.shards: list[Tensor] = []
        for flat in layout.flats:
            if flat.master_is_weight:
                self.shards.append(self.shard_of(flat))
            else:
                self.shards.append(torch.zeros(flat.shard, dtype=TORCH[flat.master], device=device))
        self.residency = Residency(layout)
        self._pending: dict[int, Wait] = {}
        # Parameters that share their buffer with those of other stages, by the index of their flat.
        self._turns: dict[int, list[nn.Parameter]] = {}
        self._shown, self._writes = set[int](), dict[int, bool]()
        self._parameters = parameters
        self._seen: dict[str, tuple[int, int]] = {}
        self._adopt(parameters)

    def whole(self, flat: Flat) -> Tensor:
        """Return the buffer with all weights of `flat`, padding included. The values are valid only
        if the flat is in its buffer now.
        """
        return self.buffers[flat.weight_home][: flat.padded]

    def shard_of(self, flat: Flat) -> Tensor:
        """Return this rank's slice of the buffer of `flat`."""
        elements = flat.elements_of(self.group.index)
        return self.whole(flat)[elements.start : elements.stop]

    def require(self, stage: int, following: Sequence[int] = ()) -> None:
        """Wait until the weights of `stage` are whole. Start gathers for the stages `following` as
        well, as far as buffers are free.
        """
        self._look_back()
        if not self.residency.full:
            for index in self.residency.due((stage, *following)):
                self._gather(index)
        flats = self.residency.flats_for_stage(stage)
        for index in flats:
            self._settle(index)
        self._show(flats)

    @property
    def in_turns(self) -> bool:
        """Whether some parameters are whole only while their stage runs."""
        return bool(self._turns)

    def takes_turns(self, index: int) -> bool:
        """Return whether the parameters of a flat are whole only while their stage runs."""
        return index in self._turns

    def hide(self) -> None:
        """Let no parameter be read whose flat shares a buffer with another stage."""
        self._look_back()
        self._show(())

    def _look_back(self) -> None:
        """Take over what was written into the parameters that can be read now, before another stage gets
        their buffers. What comes past the watch, as through `data`, is looked for in the first forward pass.
        """
        self.take_over(self._shown)
        for index in self._shown:
            if not self._writes.get(index, True):
                continue
            flat, shard = self.layout.flats[index], self.shards[index]
            if flat.master != flat.dtype:
                self._refuse_rewritten(index)
            elif not torch.equal(self.shard_of(flat), shard):
                shard.copy_(self.shard_of(flat))
                self._writes[index] = True
            if torch.is_grad_enabled():
                self._writes.setdefault(index, False)

    def _show(self, indices: Iterable[int]) -> None:
        """Let the parameters of these flats be read, and those of all other flats that share a buffer
        with another stage not.
        """
        visible = set(indices) & self._turns.keys()
        for index in self._shown ^ visible:
            for parameter in self._turns[index]:
                if state_of(parameter) != "linked":
                    change(parameter, None if index in visible else "absent")
                    self.watch(parameter, index in visible)
        self._shown = visible

    def watch(self, parameter: nn.Parameter, watches: bool = True) -> None:
        """Let `take_over` see what the script writes into a parameter from now on, or nothing any more."""
        name = getattr(parameter, NAME)
        self._seen.pop(name, None)
        if watches:
            self._seen[name] = parameter.data_ptr(), parameter._version

    def take_over(self, indices: Iterable[int] | None = None) -> None:
        """Take over what the script wrote into parameters of these flats (default: all) since they were
        watched, or gave them as values. Raises `BridgeError` if the master weights, which are apart, or
        the number format are not those of what was written.
        """
        for index in range(len(self.shards)) if indices is None else indices:
            for slot in self.layout.flats[index].slots:
                parameter = self._parameters[slot.parameter.name]
                seen = self._seen.get(slot.parameter.name)
                if seen and seen != (parameter.data_ptr(), parameter._version):
                    self._take_over(index, slot, parameter)

    def _take_over(self, index: int, slot: Slot, parameter: nn.Parameter) -> None:
        flat, name = self.layout.flats[index], slot.parameter.name
        view = self.whole(flat)[slot.start : slot.stop].view(slot.parameter.shape)
        if (parameter.dtype, parameter.shape) != (view.dtype, view.shape):
            raise BridgeError(
                f"{name}: found {parameter.dtype} of shape {tuple(parameter.shape)}, expected {view.dtype} of shape"
                f" {tuple(view.shape)} as in initialize; convert the model before that"
            )
        if flat.master != flat.dtype:
            raise BridgeError(f"{name}: {_APART}")
        self._load(flat, self.shards[index], {name: parameter})
        parameter.data = view
        self.watch(parameter)

    def refuse_rewritten(self) -> None:
        """Raise `BridgeError` if something wrote past the watch, as through `data`, into weights with a
        buffer of their own and masters apart. A few elements of each slice are looked at.
        """
        for index in self.trainable_flats():
            flat = self.layout.flats[index]
            if flat.master != flat.dtype and not flat.weight_shared:
                self._refuse_rewritten(index)

    def _refuse_rewritten(self, index: int) -> None:
        flat, shard = self.layout.flats[index], self.shards[index]
        step = max(len(shard) // SAMPLE, 1)
        own = self.shard_of(flat)[::step]
        if bool(((own != shard[::step].to(own.dtype)) & (own == own)).any()):
            raise BridgeError(f"{flat.slots[0].parameter.name} or a weight behind it: {_APART}")

    def refresh(self) -> None:
        """After an update, mark all trained weights as out of date. Flats with a buffer of their
        own are gathered at once, all others when a stage needs them.
        """
        flats = self.trainable_flats()
        self.residency.drop(flats)
        self._renew(flats)

    def _renew(self, indices: Iterable[int]) -> None:
        for index in indices:
            if not self.layout.flats[index].weight_shared:
                self.residency.hold(index)
                self._gather(index)

    def reload(self) -> None:
        """Mark all weights as out of date, including frozen ones, after slices were set from
        outside. Flats with a buffer of their own are gathered at once.
        """
        self.settle()
        everything = range(len(self.layout.flats))
        self.residency.drop(everything)
        self._renew(everything)
        self.settle()  # a script may read weights before the next step

    def settle(self) -> None:
        """Wait until all gathers that were started have ended, and take over what the script wrote."""
        self.take_over()
        for index in tuple(self._pending):
            self._settle(index)

    def trainable_flats(self) -> list[int]:
        """Return the indices of the flats that the optimizer updates, in its order."""
        return [index for index, flat in enumerate(self.layout.flats) if flat.trainable]

    def masters(self) -> list[Tensor]:
        """Return this rank's slice of each trainable flat, in the format of the master weights. The
        optimizer updates these slices.
        """
        return [shard for flat, shard in self._each() if flat.trainable]

    def pieces(self) -> list[list[FlatPiece]]:
        """Return, for each slice in `masters`, the parts of parameters in it."""
        return [list(flat.pieces(self.group.index)) for flat in self.layout.flats if flat.trainable]

    def masters_apart(self) -> Iterable[Tensor]:
        """Return the masters that are stored outside the weight buffers."""
        return self._beside("master")

    def local_buffers(self) -> Iterable[Tensor]:
        """Yield all whole buffers, and the slices of frozen flats that are stored outside them."""
        yield from self.buffers.values()
        yield from self._beside("weights")

    def _beside(self, kind: str) -> Iterable[Tensor]:
        """Return this rank's slices that count as `kind` ("weights" or "master"), without slices
        that are part of a whole buffer.
        """
        return (
            shard
            for flat, shard in self._each()
            if not flat.master_is_weight and flat.accounting_kind == kind
        )

    def whole_master(self, index: int) -> Tensor:
        """Return a copy of the whole of flat number `index`, in the format of its slices. All data
        ranks must take part.
        """
        flat, shard = self.layout.flats[index], self.shards[index]
        if not flat.sharded:
            return shard.clone()
        # Frozen weights in a buffer of their own are always whole, as no update makes them out of
        # date.
        if flat.master_is_weight and not flat.trainable:
            return self.whole(flat).clone()
        whole = torch.empty(flat.padded, dtype=shard.dtype, device=shard.device)
        self.comm.all_gather(EXPORT, whole, shard, self.group)()
        return whole

    def _each(self) -> Iterable[tuple[Flat, Tensor]]:
        return zip(self.layout.flats, self.shards, strict=True)

    def _adopt(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copy the values of the parameters into buffers and slices, and then make the parameters
        views of the buffers.
        """
        for index, flat in enumerate(self.layout.flats):
            self._load(flat, self.shards[index], parameters)
            if not flat.weight_shared:
                self.residency.hold(index)
            # Views of flats that share a buffer overlap. Only the one that the residency names has
            # its values there.
            for slot in flat.slots:
                view = self.whole(flat)[slot.start : slot.stop].view(slot.parameter.shape)
                parameter = parameters[slot.parameter.name]
                parameter.data = view
                setattr(parameter, NAME, slot.parameter.name)
                if flat.weight_shared and self.layout.stages > 1:
                    self._turns.setdefault(index, []).append(parameter)
                    change(parameter, "absent")
                else:
                    self.watch(parameter)

    @torch.no_grad()
    def _load(self, flat: Flat, shard: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
        for slot in flat.slots:
            if slot.parameter.name in parameters:
                self.whole(flat)[slot.start : slot.stop].copy_(
                    parameters[slot.parameter.name].reshape(-1)
                )
        # From the parameter, and not from the buffer: the buffer may have fewer digits than the
        # master.
        for piece in flat.pieces(self.group.index):
            if piece.parameter.name in parameters:
                values = parameters[piece.parameter.name].reshape(-1)[piece.start : piece.stop]
                shard[piece.offset : piece.offset + len(values)].copy_(values)

    @torch.no_grad()
    def _gather(self, index: int) -> None:
        flat, shard = self.layout.flats[index], self.shards[index]
        # A gather into the same buffer may be under way that nobody waited for: its stage was
        # looked ahead to, and not run.
        for other in tuple(self._pending):
            if self.layout.flats[other].weight_home == flat.weight_home:
                self._settle(other)
        own = self.shard_of(flat)
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)  # casts from the master to the format of compute
        if flat.sharded:
            self.comm.ledger.note(f"gather {index} starts")
            self._pending[index] = self.comm.all_gather(GATHER, self.whole(flat), own, self.group)

    def _settle(self, index: int) -> None:
        wait = self._pending.pop(index, None)
        if wait is not None:
            wait()
            self.comm.ledger.note(f"gather {index} ends")
