"""Hooks that stay with the module in which they were put."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class Hook:
    """A hook of the trace on a module. A copy of the module, or a pickled one, has in its place a
    function that does nothing, and does not need this package: no trace watches the copy.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, and return what it returns."""
        return self.call(*arguments)

    def __reduce__(self) -> Any:
        # A method that takes whatever a hook gets and returns None, in a class of Python's own.
        return getattr, (nullcontext(), "__exit__")
