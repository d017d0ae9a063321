"""The state of each parameter on this rank, in any of Megatron's optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

NOTHING = slice(0, 0)
"""The empty range: this rank keeps no elements of the parameter."""


@dataclass(frozen=True)
class States:
    """Reads the state of an `optimizer` of `get_megatron_optimizer`.

    Each tensor of state has one dimension. It has the elements of the parameter in the range `elements_of`.
    """

    optimizer: Any
    chunks: Sequence[Any] = ()

    @property
    def part(self) -> Any:
        """The optimizer of all parameters but those of experts."""
        return self.optimizer.chained_optimizers[0]

    @property
    def sharded(self) -> bool:
        """Whether data ranks keep the state of different elements, as in the distributed optimizer."""
        return bool(self.part.config.use_distributed_optimizer)

    def elements_of(self, weight: nn.Parameter) -> slice:
        """Return the range of a parameter's elements whose optimizer state this rank keeps."""
        if not self.sharded:
            return slice(0, weight.numel())
        if weight not in self.part.model_param_gbuf_map:
            return NOTHING
        span = self.part._get_model_param_range_map(weight)["param"]
        return slice(span.start, span.end)

    def gradient(self, weight: nn.Parameter) -> Tensor:
        """Return the reduced gradient of the elements that this rank owns."""
        gradient: Tensor = weight.main_grad  # type: ignore[attr-defined]
        return gradient.view(-1)[self.elements_of(weight)]

    def master(self, weight: nn.Parameter) -> Tensor:
        """Return the elements that this rank owns, in the precision that the optimizer updates."""
        tensor: Tensor = self._states(weight)["param"]
        return tensor.detach().view(-1)

    def moments(self, weight: nn.Parameter) -> Mapping[str, Tensor]:
        """Return the optimizer state for the elements that this rank owns, by name. Master weights
        and scalars such as step counts are left out.
        """
        return {
            name: value.view(-1)
            for name, value in self._states(weight).items()
            if name != "param" and is_state(value)
        }

    def _states(self, weight: nn.Parameter) -> Mapping[str, Any]:
        if self.elements_of(weight) == NOTHING:
            nothing = torch.empty(0, device=weight.device)
            return {"param": nothing, **dict.fromkeys(self._names, nothing)}
        if self.sharded:
            states: Mapping[str, Any] = self.part._get_main_param_and_optimizer_states(weight)
            return states
        main = getattr(weight, "main_param", weight)
        return {"param": main, **self.part.state.get(main, {})}

    @property
    def _names(self) -> list[str]:
        """The names of the optimizer's state, read from the first parameter that has any."""
        states = (state for state in self.part.state.values() if state)
        return [name for name, value in next(states, {}).items() if is_state(value)]

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """Yield all masters and moments."""
        for group in self.optimizer.param_groups:
            yield from group["params"]
        for part in self.optimizer.chained_optimizers:
            for state in part.state.values():
                yield from filter(is_state, state.values())

    def weights(self) -> Iterator[Tensor]:
        """Yield the memory of the weights that the model computes with."""
        for chunk in self.chunks:
            yield from chunk.parameters()

    def gradients(self) -> Iterator[Tensor]:
        """Yield the memory of the gradients."""
        yield from (buffer.grad_data for chunk in self.chunks for buffer in chunk.buffers)

    def fill_shape(self, weight: nn.Parameter, shard: Tensor) -> Tensor:
        """Return a tensor with the shape of the parameter. It has `shard` at the elements that this
        rank owns, and zeros elsewhere.
        """
        whole = torch.zeros(weight.shape, dtype=shard.dtype, device=weight.device)
        whole.view(-1)[self.elements_of(weight)] = shard
        return whole


def is_state(value: Any) -> bool:
    """Whether an entry of the state is a tensor with a value for each element."""
    return isinstance(value, Tensor) and value.dim() > 0
