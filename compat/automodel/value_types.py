"""Types of the values of a recipe's settings, and the names of these types in messages."""

from __future__ import annotations

from functools import cache

from bridge.plan.values import Leaves
from compat.automodel.schema import AutoModel
from compat.automodel.setting_types import DTYPES, Dtype, Mode, ModelDtype

LEAVES = Leaves(
    AutoModel,
    {
        Dtype: f"a number format such as {', '.join(list(DTYPES)[1:9:3])}",
        ModelDtype: "a number format such as bfloat16, or auto",
        Mode: "true, false or selective",
    },
)
typed, expected = LEAVES.as_typed, LEAVES.describe_values


@cache
def takes_text(path: str) -> bool:
    """Whether a setting has a text as value, so that a loader must not turn it into a number."""
    return "text" in expected(path) or expected(path).startswith(
        ("a number format", "true, false or", "one of", "a list")
    )
