"""Megatron-FSDP, which shards gradients and weights: its wrapper, what it keeps of each parameter, and how it runs on CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compat.megatron.runtime.cpu import CPU, INDEX
from compat.megatron.runtime.states import NOTHING, is_state


def wrapped(config: Any, ddp: Any, parts: list[nn.Module]) -> list[Any]:
    """Parts of the model as training wraps them."""
    from megatron.core.distributed import FullyShardedDataParallel

    device = {} if torch.cuda.is_available() else {"device": CPU}
    with (
        nullcontext()
        if torch.cuda.is_available()
        else patch.object(torch.cuda, "current_device", lambda: INDEX)
    ):
        return [
            FullyShardedDataParallel(config, ddp, part, disable_bucketing=index > 0, **device)
            for index, part in enumerate(parts)
        ]


class Shards:
    """What is kept of each parameter on this rank; the interface of `States`."""

    sharded = True

    def __init__(self, optimizer: Any, chunks: list[Any]) -> None:
        self.optimizer = optimizer
        self._places: dict[nn.Parameter, tuple[Any, int]] = {}
        self._kept: dict[nn.Parameter, Tensor] = {}
        for buffers in (chunk.param_and_grad_buffer for chunk in chunks):
            names = {name: weight for weight, name in buffers.param_to_name.items()}
            self._kept.update(
                {names[name]: kept for name, kept in buffers.optimizer_named_parameters}
            )
            for group in buffers.parameter_groups:
                self._places.update(
                    {weight: (group, number) for number, weight in enumerate(group.params)}
                )

    @property
    def part(self) -> Any:
        """The optimizer of all parameters but those of experts."""
        return self._optimizers[0]

    @property
    def _optimizers(self) -> list[Any]:
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

    def owned(self, weight: nn.Parameter) -> slice:
        """The elements of a parameter of which this rank keeps state."""
        group, number = self._places[weight]
        start, end = self._masters(group).locate_item_in_global_item(number)
        return slice(start, end) if end > start else NOTHING

    def gradient(self, weight: nn.Parameter) -> Tensor:
        """Its gradient once data ranks have reduced it."""
        group, number = self._places[weight]
        found: Tensor = group.main_grad_buffer.get_item(number, only_shard=True)
        return found.view(-1)

    def master(self, weight: nn.Parameter) -> Tensor:
        """What the optimizer updates."""
        group, number = self._places[weight]
        found: Tensor = self._masters(group).get_item(number, only_shard=True)
        return found.detach().view(-1)

    def moments(self, weight: nn.Parameter) -> Mapping[str, Tensor]:
        """Its other state, by the optimizer's names; numbers such as counts of steps left out."""
        states = (part.optimizer.state.get(self._kept[weight], {}) for part in self._optimizers)
        found: Mapping[str, Any] = next(filter(None, states), {})
        # Of a state that is a DTensor, `_local_tensor` is this rank's part.
        return {
            name: getattr(value, "_local_tensor", value).view(-1)
            for name, value in found.items()
            if is_state(value)
        }

    def kept(self) -> Iterator[Tensor]:
        """All masters and moments."""
        for weight in self._places:
            yield self.master(weight)
            yield from self.moments(weight).values()

    def filled(self, weight: nn.Parameter, kept: Tensor) -> Tensor:
        """In the shape of the parameter: what is kept of it, and zeros where other ranks keep it."""
        found = torch.zeros(weight.shape, dtype=kept.dtype, device=kept.device)
        found.view(-1)[self.owned(weight)] = kept
        return found

    def weights(self) -> Iterator[Tensor]:
        """What is held of the weights that compute."""
        yield from (
            group.model_weight_buffer.data for group in self._groups() if group.model_weight_buffer
        )

    def gradients(self) -> Iterator[Tensor]:
        """What is held of gradients."""
        yield from (
            group.main_grad_buffer.data for group in self._groups() if group.main_grad_buffer
        )

    def _groups(self) -> list[Any]:
        return list({id(group): group for group, _ in self._places.values()}.values())

    @staticmethod
    def _masters(group: Any) -> Any:
        """The buffer that the optimizer updates: that of the weights themselves where they are kept in fp32."""
        return group.main_weight_buffer or group.model_weight_buffer


class _Done:
    """A collective that has ended."""

    def wait(self) -> None:
        """It has."""


def _finished(
    start: Callable[..., Any], *tensors: Any, async_op: bool = False, **more: Any
) -> _Done:
    start(*tensors, **more)
    return _Done()


@contextmanager
def _one_by_one(group: Any, device: Any = None, async_ops: bool = False) -> Iterator[_Done]:
    """Collectives that NCCL would send together, each to its end: gloo has none that are sent so."""
    with patch.object(
        dist, "all_gather_into_tensor", partial(_finished, dist.all_gather_into_tensor)
    ):
        yield _Done()


def _scaled(gradient: Tensor, factor: float | None, ddp: Any) -> Any:
    """A product and a sum, for which NCCL has one operation and gloo none."""
    if factor is not None:
        gradient.mul_(factor)
    return dist.ReduceOp.SUM


class _Stream:
    """Work on a CPU is done once it is asked for: there is nothing to wait for."""

    def wait_stream(self, other: Any) -> None:
        """Nothing is under way."""

    def record_event(self, event: Any = None) -> _Done:
        """An event that has been."""
        return _Done()


def redirected() -> AbstractContextManager[Any]:
    """While inside, what Megatron-FSDP asks of NCCL and of CUDA's streams is done by gloo, in order."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    stack, here = ExitStack(), _Stream()
    stack.enter_context(
        patch.multiple(
            param_and_grad_buffer,
            _coalescing_manager=_one_by_one,
            gradient_reduce_preprocessing=_scaled,
        )
    )
    stack.enter_context(
        patch.multiple(
            torch.cuda,
            Stream=_Stream,
            current_stream=lambda: here,
            stream=lambda stream: nullcontext(),
            empty_cache=lambda: None,
        )
    )
    return stack
