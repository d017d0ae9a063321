"""Exact conversion of plain values to JSON and back. Marks stand for what JSON does not have:
tuples, sets, and keys that are no text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MARK = "stagebridge "
TUPLE, SET, FROZEN, PAIRS = (f"{MARK}{kind}" for kind in ("tuple", "set", "frozenset", "pairs"))
"""Keys of JSON objects that stand for a tuple, for sets, or for a mapping as a list of pairs. Such
an object has no other key, and its value is a list.
"""


def encode_value(value: Any) -> Any:
    """Return `value` in a form that JSON can hold: tuples, sets and mappings with keys that are no
    text become marked objects. Anything else, such as a tensor, is left as it is.
    """
    if isinstance(value, tuple):
        return {TUPLE: [encode_value(inner) for inner in value]}
    if isinstance(value, set | frozenset):
        return {
            FROZEN if isinstance(value, frozenset) else SET: [
                encode_value(inner) for inner in sorted(value, key=repr)
            ]
        }
    if isinstance(value, list):
        return [encode_value(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    # A key of the user's that looks like a mark is written as pairs too, so that it is not taken
    # for one on the way back.
    if all(isinstance(key, str) and not key.startswith(MARK) for key in value):
        return {key: encode_value(inner) for key, inner in value.items()}
    return {PAIRS: [[encode_value(key), encode_value(inner)] for key, inner in value.items()]}


def decode_value(value: Any) -> Any:
    """Return the value that `encode_value` has converted. Raises `TypeError` or `ValueError` if
    `encode_value` cannot have returned this.
    """
    if isinstance(value, list):
        return [decode_value(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1 and (key := next(iter(value))) in KINDS:
        return KINDS[key](decode_value(value[key]))
    return {key: decode_value(inner) for key, inner in value.items()}


KINDS: Mapping[str, Any] = {TUPLE: tuple, SET: set, FROZEN: frozenset, PAIRS: dict}
