"""Megatron-FSDP, which shards gradients and weights: its wrapper, its optimizer state by parameter,
and its redirection to the CPU."""

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


def wrap_chunks(config: Any, ddp: Any, parts: list[nn.Module]) -> list[Any]:
    """Wrap the model chunks as Megatron's training does."""
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


def _shard(buffer: Any, number: int) -> Tensor:
    shard: Tensor = buffer.get_item(number, only_shard=True)
    return shard.view(-1)


class Shards:
    """Optimizer state, gradients and weights on this rank, with the interface of `States`."""

    sharded = True

    def __init__(self, optimizer: Any, chunks: list[Any]) -> None:
        self.optimizer = optimizer
        self._places: dict[nn.Parameter, tuple[Any, int]] = {}
        self._kept: dict[nn.Parameter, Tensor] = {}
        for buffers in (chunk.param_and_grad_buffer for chunk in chunks):
            names = {name: weight for weight, name in buffers.param_to_name.items()}
            self._kept.update(
                {names[name]: shard for name, shard in buffers.optimizer_named_parameters}
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

    def elements_of(self, weight: nn.Parameter) -> slice:
        """Return the range of a parameter's elements whose optimizer state this rank keeps."""
        group, number = self._places[weight]
        start, end = self._masters(group).locate_item_in_global_item(number)
        return slice(start, end) if end > start else NOTHING

    def gradient(self, weight: nn.Parameter) -> Tensor:
        """Return the reduced gradient of the elements that this rank owns."""
        group, number = self._places[weight]
        return _shard(group.main_grad_buffer, number)

    def master(self, weight: nn.Parameter) -> Tensor:
        """Return the elements that this rank owns, in the precision that the optimizer updates."""
        group, number = self._places[weight]
        return _shard(self._masters(group), number).detach()

    def moments(self, weight: nn.Parameter) -> Mapping[str, Tensor]:
        """Return the optimizer state for the elements that this rank owns, by name. Scalars such as
        step counts are left out.
        """
        states = (part.optimizer.state.get(self._kept[weight], {}) for part in self._optimizers)
        state: Mapping[str, Any] = next(filter(None, states), {})
        # Of a state that is a DTensor, `_local_tensor` is this rank's part.
        return {
            name: getattr(value, "_local_tensor", value).view(-1)
            for name, value in state.items()
            if is_state(value)
        }

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """Yield all masters and moments."""
        for weight in self._places:
            yield self.master(weight)
            yield from self.moments(weight).values()

    def fill_shape(self, weight: nn.Parameter, shard: Tensor) -> Tensor:
        """Return a tensor with the shape of the parameter. It has `shard` at the elements that this
        rank owns, and zeros elsewhere.
        """
        whole = torch.zeros(weight.shape, dtype=shard.dtype, device=shard.device)
        whole.view(-1)[self.elements_of(weight)] = shard
        return whole

    def weights(self) -> Iterator[Tensor]:
        """Yield the memory of the weights that the model computes with."""
        yield from (
            group.model_weight_buffer.data for group in self._groups() if group.model_weight_buffer
        )

    def gradients(self) -> Iterator[Tensor]:
        """Yield the memory of the gradients."""
        yield from (
            group.main_grad_buffer.data for group in self._groups() if group.main_grad_buffer
        )

    def _groups(self) -> list[Any]:
        return list({id(group): group for group, _ in self._places.values()}.values())

    @staticmethod
    def _masters(group: Any) -> Any:
        """Return the buffer that the optimizer updates. Without master weights it is the buffer of
        the weights.
        """
        return group.main_weight_buffer or group.model_weight_buffer


class _Done:
    """The handle of a collective that has already ended."""

    def wait(self) -> None:
        """Return at once."""


def _finish_at_once(
    start: Callable[..., Any], *tensors: Any, async_op: bool = False, **more: Any
) -> _Done:
    start(*tensors, **more)
    return _Done()


@contextmanager
def _one_by_one(group: Any, device: Any = None, async_ops: bool = False) -> Iterator[_Done]:
    """Context manager that runs collectives one after the other. NCCL would send them together,
    which gloo cannot do.
    """
    with patch.object(
        dist, "all_gather_into_tensor", partial(_finish_at_once, dist.all_gather_into_tensor)
    ):
        yield _Done()


def _scale_gradient(gradient: Tensor, factor: float | None, ddp: Any) -> Any:
    """Scale the gradient, and return the reduce operation `SUM`. NCCL has one operation that scales
    and sums, gloo has none.
    """
    if factor is not None:
        gradient.mul_(factor)
    return dist.ReduceOp.SUM


class _Stream:
    """A stand-in for a CUDA stream. Work on the CPU is synchronous, so no stream ever waits."""

    def wait_stream(self, other: Any) -> None:
        """Return at once."""

    def record_event(self, event: Any = None) -> _Done:
        """Return an event that counts as finished at once."""
        return _Done()


def redirect_collectives() -> AbstractContextManager[Any]:
    """Context manager in which gloo runs Megatron-FSDP's collectives one by one, without CUDA's
    streams.
    """
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    stack, here = ExitStack(), _Stream()
    stack.enter_context(
        patch.multiple(
            param_and_grad_buffer,
            _coalescing_manager=_one_by_one,
            gradient_reduce_preprocessing=_scale_gradient,
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
