"""Reads the facts of a Fast-LLM release from its own config classes: keys, defaults, and the fields of free-form sections.

The classes need Python 3.12, numpy, requests and yaml, but not torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field as AnyField, fields as own
from platform import python_version
from types import UnionType
from typing import Any, Union, get_args, get_origin

from bridge.errors import SourceError
from bridge.plan.section import fields
from compat.fast_llm.schema import FastLLM
from tests.harvesting.code import first, plain
from tests.harvesting.rows import Facts, Row
from tests.harvesting.source import Package, Tree

PACKAGE = Package("fast-llm", "fast_llm", "__init__.py")
TABLES: Mapping[str, tuple[str, ...]] = {"keys.json": ("key",), "classes.json": ("class",)}
"""Files of facts, with the columns that identify a row."""
TRAINER = "fast_llm.models.gpt.config:GPTTrainerConfig"
REGISTERED = ("fast_llm.data.auto:__name__", "fast_llm.models.auto:__name__")
"""Modules that import the classes that a key `type` may name."""
LIMITS = {"gt": ">", "geq": ">=", "lt": "<", "leq": "<=", "in_range_incl": ">="}
"""A table from Fast-LLM's assertions on numbers to comparison signs. For a range, the sign is that
of the lower bound.
"""
OLD = re.compile(r'(?:_handle_renamed_field\(\s*default,\s*|del default\[)"(\w+)"')
"""Pattern of code that replaces or drops a setting given under its old name. Classes with such code
still accept the old name.
"""


def facts(tree: Tree) -> Facts:
    """Return the rows of facts about the release. Its config classes must be importable."""
    try:
        for name in (*REGISTERED, TRAINER):
            trainer = first([name])
    except SyntaxError as error:
        raise SourceError(
            f"{tree.folder}: found Python {python_version()}, which cannot read {error.filename}; "
            "harvest with Python 3.12 or later"
        ) from error
    classes: dict[str, Row] = {}
    keys = list(_keys(trainer, "", classes))
    return Facts({"keys.json": keys, "classes.json": [classes[name] for name in sorted(classes)]})


def _base() -> Any:
    return first(["fast_llm.config:Config"])


def _fields(cls: Any) -> Iterator[AnyField[Any]]:
    """Yield the fields that a config may set."""
    yield from (field for field in own(cls) if field.init)


def _keys(cls: Any, prefix: str, classes: dict[str, Row]) -> Iterator[Row]:
    """Yield the keys of a section of our schema, and collect the classes of free-form sections."""
    schema = fields(FastLLM)
    for field in _fields(cls):
        path, section = prefix + field.name, _section(field.type)
        if section and any(name.startswith(f"{path}.") for name in schema):
            yield from _keys(section, f"{path}.", classes)
        elif field.name != "type" or path in schema:
            yield {"key": path, "type": _kind(field), **_default(field)}
            _collect(section, classes)


def _default(field: AnyField[Any]) -> Row:
    """Return the column with the field's default. Return no column if the default is null or is made by a
    function, as for a section, or if there is no default.
    """
    value = plain(None if field.default is MISSING else field.default)
    return {} if value is None else {"default": value}


def _collect(cls: Any, classes: dict[str, Row]) -> None:
    """Add a row for the class, its subclasses, and the config classes of all their fields."""
    if cls is None or cls.__name__ in classes:
        return
    below = sorted(_below(cls), key=lambda one: str(one.__name__))
    types = {name: cls._registry[name] for name in cls.__dict__.get("_registry") or ()}
    others = {
        "types": {name: one.__name__ for name, one in types.items()},
        "below": [one.__name__ for one in below],
        "default": _chosen(cls),
    }
    every = {field.name for field in own(_base())}  # `type`, since 0.3.0
    kinds = {field.name: _kind(field) for field in _fields(cls) if field.name not in every}
    kinds |= dict.fromkeys(OLD.findall("".join(map(_source, cls.__mro__))), "?")
    classes[cls.__name__] = {"class": cls.__name__, "fields": kinds}
    classes[cls.__name__] |= {name: value for name, value in others.items() if value}
    for one in (*below, *types.values(), *(_section(field.type) for field in _fields(cls))):
        _collect(one, classes)


def _source(cls: Any) -> str:
    return inspect.getsource(cls) if issubclass(cls, _base()) and cls is not _base() else ""


def _below(cls: Any) -> set[Any]:
    return {member for one in cls.__subclasses__() for member in (one, *_below(one))}


def _chosen(cls: Any) -> str:
    """Return the subclass of `cls` that Fast-LLM uses for an empty section. Return an empty string if
    Fast-LLM uses `cls` itself, or refuses an empty section.
    """
    try:
        with first(["fast_llm.config:NoAutoValidate"])():
            default = type(cls._from_dict({}))
    except TypeError as error:
        # The class itself is abstract, or has a field without a default.
        if cls.__name__ not in str(error):
            raise
        return ""
    return "" if default is cls else str(default.__name__)


def _kind(field: AnyField[Any]) -> str:
    """Return the type of a field in the notation of `signatures.Class`."""
    section, kind = _section(field.type), _alone(field.type)
    if section:
        return f"{'{}' if get_origin(kind) is dict else ''}{section.__name__}"
    if kind in (int, float):
        return f"{kind.__name__}{_limit(getattr(field, 'valid', None))}"
    return kind.__name__ if kind in (bool, str) else "?"


def _alone(annotation: Any) -> Any:
    """Return `T` for the annotation `T | None`, and any other annotation unchanged."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    union = get_origin(annotation) in (Union, UnionType)
    return kinds[0] if union and len(kinds) == 1 else annotation


def _section(annotation: Any) -> Any:
    """Return the config class of a section, or of each entry of a mapping; None for other types."""
    kind = _alone(annotation)
    kind = get_args(kind)[1] if get_origin(kind) is dict else kind
    kind = get_origin(kind) or kind
    return kind if isinstance(kind, type) and issubclass(kind, _base()) else None


def _limit(valid: Any) -> str:
    """Return the limit in a validation function, which keeps the assertion and its arguments in a closure."""
    if not inspect.isfunction(valid):
        return ""
    closure = inspect.getclosurevars(valid).nonlocals
    sign = LIMITS.get(getattr(closure.get("fn"), "__name__", ""))
    return f"{sign}{closure['args'][0]}" if sign else _limit(closure.get("fn"))


def path_of(file: str, row: Row) -> str:
    """Return the path of the setting that a row describes."""
    return str(row["key"] if file == "keys.json" else f"model.base_model.{row['class']}")
