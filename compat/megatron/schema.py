"""Megatron's schema: the types of all arguments and config fields of all releases.

Releases, defaults and flags are data.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import Field as field, create_model

from bridge.plan.section import Count, Real, Section, Whole
from compat.megatron import options
from compat.megatron.arguments.sizes import DIVISORS

TYPES: dict[str, Any] = {"int": Whole, "float": Real, "bool": bool, "str": str}


@cache
def schema() -> type[Section]:
    """Return the pydantic class of the schema. It is built once, from the tables of all releases."""
    descriptions = options.descriptions()
    # pydantic does not allow a name with a leading underscore, only an alias.
    fields: dict[str, Any] = {
        dest.lstrip("_"): (
            _type(dest),
            field(
                None,
                alias=dest if dest.startswith("_") else None,
                description=descriptions.get(dest, ""),
            ),
        )
        for dest in options.groups()
    }
    model: type[Section] = create_model("Megatron", __base__=Section, **fields)
    return model


def _type(dest: str) -> Any:
    # Every argument may be open. A type that only some releases' flags have is left to their
    # parsers.
    if dest in DIVISORS:
        return Count | None
    kind = options.type_of(dest)
    return TYPES[kind] | None if kind in TYPES else Any
