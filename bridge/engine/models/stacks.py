"""Stacks of experts in a model of Hugging Face: finds the stacks whose experts tensor ranks can
divide among themselves, by running each stack in parts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from bridge.engine.expert_stacks import by_kind, chosen, counts, keep
from bridge.engine.models.cutting import still, tokens, without_cache
from bridge.layout.tensor import Stack, cut_range

CLOSE = 1e-4
"""The largest difference that counts as rounding, as a share of the largest element. It is the
difference between the output of a stack and the sum of the outputs of its parts.
"""
TRIES = (RuntimeError, ValueError, IndexError, TypeError, AttributeError)
"""Exceptions that show that a stack cannot run in parts."""
Call = tuple[tuple[Any, ...], dict[str, Any], Any]
"""A call of a stack: positional arguments, named arguments, and the output."""


def stacks_of(model: nn.Module, names: Sequence[str], ranks: int) -> Iterator[Stack]:
    """Yield the stacks among the modules `names` whose experts `ranks` ranks can divide among
    themselves.
    """
    if not names:
        return
    calls: dict[str, Call] = {}
    with still(model), torch.no_grad(), ExitStack() as stack:
        for name in names:
            note = partial(_note_call, calls, name)
            hook = model.get_submodule(name).register_forward_hook(note, with_kwargs=True)
            stack.callback(hook.remove)
        ids = tokens(model)
        model(input_ids=ids, **without_cache(model))
    with still(model), torch.no_grad():
        for name, (args, kwargs, output) in calls.items():
            module = model.get_submodule(name)
            leaves, form = tree_flatten((args, kwargs))
            if _shared(module, leaves, form, output, ranks):
                features, weights = (leaves[place] for place in by_kind(leaves)[1])
                widths = (each.numel() // ids.numel() for each in (features, weights))
                yield Stack(name, len(next(module.parameters())), *widths)


def _note_call(
    calls: dict[str, Call], name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
) -> None:
    calls[name] = args, kwargs, output


def _shared(module: nn.Module, leaves: list[Any], form: Any, output: Any, ranks: int) -> bool:
    """Return whether a stack can be run in parts, each with some of the experts, such that the sum
    of their outputs is the output of the stack.
    """
    indices, floating = by_kind(leaves)
    number = len(next(module.parameters(), ()))
    if (len(indices), len(floating)) != (1, 2) or not counts(module) or number < ranks:
        return False
    if not isinstance(output, Tensor):
        return False
    total = torch.zeros_like(output)
    for rank in range(ranks):
        part = cut_range(number, ranks, rank)
        own = list(leaves)
        own[indices[0]] = chosen(leaves[indices[0]], part)
        args, kwargs = tree_unflatten(own, form)
        try:
            total += _part(module, part)(*args, **kwargs)
        except TRIES:
            return False
    scale = float(output.abs().max().clamp(min=1e-30))
    return bool(torch.allclose(total, output, rtol=0.0, atol=CLOSE * scale))


def _part(module: nn.Module, part: range) -> nn.Module:
    """Return a copy of a stack that has only the experts with the indices `part`. The weights of
    the copy are views of the stack's weights.
    """
    stack = copy.copy(module)
    stack.__dict__["_parameters"] = dict(module._parameters)  # the copy shares it with the stack
    weights = {
        name: nn.Parameter(weight.detach()[part.start : part.stop], requires_grad=False)
        for name, weight in module.named_parameters()
    }
    keep(stack, weights, part)
    return stack
