"""Schemas as data: sections made of rows, each of which has the name, the type and the description of a field."""

from __future__ import annotations

import json
from ast import literal_eval
from collections.abc import Iterator, Mapping
from functools import reduce
from importlib.resources import files
from itertools import chain, groupby, pairwise
from operator import or_
from typing import Any, Literal, NamedTuple

from pydantic import Field as field, create_model

from bridge.plan.section import Count, Real, Section, Size, UpToThree, Whole

TYPES: Mapping[str, Any] = {
    "None": None,
    **{kind.__name__: kind for kind in (bool, int, str, float, Section)},
    "Count": Count,
    "Real": Real,
    "Size": Size,
    "UpToThree": UpToThree,
    "Whole": Whole,
}
"""Types that every file may name."""


class SectionRows(NamedTuple):
    """A section of a schema: the name and docstring of its class, the class it extends, and its fields."""

    name: str
    base: str
    doc: str
    fields: list[dict[str, Any]]


def read_rows(package: str, file: str = "schema.json") -> Iterator[SectionRows]:
    """Yield the sections in a JSON file of `package`.

    A row with `section` begins a section, which may extend the class `base`; later sections may have it as
    a type. The rows after it are its fields. Types are separated by ` | ` and are names of classes and
    annotations, or values in Python's spelling. A field is open unless its row has `default`; of a section
    the default is `{}`. `alias` is a name that Python does not allow, `hint` is kept for the dialect.
    """
    rows = json.loads(files(package).joinpath(file).read_text("utf-8"))
    heads = [place for place, row in enumerate(rows) if "section" in row]
    for begin, end in pairwise((*heads, len(rows))):
        head = rows[begin]
        base = head.get("base", Section.__name__)
        yield SectionRows(head["section"], base, head["doc"], rows[begin + 1 : end])


def build_sections(
    module: str, types: Mapping[str, Any], file: str = "schema.json"
) -> dict[str, type[Section]]:
    """Return the classes in a JSON file next to `module` by name, as classes of that module. `types` has the
    types that the file names.
    """
    names = {**TYPES, **types}
    classes: dict[str, type[Section]] = {}
    for rows in read_rows(module.rpartition(".")[0], file):
        columns: dict[str, Any] = {row["name"]: _declare(row, names) for row in rows.fields}
        classes[rows.name] = names[rows.name] = create_model(
            rows.name, __base__=names[rows.base], __module__=module, __doc__=rows.doc, **columns
        )
    return classes


def _declare(row: Mapping[str, Any], names: dict[str, Any]) -> tuple[Any, Any]:
    """Return the annotation and the pydantic field of a row."""
    kind, default = read_type(row["type"], names), row.get("default")
    if default == {}:
        default = kind()
    return kind if "default" in row else kind | None, field(
        default,
        alias=row.get("alias"),
        description=row["doc"],
        json_schema_extra={"hint": row["hint"]} if "hint" in row else None,
    )


def read_type(text: str, names: dict[str, Any]) -> Any:
    """Return the type that a text stands for, and keep it in `names`, which has the types that the text names."""
    if text not in names:
        parts = (
            [Literal[tuple(map(literal_eval, words))]]
            if valued
            else [names[word] for word in words]
            for valued, words in groupby(text.split(" | "), is_value)
        )
        names[text] = reduce(or_, chain.from_iterable(parts))
    return names[text]


def is_value(word: str) -> bool:
    """Return whether a part of a type is a value rather than a name."""
    return word[0] in "'0123456789" or word in ("True", "False")
