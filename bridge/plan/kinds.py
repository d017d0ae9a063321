"""Types in words: the values that a schema annotation accepts, with their bounds."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen

NAMES: Mapping[Any, str] = {
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    dict: "mapping",
    list: "list",
    Any: "any",
}
SIGNS: Mapping[type, tuple[str, str]] = {
    Gt: (">", "gt"),
    Ge: (">=", "ge"),
    Lt: ("<", "lt"),
    Le: ("<=", "le"),
}


def kind(annotation: Any) -> str:
    """The values that `annotation` accepts, such as `int > 0`, `one of uniform, block` or `list of
    (str, 0 or 1)`.

    None is left out, because None stands for a setting that is not given.
    """
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _bounds_text(inside[0], inside[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(
            dict.fromkeys(kind(part) for part in inside if part is not types.NoneType)
        )
    if origin is Literal:
        words = [str(value) for value in inside]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if origin is tuple:
        if len(inside) == 2 and inside[1] is Ellipsis:
            return f"list of {kind(inside[0])}"
        return f"({', '.join(map(kind, inside))})" if inside else "list"
    if origin in (list, dict):
        return f"list of {kind(inside[0])}" if origin is list else "mapping"
    return NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _bounds_text(inner: Any, limits: Iterable[Any]) -> str:
    bounds = [limit for limit in limits if type(limit) in SIGNS]
    signs = [f"{SIGNS[type(limit)][0]} {getattr(limit, SIGNS[type(limit)][1])}" for limit in bounds]
    non_empty = ", not empty" if any(isinstance(limit, MinLen) for limit in limits) else ""
    return " ".join((kind(inner), " and ".join(signs))).strip() + non_empty
