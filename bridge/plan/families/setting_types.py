"""Types of the keys of a model's config, and how a file spells their values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator

from bridge.plan.section import Real, Size, Whole, tuples

Null = Literal["null"]
Positive = Annotated[Real, Gt(0)]
Share = Annotated[Real, Ge(0), Le(1)]
NonNegative = Annotated[Real, Ge(0)]
Kinds = Annotated[
    tuple[Literal["full_attention", "sliding_attention"], ...], BeforeValidator(tuples)
]
Sorts = Annotated[tuple[Literal["dense", "sparse"], ...], BeforeValidator(tuples)]
Sizes = Annotated[tuple[Size, ...], BeforeValidator(tuples)]
Switches = Annotated[tuple[bool, ...], BeforeValidator(tuples)]
Bits = Annotated[tuple[Literal[0, 1], ...], BeforeValidator(tuples)]
Token = Whole | str | Null
"""The number of a token; a text is kept, because releases differ in what they do with it."""
Tokens = Annotated[tuple[Whole | str, ...] | Token, BeforeValidator(tuples)]
Free = dict[str, Any]
REST = "*"
"""Where a config keeps keys that its schema does not name."""
WHOLE = ("query_pre_attn_scalar",)
"""Keys that transformers accepts only as whole numbers, although the plan's field may hold a
fraction.
"""


def spell_value(key: str, value: Any) -> Any:
    """Return a value as a file spells it: null for `NULL`, a list for a tuple, and an int for a
    float if the key is in `WHOLE`.
    """
    if isinstance(value, str) and value == "null":
        return None
    if key in WHOLE and isinstance(value, float) and value.is_integer():
        return int(value)
    return list(value) if isinstance(value, tuple) else value


Part = Annotated[Real, Gt(0), Le(1)]
Index = Annotated[Whole, Ge(-1)]
