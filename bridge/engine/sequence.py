"""Sequence parallelism for models whose own code does not support it. The stream from the first to
the last block is split by tokens, and hooks gather whole sequences for the modules that need them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from bridge.engine.layers import Mark
from bridge.engine.tensor_parallel import Conversion, Split, apply, scatter_tokens
from bridge.layout.tensor import Site, Tokens


class _Gather(torch.autograd.Function):
    """Gathers the token slices of all ranks to whole sequences.

    If `shares` is false, all ranks compute the same from the whole sequences. Each rank then has
    the whole gradient, and backward returns this rank's slice. If `shares` is true, each rank has a
    share of the gradient, and backward returns this rank's slice of their sum.
    """

    @staticmethod
    def forward(context: Any, inputs: Tensor, split: Split, shares: bool) -> Tensor:
        context.split, context.shares = split, shares
        return split.gather(inputs).contiguous()  # models view it in other shapes

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        split: Split = context.split
        return (
            split.scatter_sum(gradient) if context.shares else split.slice(gradient).contiguous(),
            None,
            None,
        )


def attach(conversion: Conversion) -> None:
    """Split the stream of a converted model by tokens, as the tensor plan says. Weights that now
    process only a slice of tokens are marked, and the sites at which tokens are exchanged are
    added.
    """
    model, split, tokens = conversion.model, conversion.split, conversion.plan.tokens
    assert tokens is not None, "the plan sets where the stream is split"
    first, last, width = tokens.first, tokens.last, tokens.width
    # Hooks run in the order in which they are registered: the first block has to split the stream before it, or a module in it,
    # puts whole sequences together again.
    _at(model, first, split, entering=scatter_tokens)
    conversion.sites.append(Site(first, "scatter", width))
    for name in tokens.regions:
        _at(model, name, split, entering=_gather_shares, leaving=_in_order)
        conversion.sites.append(Site(name, "enter", width))
    for name in tokens.whole:
        _at(model, name, split, entering=_gather, leaving=scatter_tokens)
        conversion.sites += [Site(name, "gather", width), Site(name, "scatter", width)]
    _at(model, last, split, leaving=_gather)
    conversion.sites.append(Site(last, "gather", width))
    _mark_shares(conversion, tokens)


def _mark_shares(conversion: Conversion, tokens: Tokens) -> None:
    """Mark the weights that process only this rank's tokens, because each rank then has only a
    share of their gradients. Weights of modules that get whole sequences are not marked.
    """
    blocks = conversion.model.get_submodule(tokens.first.rpartition(".")[0])
    whole = {
        id(part) for name in tokens.whole for part in conversion.model.get_submodule(name).modules()
    }
    for module in blocks.modules():
        for weight in module.parameters(recurse=False) if id(module) not in whole else ():
            conversion.marks.setdefault(id(weight), Mark(partial=True))


def stream_at(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any, int]:
    """Return a list of a module's arguments, with nested ones taken apart, then their nesting, and
    then the position of the stream in the list. The stream is the first argument of shape (batch,
    tokens, features).
    """
    leaves, form = tree_flatten((args, kwargs))
    places = (place for place, leaf in enumerate(leaves) if is_stream(leaf))
    return leaves, form, next(places, -1)


def is_stream(value: Any) -> bool:
    """Return whether a value can be activations of shape (batch, tokens, features)."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3


def _at(
    model: nn.Module, name: str, split: Split, entering: Any = None, leaving: Any = None
) -> None:
    module = model.get_submodule(name)
    if entering is not None:

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            leaves, form, place = stream_at(args, kwargs)
            leaves[place] = entering(leaves[place], split)
            return tree_unflatten(leaves, form)

        module.register_forward_pre_hook(enter, with_kwargs=True)
    if leaving is not None:

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            # A module may give more than the stream, all of it for the same tokens: router logits by token, hidden states.
            return tree_map_only(
                Tensor, lambda value: leaving(value, split) if is_stream(value) else value, output
            )

        module.register_forward_hook(leave)


def _in_order(value: Tensor, split: Split) -> Tensor:
    """Return the slice from the last layer of a region, in the memory layout that models expect."""
    return value.contiguous()


def _gather(value: Tensor, split: Split) -> Tensor:
    return apply(_Gather, value, split, False)


def _gather_shares(value: Tensor, split: Split) -> Tensor:
    return apply(_Gather, value, split, True)
