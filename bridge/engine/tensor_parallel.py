"""Tensor and sequence parallelism: layers split over a group of ranks, the collectives between them, and a model's conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F
from torch.utils._pytree import register_dataclass

from bridge.comm import Comm, Group
from bridge.errors import ConfigError
from bridge.layout.tensor import TensorPlan, cut, matches

TOKENS = 1
"""The dimension that sequence parallelism splits: activations are (batch, tokens, features)."""

SUM = "sum activations"
SUM_BACKWARD = "sum input gradients"
GATHER_TOKENS = "gather tokens"
SCATTER_TOKENS = "scatter tokens"


@dataclass(frozen=True)
class Split:
    """The tensor group of this rank, and whether activations between split layers are split by tokens."""

    comm: Comm
    group: Group
    sequence: bool

    def sum(self, name: str, tensor: Tensor) -> Tensor:
        """Sum of `tensor` over the group, in a new tensor."""
        total = tensor.contiguous().clone()
        self.comm.all_reduce(name, total, self.group)()
        return total

    def gather(self, tensor: Tensor) -> Tensor:
        """Token slices of all ranks, put together."""
        moved = tensor.transpose(0, TOKENS).contiguous()
        whole = moved.new_empty(len(moved) * self.group.size, *moved.shape[1:])
        self.comm.all_gather(GATHER_TOKENS, whole, moved, self.group)()
        return whole.transpose(0, TOKENS)

    def scatter_sum(self, tensor: Tensor) -> Tensor:
        """This rank's token slice of the sum of `tensor` over the group."""
        moved = tensor.transpose(0, TOKENS).contiguous()
        part = moved.new_empty(len(moved) // self.group.size, *moved.shape[1:])
        self.comm.reduce_scatter(SCATTER_TOKENS, part, moved, self.group)()
        return part.transpose(0, TOKENS)

    def slice(self, tensor: Tensor) -> Tensor:
        """This rank's token slice of `tensor`, which all ranks hold alike."""
        length = tensor.shape[TOKENS]
        if length % self.group.size:
            raise ConfigError(
                f"parallel.sequence: {length} tokens do not divide into {self.group.size} tensor ranks; pad the"
                " sequences to a multiple, or turn sequence parallelism off"
            )
        return tensor.narrow(TOKENS, self.group.index * length // self.group.size, length // self.group.size)


class _Enter(torch.autograd.Function):
    """Into a split layer: the same input on all ranks, whose gradients have to be summed."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, split: Split) -> Tensor:
        context.split = split
        return split.gather(inputs) if split.sequence else inputs.view_as(inputs)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        split: Split = context.split
        return split.scatter_sum(gradient) if split.sequence else split.sum(SUM_BACKWARD, gradient), None


class _Leave(torch.autograd.Function):
    """Out of a split layer: the sum of what ranks hold."""

    @staticmethod
    def forward(context: Any, outputs: Tensor, split: Split) -> Tensor:
        context.split = split
        return split.scatter_sum(outputs) if split.sequence else split.sum(SUM, outputs)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        split: Split = context.split
        return split.gather(gradient) if split.sequence else gradient, None


class _Scatter(torch.autograd.Function):
    """From whole sequences, the same on all ranks, to slices of tokens."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, split: Split) -> Tensor:
        context.split = split
        return split.slice(inputs).contiguous()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        found: Tensor = context.split.gather(gradient)
        return found, None


class _CrossEntropy(torch.autograd.Function):
    """Losses of tokens from logits (tokens, local vocabulary) of which each rank holds a part."""

    @staticmethod
    def forward(context: Any, logits: Tensor, targets: Tensor, split: Split, start: int) -> Tensor:
        largest = logits.amax(-1)
        split.comm.all_reduce("largest logit", largest, split.group, "max")()
        shifted = logits - largest[:, None]
        local = targets - start
        here = (local >= 0) & (local < logits.shape[-1])
        places = local.where(here, 0)
        chosen = shifted.gather(-1, places[:, None])[:, 0] * here
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(-1), chosen])
        split.comm.all_reduce("sum logits", sums, split.group)()
        context.save_for_backward(exponentials.div_(sums[0][:, None]), places, here)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        shares, places, here = context.saved_tensors
        found = shares * gradient[:, None]
        found.scatter_add_(-1, places[:, None], -(gradient * here)[:, None])
        return found, None, None, None


class Entrance:
    """The way into split layers that take the same input, so that it is gathered, and its gradient summed, once for all."""

    def __init__(self, split: Split) -> None:
        self.split, self.users, self._left = split, 0, 0
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        if self._last is None or self._last[0] is not inputs:
            self._last, self._left = (inputs, _enter(inputs, self.split)), self.users
        entered, self._left = self._last[1], self._left - 1
        if self._left == 0:
            self._last = None
        return entered


class ColumnLinear(nn.Module):
    """Linear layer split by output features: whole input, this rank's part of the output."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, entrance: Entrance) -> None:
        super().__init__()
        self.weight, self.bias, self._entrance = weight, bias, entrance
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        entrance.users += 1

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., in) to (..., out / ranks)."""
        return F.linear(self._entrance(inputs), self.weight, self.bias)


class RowLinear(nn.Module):
    """Linear layer split by input features: this rank's part of the input, whole output. The bias is added once."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, split: Split) -> None:
        super().__init__()
        self.weight, self.bias, self._split = weight, bias, split
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., in / ranks) to (..., out)."""
        total = _leave(F.linear(inputs, self.weight), self._split)
        return total if self.bias is None else total + self.bias


@dataclass(frozen=True)
class SplitLogits:
    """Logits (..., local vocabulary) of which this rank holds the part that begins at `start`."""

    local: Tensor
    split: Split
    start: int

    def losses(self, targets: Tensor, ignored: int) -> Tensor:
        """Cross entropy of each token (flattened); 0 where the target is `ignored`."""
        flat, kept = targets.flatten(), targets.flatten() != ignored
        logits = self.local.flatten(0, -2)
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        found: Tensor = _cross_entropy(exact, flat.where(kept, 0), self.split, self.start)
        return found * kept


register_dataclass(SplitLogits, field_names=["local"], drop_field_names=["split", "start"])
