"""Buffers: tensors in a model's state that no optimizer updates. A tensor that several modules
share has several names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from bridge.engine.training_state import TrainingState


def aliases(module: nn.Module) -> dict[str, str]:
    """Return, for every name of a tensor in a module's state, the first of all names of this
    tensor.
    """
    first: dict[int, str] = {id(weight): name for name, weight in module.named_parameters()}
    # The tensors themselves: otherwise each name gets a copy with another identity.
    tensors = module.state_dict(keep_vars=True)
    return {
        name: first.setdefault(id(tensor), name)
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor)
    }


def others(module: nn.Module) -> list[str]:
    """Return the names of values in a module's state that are not tensors."""
    return [
        name
        for name, value in module.state_dict(keep_vars=True).items()
        if not isinstance(value, Tensor)
    ]


def buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers in a module's state by name. A buffer with several names appears once,
    under its first name.
    """
    names = set(aliases(module).values())  # not persistent ones, which no state_dict has
    return {name: tensor for name, tensor in module.named_buffers() if name in names}


def owners(engine: TrainingState) -> dict[str, int]:
    """Return, for each buffer, the first pipeline rank that updates the buffer: the rank that runs
    the buffer's layer, or rank 0 if the buffer is in no layer.
    """
    module, homes = engine.model, engine.pipeline.schedule.homes
    users: dict[int, list[int]] = {}
    layers = engine.chain.layers
    for stage, members in enumerate(engine.pipeline.layers):
        for tensor in (tensor for index in members for tensor in layers[index].module.buffers()):
            users.setdefault(id(tensor), []).append(homes[stage])
    return {name: min(users.get(id(tensor), [0])) for name, tensor in buffers(module).items()}


def local_buffers(engine: TrainingState) -> Iterator[tuple[str, Tensor]]:
    """Yield, by name, each buffer whose pipeline rank in `owners` is the rank of this process."""
    homes = owners(engine)
    yield from (
        (name, tensor)
        for name, tensor in buffers(engine.model).items()
        if homes[name] == engine.line.index
    )


def digest(engine: TrainingState) -> int:
    """Return a digest of the buffers that `local_buffers` yields, a number below 2**63. Two ranks with the
    same bytes in these buffers get the same digest.
    """
    hasher = hashlib.blake2b(digest_size=8)
    for name, tensor in local_buffers(engine):
        hasher.update(name.encode())
        # numpy has no bf16, so the bytes are hashed.
        hasher.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    # Ranks exchange it as a signed 64-bit integer.
    return int.from_bytes(hasher.digest(), "little") >> 1


def whole(engine: TrainingState) -> Iterator[tuple[str, Tensor]]:
    """Yield every buffer of the model, by name, with the value on the first rank that updates it.
    All ranks must take part.
    """
    homes = owners(engine)
    for name, tensor in buffers(engine.model).items():
        value = tensor.detach().clone()
        engine.comm.broadcast("export buffers", value, engine.line, homes[name])()
        yield name, value


@torch.no_grad()
def restore(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy `values` into the buffers of `module`."""
    for name, tensor in buffers(module).items():
        tensor.copy_(values[name])
