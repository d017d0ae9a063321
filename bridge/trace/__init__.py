"""Trace: logs of a run layer by layer, comparison of ranks that should agree, and checks of each
step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge import load_late

if TYPE_CHECKING:
    from bridge.trace.attachment import attach as attach, batch as batch, source_of as source_of

NAMES = dict.fromkeys(("attach", "batch", "source_of"), "attachment")


def __getattr__(name: str) -> Any:
    """Return a name of the module that attaches traces, which needs torch."""
    return load_late(__name__, NAMES, name)
