"""Finds a parameter in an engine's flats, and reads and writes the whole parameter and its
optimizer state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bridge.engine.formats import TORCH
from bridge.engine.runner import Engine
from bridge.errors import BridgeError

PLACE = "_stagebridge_place"
EXPORT = "export parts"


class Place(NamedTuple):
    """Where a parameter is stored: the engine, the index of the flat in this engine, and the
    parameter's name.
    """

    engine: Callable[[], Engine | None]
    flat: int
    name: str

    def __reduce__(self) -> Any:
        """Leave the place out of a pickled parameter."""
        return bool, ()


def note(native: Engine) -> None:
    """Store in each parameter of `native` the parameter's `Place`."""
    for index, flat in enumerate(native.layout.flats):
        # By a weak reference where parameters have values of their own: a script may keep them longer
        # than the engine, whose buffers are to be freed.
        engine = partial(_itself, native) if in_turns(native, index) else weakref.ref(native)
        for slot in flat.slots:
            place = Place(engine, index, slot.parameter.name)
            setattr(native.gradients.parameters[slot.parameter.name], PLACE, place)


def _itself(native: Engine) -> Engine:
    return native


def take_back(model: nn.Module) -> None:
    """End the engines that hold parameters of `model`, and give the parameters their values back. All
    ranks must take part.
    """
    places = [place for weight in model.parameters() if (place := place_of(weight))]
    place_of_engine = {id(place[0]): place for place in reversed(places)}
    for native, _, name in place_of_engine.values():
        native.release(name)
        for weight in native.gradients.parameters.values():
            for key in [key for key in vars(weight) if key == PLACE or key.startswith("ds_")]:
                delattr(weight, key)


def place_of(weight: Tensor) -> tuple[Engine, int, str] | None:
    """Return the engine that holds a parameter, the index of the parameter's flat, and the
    parameter's name. Return None if no engine holds the parameter.
    """
    place: Place | None = getattr(weight, PLACE, None)
    engine = place.engine() if place else None
    return None if not place or engine is None else (engine, place.flat, place.name)


def in_turns(native: Engine, index: int) -> bool:
    """Return whether a flat shares its buffer with other flats. The parameters of such a flat are
    whole only while their layer runs.
    """
    flat = native.layout.flats[index]
    return flat.weight_shared and native.layout.stages > 1


def whole(native: Engine, index: int, name: str, shard: Tensor) -> Tensor:
    """Return a whole copy of the parameter `name` or of one of its optimizer states. `shard` is
    this rank's shard of the parameter's flat: weights, masters, gradients or one optimizer state.
    All data ranks must take part.
    """
    flat = native.layout.flats[index]
    # Data ranks hold equal slices of the padded flat: gathered in the order of ranks they are the
    # flat.
    if flat.sharded:
        values = torch.empty(flat.padded, dtype=shard.dtype, device=shard.device)
        native.comm.all_gather(EXPORT, values, shard.contiguous(), native.data)()
    else:
        values = shard
    slot = next(slot for slot in flat.slots if slot.parameter.name == name)
    return values[slot.start : slot.stop].view(slot.parameter.shape).clone()


@torch.no_grad()
def put(native: Engine, index: int, name: str, shard: Tensor, value: Tensor) -> None:
    """Copy the elements of `value` that this rank holds into `shard`, this rank's shard of the
    parameter's flat.
    """
    flat = native.layout.flats[index]
    for piece in flat.pieces(native.data.index):
        if piece.parameter.name == name:
            if tuple(value.shape) != tuple(piece.parameter.shape):
                raise BridgeError(
                    f"{name}: found a value of shape {tuple(value.shape)}, expected {tuple(piece.parameter.shape)}"
                )
            length = piece.stop - piece.start
            shard[piece.offset : piece.offset + length].copy_(
                value.detach().reshape(-1)[piece.start : piece.stop]
            )


def master(native: Engine, index: int, name: str) -> Tensor:
    """Return the whole master of a parameter."""
    native.weights.settle()
    return whole(native, index, name, native.weights.shards[index])


@torch.no_grad()
def set_masters(native: Engine, values: Sequence[tuple[int, str, Tensor]]) -> None:
    """Set the masters of several parameters, and set the weights in the compute format to the
    rounded values. Each entry of `values` has the index of the flat, the parameter's name and the
    value. All data ranks must take part.
    """
    native.weights.settle()
    for index, name, value in values:
        put(native, index, name, native.weights.shards[index], value)
    indices = sorted({index for index, _, _ in values})
    # Whole weights that are held now are of the old values: they are dropped, and made again from
    # the masters.
    native.weights.residency.drop(indices)
    native.weights._renew(indices)
    native.weights.settle()


def compute_parameter(native: Engine, index: int, name: str) -> Tensor:
    """Return a whole parameter in the compute format."""
    return master(native, index, name).to(TORCH[native.layout.flats[index].dtype])


def trainable_index(native: Engine, index: int) -> int:
    """Return the index of a flat among the flats that are trained. Raises `BridgeError` for a
    frozen flat.
    """
    flats = native.weights.trainable_flats()
    if index not in flats:
        raise BridgeError(
            f"{native.layout.flats[index].slots[0].parameter.name}: this parameter is frozen, so"
            " the optimizer has no state for it; ask only for trained parameters"
        )
    return flats.index(index)


def moment(native: Engine, index: int, key: str) -> Tensor:
    """Return this rank's shard of a flat's optimizer state `key`, such as `exp_avg`."""
    state = native.optimizer.state(trainable_index(native, index))
    if key not in state:
        raise BridgeError(
            f"optimizer state: found no {key!r}, expected one of {', '.join(state) or 'none'}"
        )
    return state[key]


def gradient_unit(native: Engine) -> float:
    """Return the factor that turns reduced gradients into those that DeepSpeed shows: of the mean loss,
    and with ZeRO times the loss scale (utils/tensor_fragment.py: safe_get_full_grad).
    """
    return native.mean_unit * (native.scaler.scale if native.plan.zero.effective_stage else 1)


def gradient(native: Engine, index: int) -> Tensor | None:
    """Return this rank's shard of a flat's reduced gradients; None if the flat is frozen, or without
    ZeRO if no microbatch of the step has run. Raises `BridgeError` then with ZeRO, and in the middle
    of a step.
    """
    if index not in native.gradients.shards:
        return None
    if not native.microbatch:
        if not native.plan.zero.effective_stage:
            return None
        raise BridgeError(
            "gradients: found no microbatch of the next step, and those of the last step are gone; read"
            " and change them after the last backward of a step and before step; where a library calls both,"
            " as accelerate does, register a hook on the parameter instead"
        )
    if not native.is_gradient_accumulation_boundary():
        raise BridgeError(
            f"gradients: found {native.microbatch} of {native.accumulation} microbatches of the"
            " step; the engine reduces gradients with the last microbatch; read them after the"
            " last backward of a step and before step"
        )
    native.take_gradients_back()
    native.gradients.finish()
    return native.gradients.shards[index]
