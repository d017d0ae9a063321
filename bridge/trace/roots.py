"""Roots: the tensors from which backward passes start. In a training whose loop is unknown, they
are the losses.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor

from bridge.trace.tracer import is_recomputing

MOST = 2**14
"""Number of backward passes without a step after which another training runs than the traced one,
so that its losses are forgotten.
"""


class Roots:
    """Collects the scalars from which backward passes have started since the last call of `take`; without
    `keeps`, the passes are counted alone.
    """

    def __init__(self, keeps: bool = True) -> None:
        self.keeps = keeps
        self._found: list[Tensor] = []
        self.passes = 0
        """Number of backward passes that have begun."""
        _listeners.add(self)
        _install_hook()

    def began(self, tensors: Any) -> None:
        """Record the tensors from which a backward pass starts, except those that are no scalars."""
        several = [tensors] if isinstance(tensors, Tensor) else tensors
        # A reentrant checkpoint calls backward inside of backward, on what is no loss.
        if is_recomputing():
            return
        self.passes += 1
        if len(self._found) > MOST:
            self._found.clear()
        if self.keeps and isinstance(several, list | tuple):
            self._found += [
                root.detach() for root in several if isinstance(root, Tensor) and root.numel() == 1
            ]

    def remove(self) -> None:
        """Collect nothing any more."""
        _listeners.discard(self)
        self._found.clear()

    def take(self) -> float | None:
        """Return the sum of the collected scalars, or None if there are none, and forget them. The
        call waits for the device.
        """
        roots, self._found = self._found, []
        return sum(float(root) for root in roots) if roots else None


_listeners: weakref.WeakSet[Roots] = weakref.WeakSet()


def _install_hook() -> None:
    """Replace `torch.autograd.backward`, once in a process, by a function that also tells all
    `Roots` from which tensors backward starts.
    """
    plain = torch.autograd.backward
    # Replaced once more, it would tell of each pass twice.
    if hasattr(plain, "told_to"):
        return

    @functools.wraps(plain)
    def backward(tensors: Any, *arguments: Any, **keywords: Any) -> None:
        for listener in tuple(_listeners):
            listener.began(tensors)
        plain(tensors, *arguments, **keywords)

    backward.told_to = _listeners  # type: ignore[attr-defined]
    # `Tensor.backward` looks it up in this module at every call.
    torch.autograd.backward = backward
