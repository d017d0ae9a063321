"""Hooks that stay with the module in which they were put, and that never end a training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from bridge.errors import BridgeError

logger = logging.getLogger("bridge.trace")


class Hook:
    """A hook of the trace on a module. A copy of the module, or a pickled one, has in its place a
    function that does nothing, and does not need this package: no trace watches the copy. If the
    function that the hook calls fails with anything but a `BridgeError`, there is a warning, and
    the hook does nothing from then on.
    """

    __torch_unserializable__ = True

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, and return what it returns."""
        try:
            return self.call(*arguments)
        except BridgeError:
            raise
        except Exception as error:
            self.call = lambda *_: None
            logger.warning(
                "trace: a hook failed and is not called any more; the training goes on: %s: %s",
                type(error).__name__,
                error,
            )
            return None

    def __reduce__(self) -> Any:
        # A method that takes whatever a hook gets and returns None, in a class of Python's own.
        return getattr, (nullcontext(), "__exit__")
