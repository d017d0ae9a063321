"""Which types and bounds the config classes of transformers check, by key: the data of `bridge/plan/families/accepted.json`.

    python -m tests.stacks.huggingface.accepted > bridge/plan/families/accepted.json

With the installed transformers, whose configs check themselves since 5.12.1. The kinds of most families are below "".
"""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import json
import sys
from collections import Counter
from importlib.resources import files
from types import UnionType
from typing import Any, Union, get_args, get_origin

from bridge.plan import families

BASIC = (int, float, bool, str)


def kinds(annotation: Any) -> set[str]:
    """The kinds that a type annotation allows; "any" for what is not described here."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return set().union(*map(kinds, arguments))
    if annotation in (None, type(None)):
        return {"None"}
    if annotation in BASIC:
        return {annotation.__name__}
    if origin is list and len(kinds(arguments[0])) == 1:
        return {f"list of {kinds(arguments[0]).pop()}"}
    if list in (annotation, origin) or tuple in (annotation, origin):
        return {"list"}
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, dict)):
        return {"dict"}
    return {"any"}


def bounds(validator: Any) -> str:
    """The bounds of a validator made by `transformers.utils.type_validators.interval`, as text; "" for another."""
    cells = dict(zip(validator.__code__.co_freevars, validator.__closure__ or (), strict=True))
    if not {"min", "max"} <= cells.keys():
        return ""
    return f" {cells['min'].cell_contents:g}..{cells['max'].cell_contents:g}"


def annotations(cls: type) -> dict[str, Any]:
    """The annotations of a class and of those that it inherits from."""
    values: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        for name, annotation in inspect.get_annotations(base).items():
            module = {**vars(builtins), **vars(sys.modules[base.__module__])}
            try:
                values[name] = (
                    eval(annotation, module) if isinstance(annotation, str) else annotation
                )
            except (NameError, AttributeError):  # imported for type checkers alone
                values[name] = Any
    return values


def harvest() -> dict[str, dict[str, str]]:
    """Return the kinds by key, and by the families (separated by spaces) that have them."""
    from transformers import CONFIG_MAPPING

    rows: dict[str, dict[str, list[str]]] = {}
    for family in filter(
        None, json.loads(files(families).joinpath("read.json").read_text("utf-8"))
    ):
        cls = CONFIG_MAPPING[family]
        types = annotations(cls)
        for field in dataclasses.fields(cls):
            validators = getattr(cls, "__validators__", {}).get(field.name)
            if validators:
                text = "|".join(sorted(kinds(types[field.name]))) + "".join(map(bounds, validators))
                rows.setdefault(field.name, {}).setdefault(text, []).append(family)
    table = {}
    for key, by_kinds in sorted(rows.items()):
        usual = Counter({text: len(families) for text, families in by_kinds.items()})
        most = usual.most_common(1)[0][0]
        others = {text: " ".join(families) for text, families in by_kinds.items() if text != most}
        if "any" not in most or others:
            table[key] = {most: "", **others}
    return table


if __name__ == "__main__":
    lines = (f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in harvest().items())
    print("{\n" + ",\n".join(lines) + "\n}")
