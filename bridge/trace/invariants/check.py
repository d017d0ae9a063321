"""Checks: the methods that an invariant has for each point of a step, and the rows that ranks
exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from bridge.trace.findings import Finding
from bridge.trace.module import ModuleSource
from bridge.trace.tracer import Sight


class Check:
    """One invariant, or several that need the same data. Every method is called on all ranks alike.

    `row` returns this rank's numbers about a step. Its length never changes, and its type is int64
    (fp64 numbers are sent as their bits, see `floats`). `judged` gets the rows of all data ranks
    (ranks, numbers) and yields findings. `later` and `judged_later` do the same after the update.
    """

    def __init__(self, source: ModuleSource) -> None:
        self.source = source
        self.handles: list[Any] = []
        """Handles of hooks, each with a method `remove`."""
        self.error: Exception | None = None
        """Error in the check itself, or None. After an error the check is left out and the training
        continues.
        """
        self.over = False
        """Whether all ranks know that the check failed."""

    def start(self) -> Iterator[Finding]:
        """Yield findings before the first step."""
        yield from ()

    def passing(self, given: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Called when a forward pass begins."""
    def passed(self) -> None:
        """Called when a forward pass ends."""

    def backward(self) -> None:
        """Called when the backward pass of a forward pass begins."""

    def saw(self, sight: Sight) -> None:
        """Called when a layer ran."""

    def row(self, step: int) -> Tensor:
        """Return this rank's row before the update."""
        return NOTHING

    def judged(self, step: int, rows: Tensor) -> Iterator[Finding]:
        """Yield the findings that the rows of a step show."""
        yield from ()

    def later(self, step: int) -> Tensor:
        """Return this rank's row after the update."""
        return NOTHING

    def judged_later(self, step: int, rows: Tensor) -> Iterator[Finding]:
        """Yield the findings that the rows after the update show."""
        yield from ()

    def local(self, step: int) -> Iterator[Finding]:
        """Yield the findings of this rank alone at the end of a step, which are sent to all ranks.
        """
        yield from ()

    def ended(self) -> None:
        """Called when a step ends."""

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def at(self, place: int) -> int:
        """Return the global rank of the data rank with index `place`."""
        return self.source.data.ranks[place]

    def safe(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` as a hook that cannot stop a training: an error in `call` is recorded, and
        `call` is not called again.
        """

        def safely(*given: Any, **named: Any) -> Any:
            if self.error is None:
                try:
                    return call(*given, **named)
                except Exception as error:
                    self.error = error
            return None

        return safely


NOTHING = torch.empty(0, dtype=torch.int64)


class Watched:
    """Wraps a function of `torch.nn.utils.clip_grad` until it is removed. Results of the function
    are also passed to `told`.
    """

    def __init__(self, name: str, told: Callable[[Any], None]) -> None:
        self.name, self.plain = name, getattr(clip_grad, name)

        def call(*given: Any, **named: Any) -> Any:
            result = self.plain(*given, **named)
            told(result)
            return result

        self._put(call)

    def _put(self, call: Any) -> None:
        setattr(clip_grad, self.name, call)
        # This package has a name of its own for it. A script that imported the function by name
        # before is not seen.
        setattr(torch.nn.utils, self.name, call)

    def remove(self) -> None:
        """Put torch's own back."""
        self._put(self.plain)


def floats(values: Tensor | Sequence[float]) -> Tensor:
    """Return values as fp64, viewed as int64 with the same bits."""
    found = (
        values if isinstance(values, Tensor) else torch.tensor(list(values), dtype=torch.float64)
    )
    # The rows of all checks go in one gather, which has one number format.
    return found.detach().double().cpu().reshape(-1).view(torch.int64)


def unfloats(rows: Tensor) -> Tensor:
    """Return the fp64 values whose bits `floats` returned."""
    return rows.contiguous().view(torch.float64)


def few(names: Sequence[str]) -> str:
    """Return the first three names, and the number of the remaining names, as text."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
