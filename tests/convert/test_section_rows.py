"""Schemas made of rows: types, defaults and names, and what a row with a mistake does."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

import compat
from bridge.plan.section import Section, fields
from bridge.plan.section_rows import TYPES, read_rows, read_type

STACKS = tuple(
    name for name in compat.names() if Path(compat.__path__[0], name, "schema.json").is_file()
)
each = pytest.mark.parametrize("name", STACKS)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("bool", bool),
        ("int | str", int | str),
        ("'a' | 'b' | None", Literal["a", "b"] | None),
        ("bool | 'auto'", bool | Literal["auto"]),
        ("False | 1", Literal[False, 1]),
    ],
)
def test_a_type_is_read_as_python_reads_it(text: str, kind: Any) -> None:
    found = read_type(text, dict(TYPES))
    assert found == kind and get_args(found) == get_args(kind)


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(KeyError, match="Sizes"):
        read_type("int | Sizes", dict(TYPES))


@each
def test_every_row_is_a_field_of_its_class(name: str) -> None:
    module: Any = __import__(f"compat.{name}.schema", fromlist=["SCHEMA"])
    for section in read_rows(f"compat.{name}"):
        kind: type[Section] = getattr(module, section.name)
        own = list(kind.model_fields)[-len(section.fields) :] if section.fields else []
        assert own == [row["name"] for row in section.fields]
        for row in section.fields:
            assert kind.model_fields[row["name"]].description == row["doc"] and row["doc"]
    assert fields(module.SCHEMA)


@each
def test_a_section_survives_pickling(name: str) -> None:
    made = compat.load(name).schema()
    assert pickle.loads(pickle.dumps(made)) == made and repr(made).startswith(type(made).__name__)
