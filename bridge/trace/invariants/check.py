"""Checks: the base class of invariants, with one method for each point of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from bridge.trace.findings import TraceFinding
from bridge.trace.module import ModuleSource
from bridge.trace.tracer import Sight


class Check:
    """A check of one invariant, or of several that need the same data. All ranks call the same
    methods in the same order.

    `row` returns the numbers that this rank sends to the other data ranks, as int64 (fp64 numbers
    are sent as their bits, see `floats_as_integers`). Rows have the same length in all steps. `judge_rows` gets the
    rows of all data ranks (ranks, numbers) and yields findings. `later` and `judge_rows_after_update` do the
    same after the update.
    """

    def __init__(self, source: ModuleSource) -> None:
        self.source = source
        self.handles: list[Any] = []
        """Handles of the check's hooks; their method `remove` removes the hook."""
        self.error: Exception | None = None
        """The error with which this check failed, or None. A check that failed is not called
        again, and the training continues.
        """
        self.over = False
        """Whether all ranks know that this check failed on some rank, so that they exchange no
        rows of it.
        """

    def start(self) -> Iterator[TraceFinding]:
        """Yield the findings that can be made before the first step."""
        yield from ()

    def passing(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Called when a forward pass begins."""

    def end_forward(self) -> None:
        """Called when a forward pass ends."""

    def backward(self) -> None:
        """Called when backward begins for a forward pass that ended before."""

    def saw(self, sight: Sight) -> None:
        """Called when a layer has run; `sight` is one of its output tensors."""

    def row(self, step: int) -> Tensor:
        """Return the numbers that this rank sends to the other data ranks before the update."""
        return NOTHING

    def judge_rows(self, step: int, rows: Tensor) -> Iterator[TraceFinding]:
        """Yield the findings that follow from the rows of all data ranks."""
        yield from ()

    def later(self, step: int) -> Tensor:
        """Return the numbers that this rank sends to the other data ranks after the update."""
        return NOTHING

    def judge_rows_after_update(self, step: int, rows: Tensor) -> Iterator[TraceFinding]:
        """Yield the findings that follow from the rows of all data ranks after the update."""
        yield from ()

    def local(self, step: int) -> Iterator[TraceFinding]:
        """Yield the findings that this rank makes without the rows of others. Called at the end of
        a step; the findings are sent to all ranks.
        """
        yield from ()

    def end_step(self) -> None:
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
        """Return a function that calls `call` but never raises: an error is recorded in `error`,
        and then `call` is not called again.
        """

        def safely(*arguments: Any, **keywords: Any) -> Any:
            if self.error is None:
                try:
                    return call(*arguments, **keywords)
                except Exception as error:
                    self.error = error
            return None

        return safely


NOTHING = torch.empty(0, dtype=torch.int64)
FIRST, EVERY = 3, 20
"""Number of first steps in which what is expensive is checked, and, after them, number of steps
from one such check to the next.
"""


def is_thorough(step: int) -> bool:
    """Return whether what is expensive is checked in a step."""
    return step <= FIRST or step % EVERY == 0


class Watched:
    """Replaces the function `name` of `torch.nn.utils.clip_grad` by one that also passes its
    result and its limit to `report`, until `remove` is called.
    """

    def __init__(self, name: str, report: Callable[[Any, float], None]) -> None:
        self.name, self.plain = name, getattr(clip_grad, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            result = self.plain(*arguments, **keywords)
            limits = (*arguments[1:2], keywords.get("max_norm", keywords.get("clip_value")))
            report(result, float(limits[0]))
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


def floats_as_integers(values: Tensor | Sequence[float]) -> Tensor:
    """Return values as fp64 numbers whose bits are viewed as int64, so that a row can hold them."""
    tensor = (
        values if isinstance(values, Tensor) else torch.tensor(list(values), dtype=torch.float64)
    )
    # The rows of all checks go in one gather, which has one number format.
    return tensor.detach().double().cpu().reshape(-1).view(torch.int64)


def integers_as_floats(rows: Tensor) -> Tensor:
    """Return the fp64 values that `floats_as_integers` has viewed as int64."""
    return rows.contiguous().view(torch.float64)


def few_names(names: Sequence[str]) -> str:
    """Return the first three names as text, with the number of further names."""
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")
