"""Stubs for schemas that are made of rows: what a type checker knows of their classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from bridge.plan.section_rows import TYPES, SectionRows, is_value, read_rows

ROOT = Path(__file__).resolve().parents[2]
FILE = "schema.json"
BUILTIN = ("None", "bool", "int", "str", "float")


def pages() -> dict[str, str]:
    """The stub of every schema by its path, where the packages are next to the docs."""
    return {
        f"../{path.relative_to(ROOT).with_suffix('.pyi')}": _stub(
            ".".join(path.parent.relative_to(ROOT).parts)
        )
        for folder in ("bridge", "compat")
        for path in sorted((ROOT / folder).rglob(FILE))
    }


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
