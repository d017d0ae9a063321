"""Typed, frozen sections of configs, and `Values`, an immutable flat mapping from dotted paths to
values.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from bridge import limits
from bridge.errors import ConfigError, nearest
from bridge.files.shown import brief, show_value


def _whole(value: Any) -> Any:
    """Return a float without a fraction as an integer, because JSON and YAML files may have `5e8`
    for an integer. Return any other value unchanged. Raises `ValueError` for a boolean.
    """
    if isinstance(value, bool):
        # pydantic's strict mode refuses a bool too, but with words that do not say what was
        # expected.
        raise ValueError("expected a whole number, not true or false")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def tuples(value: Any) -> Any:
    """`value` with a tuple in place of each list, at every depth."""
    return tuple(tuples(item) for item in value) if isinstance(value, list | tuple) else value


S = TypeVar("S", bound="Section")

Whole = Annotated[int, BeforeValidator(_whole)]
"""An integer; a float of integral value is accepted."""
Count = Annotated[int, BeforeValidator(_whole), Gt(0)]
"""A positive integer."""
Size = Annotated[int, BeforeValidator(_whole), Ge(0)]
"""A non-negative integer."""
Real = float
"""A finite real number; strict schemas refuse booleans for it."""
NonNegative = Annotated[Real, Ge(0)]
Positive = Annotated[Real, Gt(0)]
Fraction = Annotated[Real, Ge(0), Le(1)]
Beta = Annotated[Real, Ge(0), Lt(1)]
UpToThree = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_whole)]
"""A ZeRO level from 0 to 3. `True` is refused, though it equals 1 in Python."""


class Section(BaseModel):
    """A frozen section of a config that refuses unknown keys and does not coerce types."""

    # Built at the first validation: a command that only recognises or names settings builds none.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        populate_by_name=True,
        defer_build=True,
    )


@dataclass(frozen=True, slots=True)
class Field:
    """One leaf of a schema: dotted path, type annotation with bounds, default, and description."""

    path: str
    annotation: Any
    default: Any
    doc: str
    info: FieldInfo


def section_of(annotation: Any) -> type[Section] | None:
    """The `Section` class inside `annotation` (also behind Optional and Annotated), or None."""
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, Section) else None
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        sections = (section_of(part) for part in get_args(annotation))
        return next((section for section in sections if section), None)
    return None


@cache
def fields(schema: type[Section]) -> Mapping[str, Field]:
    """All leaves of `schema` by dotted path, inner sections included, in order of declaration."""
    return types.MappingProxyType({field.path: field for field in _leaves(schema, "")})


def _leaves(schema: type[Section], prefix: str) -> Iterator[Field]:
    for name, info in schema.model_fields.items():
        path = prefix + (info.alias or name)
        inner = section_of(info.annotation)
        if inner is not None:
            yield from _leaves(inner, path + ".")
        else:
            yield Field(path, info.rebuild_annotation(), info.default, info.description or "", info)


class Values(Mapping[str, Any]):
    """Immutable values by dotted path; a path that is missing was not set. Attributes work too:
    `values.zero.stage`.
    """

    __slots__ = ("_flat",)

    def __init__(self, flat: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        start = flat._flat if type(flat) is Values else flat or {}
        object.__setattr__(self, "_flat", {**start, **more})

    def __getitem__(self, path: str) -> Any:
        return self._flat[path]

    def __contains__(self, path: object) -> bool:
        return path in self._flat

    def get(self, path: str, default: Any = None) -> Any:
        """The value at `path`, or `default` if it was not set."""
        return self._flat.get(path, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._flat)

    def __len__(self) -> int:
        return len(self._flat)

    def __getattr__(self, name: str) -> Any:
        if name in self._flat:
            return self._flat[name]
        inner = {
            path[len(name) + 1 :]: value
            for path, value in self._flat.items()
            if path.startswith(name + ".")
        }
        if not inner:
            raise AttributeError(
                f"{name}: not set{nearest(name, {path.split('.')[0] for path in self._flat})}"
            )
        return Values(inner)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name}: values are immutable; use with_({{{name!r}: ...}})")

    def __eq__(self, other: object) -> bool:
        return dict(self._flat) == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        # Of the paths alone: values may be lists, which have no hash.
        return hash(tuple(self._flat))

    def __repr__(self) -> str:
        return f"Values({self._flat!r})"

    def with_(self, changes: Mapping[str, Any]) -> Values:
        """A copy with `changes` applied."""
        return Values({**self._flat, **changes})

    def flat(self) -> dict[str, Any]:
        """The same values as a plain dictionary."""
        return dict(self._flat)

    def as_nested(self) -> dict[str, Any]:
        """The same values as nested dictionaries."""
        return nest(self._flat)


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted path, as nested dictionaries."""
    root: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        if len(parents) > limits.DEPTH:
            raise ConfigError(
                f"{show_value(path)}: found a name of more than {limits.DEPTH} parts; no config is nested that deep"
            )
        place = root
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ConfigError(
                    f"{show_value(path)}: found a value and also keys below this name; keep either the value or the keys"
                )
        place[leaf] = value
    return root


def below(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values whose paths begin with `prefix`, each by its path without `prefix`."""
    return {
        path.removeprefix(prefix): value
        for path, value in values.items()
        if path.startswith(prefix)
    }


def flatten(section: Section, *, only_set: bool = True) -> dict[str, Any]:
    """Leaves of `section` by dotted path; with `only_set`, only those that were given."""
    return dict(_flat_leaves(section, "", only_set))


def _flat_leaves(section: Section, prefix: str, only_set: bool) -> Iterator[tuple[str, Any]]:
    for name, info in type(section).model_fields.items():
        if only_set and name not in section.model_fields_set:
            continue
        path, value = prefix + (info.alias or name), getattr(section, name)
        if isinstance(value, Section):
            yield from _flat_leaves(value, path + ".", only_set)
        else:
            yield path, value


def problems_of(error: ValidationError, schema: type[Section]) -> tuple[str, ...]:
    """One line for each problem in a pydantic error: the path, the value found, the value expected,
    the nearest known name.
    """
    return tuple(_problem(detail, schema) for detail in error.errors(include_url=False))


def _problem(detail: Any, schema: type[Section]) -> str:
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return unknown_key(path, schema)
    message = detail["msg"].removeprefix("Value error, ")
    return f"{path}: found {show_value(detail['input'])}; {message[:1].lower()}{message[1:]}"


def unknown_key(path: str, schema: type[Section]) -> str:
    """The line for a key that `schema` does not have, with the nearest name in its section."""
    parent, _, leaf = path.rpartition(".")
    prefix = f"{parent}." if parent else ""
    level = {
        field_path.removeprefix(prefix).split(".")[0]
        for field_path in fields(schema)
        if field_path.startswith(prefix)
    }
    return f"{brief(path)}: unknown key{nearest(leaf, level)}"


def validate(schema: type[S], data: Mapping[str, Any]) -> S:
    """Build `schema` from nested `data`, or raise one `ConfigError` that lists every problem."""
    try:
        return schema.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(*problems_of(error, schema)) from None
