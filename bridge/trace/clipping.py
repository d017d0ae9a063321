"""Clipping: the factor by which torch's functions have scaled the gradients of a step, in a training whose loop is unknown."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from bridge.trace.roots import Roots

SCALE, BOUND = "_clip_grads_with_norm_", "clip_grad_value_"
"""Functions of `torch.nn.utils.clip_grad`. `clip_grad_norm_` calls the first one, also where a script imported it by name before
the trace was attached.
"""


@dataclass(eq=False)
class Clipping:
    """Collects how gradients were clipped since the last backward pass, which `roots` sees begin."""

    roots: Roots
    _seen: list[tuple[set[int], Tensor | None]] = field(default_factory=list)
    """For each call, the ids of the parameters, and the factor; None if it bounds each element."""
    _pass: int = 0

    def __post_init__(self) -> None:
        _listeners.add(self)
        _replace_clip(SCALE, lambda limit, norm, *_: _clip_factor(limit, norm))
        _replace_clip(BOUND, lambda *_: None)

    def record_clip(self, parameters: Sequence[Tensor], factor: Tensor | None) -> None:
        """Record that the gradients of some parameters were clipped."""
        if self._pass != self.roots.passes:
            self._seen.clear()  # of a step that was skipped
        self._pass = self.roots.passes
        self._seen.append(({id(parameter) for parameter in parameters}, factor))

    def take(self, parameters: Iterable[nn.Parameter]) -> float | None:
        """Return the factor by which the gradients of all `parameters` were multiplied, and forget it. None: no call was seen,
        or there is no such factor, because they were clipped in different ways.
        """
        calls, self._seen = self._seen, []
        if not calls or self._pass != self.roots.passes:
            return None
        ways = {
            tuple(at for at, (ids, _) in enumerate(calls) if id(parameter) in ids)
            for parameter in parameters
            if parameter.grad is not None
        }
        way = ways.pop() if len(ways) == 1 else ()
        factors = [calls[at][1] for at in way]
        product = math.prod(math.nan if factor is None else float(factor) for factor in factors)
        return product if factors and product > 0 else None


def _clip_factor(limit: float, norm: Tensor) -> Tensor:
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return (float(limit) / (whole.detach() + 1e-6)).clamp(max=1.0)


_listeners: weakref.WeakSet[Clipping] = weakref.WeakSet()


def _replace_clip(name: str, factor: Callable[..., Tensor | None]) -> None:
    """Replace a function of `clip_grad`, once in a process, by one that also tells all `Clipping`. `factor` gets its arguments
    behind the parameters.
    """
    plain = getattr(clip_grad, name, None)
    if plain is None or hasattr(plain, "told_to"):
        return

    @functools.wraps(plain)
    def clip(parameters: Any, *arguments: Any, **keywords: Any) -> Any:
        several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        result = plain(several, *arguments, **keywords)
        for listener in tuple(_listeners):
            listener.record_clip(several, factor(*arguments, *keywords.values()))
        return result

    clip.told_to = _listeners  # type: ignore[attr-defined]
    setattr(clip_grad, name, clip)
    setattr(torch.nn.utils, name.removeprefix("_"), clip)
