"""One value at a time: check it against its place in the schema, and say what was expected there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from bridge.config import fields, shown
from compat.automodel.schema import DTYPES, AutoModel, Dtype, Mode, ModelDtype

LARGEST = 2**63 - 1
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_PLAIN: Mapping[Any, str] = {
    bool: "true or false",
    str: "text",
    int: "a whole number",
    float: "a number",
    dict: "a mapping",
    tuple: "a list",
}
_BOUNDS: Mapping[type, tuple[str, str]] = {
    Gt: ("gt", "above"),
    Ge: ("ge", "of at least"),
    Lt: ("lt", "below"),
    Le: ("le", "of at most"),
}
_OWN: Mapping[Any, str] = {
    Dtype: f"a number format such as {', '.join(list(DTYPES)[1:9:3])}",
    ModelDtype: "a number format such as bfloat16, or auto",
    Mode: "true, false or selective",
}


@cache
def _adapter(path: str) -> TypeAdapter[Any]:
    return TypeAdapter(fields(AutoModel)[path].annotation, config=_STRICT)


def typed(path: str, value: Any) -> Any:
    """`value` as the schema types it; raises `ValueError` with what was expected."""
    try:
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"found {str(value)[:20]}…, expected a number that fits 64 bits")
        return _adapter(path).validate_python(value)
    except ValidationError:
        raise ValueError(f"found {shown(value)}, expected {expected(path)}") from None


@cache
def expected(path: str) -> str:
    """What belongs at `path`, in words."""
    return _words(fields(AutoModel)[path].annotation)


@cache
def takes_text(path: str) -> bool:
    """Whether a text is a value of its own there, which no loader turns into a number."""
    return "text" in expected(path) or expected(path).startswith(("a number format", "true, false or", "one of", "a list"))


def _words(annotation: Any, bounds: tuple[Any, ...] = ()) -> str:
    origin = get_origin(annotation)
    if annotation in _OWN:
        return _OWN[annotation]
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        return _words(inner, (*(item for item in metadata if type(item) in _BOUNDS), *bounds))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_words(part) for part in get_args(annotation) if part is not NoneType))
    if origin is Literal:
        choices = [str(choice) for choice in get_args(annotation)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    return " ".join((_PLAIN.get(origin or annotation, "a value"), " and ".join(_limit(bound) for bound in bounds))).rstrip()


def _limit(bound: Any) -> str:
    attribute, words = _BOUNDS[type(bound)]
    return f"{words} {getattr(bound, attribute):g}"
