"""Experts over tensor ranks: each rank holds some experts of a stack, and the outputs of all ranks
are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from bridge.engine.tensor_parallel import Conversion, Split
from bridge.layout.tensor import Site, cut
from bridge.layout.traffic import SUM, SUM_BACKWARD


def attach(found: Conversion) -> None:
    """Remove the experts of other ranks from the stacks that the plan names, and add the sites at
    which ranks sum activations.
    """
    # Tokens that are split for the model are put together before a block's experts.
    tokens = found.plan.tokens is not None
    split = found.alone
    enter, leave = Site.ends(whole=tokens)
    for stack in found.plan.experts:
        module = found.model.get_submodule(stack.name)
        part = cut(stack.count, split.group.size, split.group.index)
        keep(module, {name: found.cut_along(weight, 0) for name, weight in module.named_parameters()}, part)
        _Experts(module, split, part)
        found.sites += [
            Site(stack.name, enter, stack.width),
            Site(stack.name, enter, stack.choices, exact=True),
            Site(stack.name, leave, stack.width),
        ]


def keep(module: nn.Module, weights: Mapping[str, nn.Parameter], part: range) -> None:
    """Reduce a stack of experts to the experts with the indices in `part`."""
    for name in counts(module):
        setattr(module, name, len(part))
    for name, weight in weights.items():
        setattr(module, name, weight)


def counts(module: nn.Module) -> list[str]:
    """Return the attributes of a module that hold its number of experts."""
    sizes = {len(weight) for weight in module.parameters() if weight.dim()}
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, int) and {value} == sizes and "expert" in name and "per_tok" not in name
    ]


def chosen(index: Tensor, part: range) -> Tensor:
    """Return the experts of each token, numbered within a rank that holds the experts `part`.

    Experts of other ranks get the number after the last one, which models of transformers treat as
    no expert.
    """
    here = (index >= part.start) & (index < part.stop)
    return (index - part.start).where(here, len(part))


def by_kind(values: Iterable[Any]) -> tuple[list[int], list[int]]:
    """Return the positions of the arguments with indices of experts, and the positions of the
    arguments with activations.
    """
    tensors = [(place, value) for place, value in enumerate(values) if isinstance(value, Tensor)]
    floating = [place for place, value in tensors if value.is_floating_point()]
    return [place for place, _ in tensors if place not in floating], floating


class _Experts:
    """Changes the inputs and the output of a stack of experts."""

    def __init__(self, module: nn.Module, split: Split, part: range) -> None:
        self.split, self.part = split, part
        self._entered: tuple[Tensor, ...] = ()
        module.register_forward_pre_hook(self.enter, with_kwargs=True)
        module.register_forward_hook(self.leave)

    def enter(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Remove the experts of other ranks from each token's choices. Gradients of activations are
        summed over ranks.
        """
        leaves, form = tree_flatten((given, named))
        indices, floating = by_kind(leaves)
        for place in indices:
            leaves[place] = chosen(leaves[place], self.part)
        entered = _Enter.apply(self.split, *(leaves[place] for place in floating))  # type: ignore[no-untyped-call]
        for place, value in zip(floating, entered, strict=True):
            leaves[place] = value
        self._entered = entered
        return tree_unflatten(leaves, form)

    def leave(self, module: nn.Module, given: Any, output: Tensor) -> Tensor:
        """Return the sum of all ranks' outputs."""
        entered, self._entered = self._entered, ()
        found: Tensor = _Leave.apply(self.split, output, *entered)  # type: ignore[no-untyped-call]
        return found


class _Enter(torch.autograd.Function):
    """Input of experts. Forward: the same activations on all ranks. Backward: the sum of the ranks'
    gradients.
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
    """Output of experts: the sum of the ranks' outputs.

    `entered` is the output of `_Enter`. Even if no token went to an expert of this rank, the
    backward of `_Enter` must run, because the other ranks wait in it.
    """

    @staticmethod
    def forward(context: Any, split: Split, output: Tensor, *entered: Tensor) -> Tensor:
        context.number = len(entered)
        return split.sum(SUM, output.clone())

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, gradient, *(None for _ in range(context.number))
