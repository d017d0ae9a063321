"""Plain values as JSON and back, exactly: a mark tells tuples, sets, and mappings whose keys are no
strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MARK = "stagebridge "
TUPLE, SET, FROZEN, PAIRS = (f"{MARK}{kind}" for kind in ("tuple", "set", "frozenset", "pairs"))
"""The only key of an object that stands for such a value. Under it is a list."""


def encoded(value: Any) -> Any:
    """`value` as values that JSON has. Anything that is not plain stays as it is."""
    if isinstance(value, tuple):
        return {TUPLE: [encoded(inner) for inner in value]}
    if isinstance(value, set | frozenset):
        return {
            FROZEN if isinstance(value, frozenset) else SET: [
                encoded(inner) for inner in sorted(value, key=repr)
            ]
        }
    if isinstance(value, list):
        return [encoded(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    # A key of the user's that looks like a mark is written as pairs too, so that it is not taken
    # for one on the way back.
    if all(isinstance(key, str) and not key.startswith(MARK) for key in value):
        return {key: encoded(inner) for key, inner in value.items()}
    return {PAIRS: [[encoded(key), encoded(inner)] for key, inner in value.items()]}


def decoded(value: Any) -> Any:
    """The value that `encoded` turned into this. Raises `TypeError` or `ValueError` for what
    `encoded` never writes.
    """
    if isinstance(value, list):
        return [decoded(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1 and (key := next(iter(value))) in KINDS:
        return KINDS[key](decoded(value[key]))
    return {key: decoded(inner) for key, inner in value.items()}


KINDS: Mapping[str, Any] = {TUPLE: tuple, SET: set, FROZEN: frozenset, PAIRS: dict}
