"""Types of settings, with their bounds and the spellings that they take."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator

from bridge.plan.section import Fraction as Fraction, NonNegative as NonNegative, Real

IMPORTANCE = {
    "core": 0,
    "architecture": 0,
    "optional": 10,
    "feature": 10,
    "performance": 20,
    "stability": 20,
    "logging": 30,
    "expert": 40,
    "testing": 40,
    "wip": 80,
    "deprecated": 80,
}
"""A table from the groups of fields in Fast-LLM's hints to verbosities. A dump contains the fields
of a group if its verbosity is at least this one (config.py, FieldHintImportance).
"""

DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Fast-LLM's name for each of our short names of number formats (engine/config_utils/data_type.py)."""
PREFIXES = ("DataType", "numpy", "np", "torch", "triton.language", "tl")


def _dtype(value: Any) -> Any:
    """Return the name of a number format without its module: `torch.bfloat16` becomes `bfloat16`."""
    prefix, _, name = value.rpartition(".") if isinstance(value, str) else ("", "", value)
    return name if prefix in PREFIXES else value


Dtype = Annotated[
    Literal[
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
        "fp64",
        "fp32",
        "fp16",
        "bf16",
    ],
    BeforeValidator(_dtype),
]
Level = Annotated[int, Ge(0)]
Positive = Annotated[int, Gt(0)]
PositiveReal = Annotated[Real, Gt(0)]
Free = dict[str, Any]
ZeroLevel = Annotated[int, Ge(1), Le(3)]
Strings = list[str]
Reals = list[Real]
