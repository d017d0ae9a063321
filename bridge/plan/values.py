"""Checks of single values against a schema. An error says in words which values the schema accepts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from bridge import limits
from bridge.files.shown import show_value
from bridge.plan.section import Section, fields

PLACEHOLDER = re.compile(
    r"(?:[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|<[^<>]+>|\{\{.*(?:\}\})?|\$\w+|\$\{.*\}|@\w+@),?"
)
"""Matches a text that stands for a value in a template, such as `CONFIG_LR` and `${LR}`."""
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_PLAIN: Mapping[Any, str] = {
    bool: "true or false",
    str: "text",
    int: "a whole number",
    float: "a number",
    dict: "a mapping",
    list: "a list",
    tuple: "a list",
}
_BOUNDS: Mapping[type, tuple[str, str]] = {
    Gt: ("gt", "above"),
    Ge: ("ge", "of at least"),
    Lt: ("lt", "below"),
    Le: ("le", "of at most"),
}


class Leaves:
    """The leaves of `schema`, for checks of single values. `words` has a description of each
    annotation that the schema defines itself.
    """

    def __init__(self, schema: type[Section], words: Mapping[Any, str] | None = None) -> None:
        self.schema, self.words = schema, words or {}

    def as_typed(self, path: str, value: Any) -> Any:
        """Return `value` as the schema types it, without coercion. Raises `ValueError` with the
        value that was found and the values that are expected.
        """
        # First of all: Python refuses to print integers of thousands of digits, and no stack takes
        # them.
        if isinstance(value, int) and abs(value) > limits.INTEGER:
            raise ValueError(f"found {str(value)[:20]}…, expected a number of at most 64 bits")
        try:
            return _adapter(fields(self.schema)[path].annotation).validate_python(value)
        except ValidationError:
            value_text = describe_found(value)
            raise ValueError(f"{value_text}, expected {self.describe_values(path)}") from None

    def nullable(self, path: str) -> bool:
        """Whether `path` accepts null."""
        return NoneType in get_args(fields(self.schema)[path].annotation)

    @cache  # noqa: B019
    def describe_values(self, path: str) -> str:
        """Return the values that the schema accepts at `path`, in words."""
        return self._annotation_text(fields(self.schema)[path].annotation)

    def _annotation_text(self, annotation: Any, bounds: tuple[Any, ...] = ()) -> str:
        origin = get_origin(annotation)
        if annotation in self.words:
            return self.words[annotation]
        if origin is Annotated:
            inner, *metadata = get_args(annotation)
            return self._annotation_text(
                inner, (*(item for item in metadata if type(item) in _BOUNDS), *bounds)
            )
        if origin in (Union, UnionType):
            return " or ".join(
                dict.fromkeys(
                    self._annotation_text(part)
                    for part in get_args(annotation)
                    if part is not NoneType
                )
            )
        if origin is Literal:
            choices = [
                str(choice).lower() if isinstance(choice, bool) else str(choice)
                for choice in get_args(annotation)
            ]
            return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
        if origin is tuple and Ellipsis not in get_args(annotation):
            return f"a list of {len(get_args(annotation))}, each {self._annotation_text(get_args(annotation)[0])}"
        ends = []
        for bound in bounds:
            attribute, words = _BOUNDS[type(bound)]
            ends.append(f"{words} {getattr(bound, attribute):g}")
        plain = _PLAIN.get(origin or annotation, "a value")
        return " ".join((plain, " and ".join(ends))).rstrip()


# pydantic compiles a validator for each adapter, which takes far longer than the check of one value; many leaves have
# the same annotation.
@cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=_STRICT)


def describe_found(value: Any) -> str:
    """Return the text `found VALUE`, with a note if the value stands for another one in a template."""
    template = isinstance(value, str) and PLACEHOLDER.fullmatch(value)
    note = ", a placeholder of a template that is not filled in" if template else ""
    return f"found {show_value(value)}{note}"
