"""Checks: what an invariant is asked at each point of a step, and how it says what it saw to the other ranks."""

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
    """One invariant, or several that look at the same things; every method is called on all ranks alike.

    `row` is what this rank tells of a step, always as many numbers (int64; fp64 as their bits, see `floats`); `judged` gets
    the rows of all data ranks (ranks, numbers) and says what is wrong. The same for `later`, once weights are updated.
    """

    def __init__(self, source: ModuleSource) -> None:
        self.source = source
        self.handles: list[Any] = []
        """Hooks, each with `remove`."""
        self.error: Exception | None = None
        """What went wrong in the check itself. It is left out from then on, and the training goes on."""
        self.over = False
        """Whether all ranks know that."""

    def start(self) -> Iterator[Finding]:
        """Before the first step."""
        yield from ()

    def passing(self, given: Sequence[Any], named: Mapping[str, Any]) -> None:
        """A forward pass begins."""

    def passed(self) -> None:
        """A forward pass is over."""

    def backward(self) -> None:
        """The backward pass of a forward pass begins."""

    def saw(self, sight: Sight) -> None:
        """A layer ran."""

    def row(self, step: int) -> Tensor:
        """Before the update."""
        return NOTHING

    def judged(self, step: int, rows: Tensor) -> Iterator[Finding]:
        """What the rows of a step show."""
        yield from ()

    def later(self, step: int) -> Tensor:
        """After the update."""
        return NOTHING

    def judged_later(self, step: int, rows: Tensor) -> Iterator[Finding]:
        """What these show."""
        yield from ()

    def local(self, step: int) -> Iterator[Finding]:
        """What only this rank knows, as a step ends; it is told to all."""
        yield from ()

    def ended(self) -> None:
        """The step is over."""

    def close(self) -> None:
        """Take all hooks out."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def at(self, place: int) -> int:
        """The rank at that place among data ranks."""
        return self.source.data.ranks[place]

    def safe(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, as a hook of somebody else's training: what goes wrong in it is noted, and it is not called again."""

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
    """A function of `torch.nn.utils.clip_grad` whose results `told` gets too, until it is removed."""

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
    """fp64 numbers as int64 of the same bits."""
    found = (
        values if isinstance(values, Tensor) else torch.tensor(list(values), dtype=torch.float64)
    )
    # The rows of all checks go in one gather, which has one number format.
    return found.detach().double().cpu().reshape(-1).view(torch.int64)


def unfloats(rows: Tensor) -> Tensor:
    """Back to fp64."""
    return rows.contiguous().view(torch.float64)


def few(names: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
