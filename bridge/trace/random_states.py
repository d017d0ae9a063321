"""The random states of Python and numpy, which a second run of a module must leave as they were."""

from __future__ import annotations

import random
import sys
from typing import Any


def other_states() -> tuple[Any, ...]:
    """Return the states of the random generators of Python and numpy."""
    numpy = sys.modules.get("numpy")
    last = numpy.random.get_state() if numpy else ("", b"")
    return random.getstate(), (last[0], bytes(last[1]), *last[2:])


def restore_others(before: tuple[Any, ...]) -> None:
    """Set the generators of Python and numpy to states that `other_states` returned."""
    random.setstate(before[0])
    numpy = sys.modules.get("numpy")
    if numpy and before[1][0]:
        kind, key, *rest = before[1]
        numpy.random.set_state((kind, numpy.frombuffer(key, dtype=numpy.uint32), *rest))
