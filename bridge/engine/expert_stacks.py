"""Stacks of experts over tensor ranks: each rank holds some of a stack's experts, and the outputs
of all ranks are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from bridge.engine.tensor_parallel import Conversion, Split, apply
from bridge.layout.tensor import Site, cut_range
from bridge.layout.traffic import SUM, SUM_BACKWARD


def attach(conversion: Conversion) -> None:
    """Reduce each stack of experts in the tensor plan to the experts of this rank, and record the
    points at which ranks sum activations.
    """
    # Tokens that are split for the model are put together before a block's experts.
    tokens = conversion.plan.tokens is not None
    split = conversion.alone
    enter, leave = Site.ends(whole=tokens)
    for stack in conversion.plan.experts:
        module = conversion.model.get_submodule(stack.name)
        part = cut_range(stack.count, split.group.size, split.group.index)
        keep(
            module,
            {name: conversion.cut_along(weight, 0) for name, weight in module.named_parameters()},
            part,
        )
        _Experts(module, split, part)
        conversion.sites += [
            Site(stack.name, enter, stack.width),
            Site(stack.name, enter, stack.choices, exact=True),
            Site(stack.name, leave, stack.width),
        ]


def keep(module: nn.Module, weights: Mapping[str, nn.Parameter], part: range) -> None:
    """Keep only the experts of a stack whose indices are in `part`."""
    for name in counts(module):
        setattr(module, name, len(part))
    for name, weight in weights.items():
        setattr(module, name, weight)


def counts(module: nn.Module) -> list[str]:
    """Return the names of the module's attributes that hold the number of experts."""
    sizes = {len(weight) for weight in module.parameters() if weight.dim()}
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, int)
        and {value} == sizes
        and "expert" in name
        and "per_tok" not in name
    ]


def chosen(index: Tensor, part: range) -> Tensor:
    """Return the experts that were chosen for each token, numbered from 0 on a rank with the
    experts `part`. An expert of another rank gets the number after the last one; models of
    transformers skip this number.
    """
    here = (index >= part.start) & (index < part.stop)
    return (index - part.start).where(here, len(part))


def by_kind(values: Iterable[Any]) -> tuple[list[int], list[int]]:
    """Return two lists of positions in `values`: those of tensors with numbers of experts, and
    those of tensors with activations.
    """
    tensors = [(place, value) for place, value in enumerate(values) if isinstance(value, Tensor)]
    floating = [place for place, value in tensors if value.is_floating_point()]
    return [place for place, _ in tensors if place not in floating], floating


class _Experts:
    """Hooks that change the inputs and the output of a stack of experts."""

    def __init__(self, module: nn.Module, split: Split, part: range) -> None:
        self.split, self.part = split, part
        self._entered: tuple[Tensor, ...] = ()
        module.register_forward_pre_hook(self.enter, with_kwargs=True)
        module.register_forward_hook(self.leave)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change the arguments of the stack: experts of other ranks are removed from each token's
        choices. In backward, gradients of activations are summed over ranks.
        """
        leaves, form = tree_flatten((args, kwargs))
        indices, floating = by_kind(leaves)
        for place in indices:
            leaves[place] = chosen(leaves[place], self.part)
        inputs = _Enter.apply(self.split, *(leaves[place] for place in floating))  # type: ignore[no-untyped-call]
        for place, value in zip(floating, inputs, strict=True):
            leaves[place] = value
        self._entered = inputs
        return tree_unflatten(leaves, form)

    def leave(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Return the sum of the outputs of all tensor ranks."""
        inputs, self._entered = self._entered, ()
        return apply(_Leave, self.split, output, *inputs)


class _Enter(torch.autograd.Function):
    """The input of a stack of experts. Forward hands the activations on unchanged. They are equal
    on all ranks. Backward returns the sum of all ranks' gradients.
    """

    @staticmethod
    def forward(context: Any, split: Split, *inputs: Tensor) -> tuple[Tensor, ...]:
        context.split = split
        return tuple(value.view_as(value) for value in inputs)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient of features keeps its format. That of the weights by which experts are summed
        # is small, and summed in fp32 at least. A sum overwrites its tensor, which autograd may have
        # given to others as well.
        exact = torch.promote_types(gradients[0].dtype, torch.float32)
        sums = [
            context.split.sum(SUM_BACKWARD, each.to(exact if place else each.dtype, copy=True))
            for place, each in enumerate(gradients)
        ]
        return None, *(total.to(each.dtype) for total, each in zip(sums, gradients, strict=True))


class _Leave(torch.autograd.Function):
    """The output of a stack of experts: the sum of all ranks' outputs. `entered` is the output of
    `_Enter`, an argument only so that the backward of `_Enter` always runs. Without it, a rank
    whose experts got no token would leave the other ranks waiting.
    """

    @staticmethod
    def forward(context: Any, split: Split, output: Tensor, *inputs: Tensor) -> Tensor:
        context.number = len(inputs)
        return split.sum(SUM, output.clone())

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, gradient, *(None for _ in range(context.number))
