"""Plain values as JSON and back, exactly: tuples, sets, and dictionaries whose keys are no strings have a mark there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MARK = "stagebridge "
TUPLE, SET, FROZEN, PAIRS = (f"{MARK}{kind}" for kind in ("tuple", "set", "frozenset", "pairs"))
"""The one key of an object that stands for such a value; what it holds is a list."""


def encoded(value: Any) -> Any:
    """`value` in what JSON has. Whatever else there is stays as it is."""
    if isinstance(value, tuple):
        return {TUPLE: [encoded(inner) for inner in value]}
    if isinstance(value, set | frozenset):
        return {FROZEN if isinstance(value, frozenset) else SET: [encoded(inner) for inner in sorted(value, key=repr)]}
    if isinstance(value, list):
        return [encoded(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    if all(isinstance(key, str) and not key.startswith(MARK) for key in value):
        return {key: encoded(inner) for key, inner in value.items()}
    return {PAIRS: [[encoded(key), encoded(inner)] for key, inner in value.items()]}


def decoded(value: Any) -> Any:
    """What `encoded` made it of. Raises `TypeError` or `ValueError` for marks that it does not write."""
    if isinstance(value, list):
        return [decoded(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1 and (key := next(iter(value))) in KINDS:
        return KINDS[key](decoded(value[key]))
    return {key: decoded(inner) for key, inner in value.items()}


KINDS: Mapping[str, Any] = {TUPLE: tuple, SET: set, FROZEN: frozenset, PAIRS: dict}
