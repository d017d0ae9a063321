"""Stubs for classes that are made of rows, of schemas and of JSON outputs: what a type checker knows of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from bridge.plan.section_rows import TYPES, SectionRows, is_value, read_rows
from bridge.report import json_types

ROOT = Path(__file__).resolve().parents[2]
FILE = "schema.json"
BUILTIN = ("None", "bool", "int", "str", "float")


def pages() -> dict[str, str]:
    """The stub of every schema, and of the JSON outputs, by its path, where the packages are next to the docs."""
    schemas = {
        f"../{path.relative_to(ROOT).with_suffix('.pyi')}": _stub(
            ".".join(path.parent.relative_to(ROOT).parts)
        )
        for folder in ("bridge", "compat")
        for path in sorted((ROOT / folder).rglob(FILE))
    }
    return {**schemas, "../bridge/report/json_types.pyi": _outputs_stub()} if schemas else {}


def _outputs_stub() -> str:
    lines = (
        "# Made of json_types.json by `python docs/generate`.",
        "from collections.abc import Mapping",
        "from typing import Any, Literal, NotRequired",
        "",
        "from typing_extensions import TypedDict",
        "",
        "from bridge.report.exit_codes import Exit",
        "from bridge.stack.rules import Effect, How",
        "",
        f"Verdict = {_annotate(json_types.Verdict)}",
        f"Number = {_annotate(json_types.Number)}",
        *(line for row in json_types.read_rows()["types"] for line in _output(row)),
        "",
        "OUTPUTS: Mapping[str, Any]",
        "def read_rows() -> dict[str, Any]: ...",
        "def schema(name: str) -> dict[str, Any]: ...",
    )
    return "\n".join(lines) + "\n"


def _annotate(kind: Any) -> str:
    """An alias of a type as Python writes it."""
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(map(repr, get_args(kind)))}]"
    return " | ".join(map(_annotate, get_args(kind))) or (
        "None" if kind is NoneType else kind.__name__
    )


def _output(row: Mapping[str, Any]) -> Iterator[str]:
    yield f"\nclass {row['name']}({row.get('base', 'TypedDict')}):"
    yield from (f"    {name}: {kind}" for name, kind in row["fields"].items())


@cache
def _stub(package: str) -> str:
    sections = list(read_rows(package))
    words = {
        word
        for section in sections
        for word in (section.base, *(word for row in section.fields for word in _words(row)))
        if not is_value(word)
    }
    # `SCHEMA` is what a dialect finds; the keys of a model's config are part of others' schemas.
    found = hasattr(import_module(f"{package}.schema"), "SCHEMA")
    shared = sorted(words & TYPES.keys() - {*BUILTIN})
    own = sorted(words - TYPES.keys() - {section.name for section in sections})
    lines = (
        f"# Made of {FILE} by `python docs/generate`.",
        "from typing import Any, Literal",
        "",
        "from pydantic import Field as field",
        "",
        f"from bridge.plan.section import {', '.join(shared)}",
        *([f"from {package}.setting_types import {', '.join(own)}"] if own else []),
        "",
        "unset: Any",
        *(line for section in sections for line in _class(section)),
        *(["", f"SCHEMA = {sections[-1].name}"] if found else []),
    )
    return "\n".join(lines) + "\n"


def _class(section: SectionRows) -> Iterator[str]:
    yield f"\nclass {section.name}({section.base}):"
    yield from (
        f"    {row['name']}: {_annotation(row)} = {_default(row)}" for row in section.fields
    )


def _words(row: Mapping[str, Any]) -> list[str]:
    words: list[str] = row["type"].split(" | ")
    return words


def _annotation(row: Mapping[str, Any]) -> str:
    words = (f"Literal[{word}]" if is_value(word) else word for word in _words(row))
    return " | ".join((*words, *(() if "default" in row else ("None",))))


def _default(row: Mapping[str, Any]) -> str:
    default = row.get("default")
    if default == {}:
        return f"{row['type']}()"
    if "alias" in row:
        return f"field({default!r}, alias={row['alias']!r})"
    # What a release has no value for is None, whatever type the values of others have.
    unset = default is None and "default" in row and "None" not in _words(row)
    return "unset" if unset else repr(default)
