"""Roots: the tensors from which backward passes start, which are the losses of a training with an
unknown loop.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor

from bridge.trace.tracer import recomputing


class Roots:
    """The scalars from which backward passes started since the last call of `take`."""

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        _listeners.add(self)
        _install()

    def began(self, tensors: Any) -> None:
        """Record the tensors from which a backward pass starts."""
        several = [tensors] if isinstance(tensors, Tensor) else tensors
        # A reentrant checkpoint calls backward inside of backward, on what is no loss.
        if not recomputing() and isinstance(several, list | tuple):
            self._found += [
                root.detach() for root in several if isinstance(root, Tensor) and root.numel() == 1
            ]

    def take(self) -> float | None:
        """Return the sum of the scalars from which passes of the step started, or None if there
        were none. Waits for the device.
        """
        found, self._found = self._found, []
        return sum(float(root) for root in found) if found else None


_listeners: weakref.WeakSet[Roots] = weakref.WeakSet()


def _install() -> None:
    """Report every backward pass that Python code starts to all listeners. It is installed once in
    a process.
    """
    plain = torch.autograd.backward
    # Replaced once more, it would tell of each pass twice.
    if hasattr(plain, "told_to"):
        return

    @functools.wraps(plain)
    def backward(tensors: Any, *given: Any, **named: Any) -> None:
        for listener in tuple(_listeners):
            listener.began(tensors)
        plain(tensors, *given, **named)

    backward.told_to = _listeners  # type: ignore[attr-defined]
    # `Tensor.backward` looks it up in this module at every call.
    torch.autograd.backward = backward
