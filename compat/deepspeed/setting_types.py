"""Types of settings, with their bounds and the spellings that they take."""

# No annotation is a text here: pydantic would compile each of them at every start.
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import BeforeValidator, Field as field

from bridge.plan.section import (
    Beta as Beta,
    Fraction as Fraction,
    NonNegative as NonNegative,
    Positive as Positive,
    Whole,
)

DTYPES = {
    name: short
    for short, names in {
        "fp32": ("fp32", "float32", "float", "torch.float32"),
        "fp16": ("fp16", "float16", "half", "torch.float16"),
        "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    }.items()
    for name in names
}
"""Our short name for each of DeepSpeed's spellings of a number format (runtime/config.py,
DtypeEnum).
"""


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _scalar(value: Any) -> Any:
    # pydantic would take true for 1.0.
    if value is True or value is False:
        raise ValueError("expected a number, not true or false")
    return value


# 2 to the power of 128 is more than the largest number in fp32.
ScalePower = Annotated[Whole, Ge(0), Le(127)]
Dtype = Annotated[
    Literal["fp32", "fp16", "bf16"],
    BeforeValidator(lambda value: DTYPES.get(value, value) if isinstance(value, str) else value),
]
CommDtype = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_lower)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(_tuple)]
# DeepSpeed takes one name for a list of one
# (runtime/zero/leaf_module_config.py, _coerce_container_types).
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else _tuple(value)),
]
Auto = Literal["auto"]
Rates = Annotated[
    NonNegative | tuple[NonNegative, ...], BeforeValidator(_tuple), BeforeValidator(_scalar)
]
Opaque = dict[str, Any]
Items = list[Any]
Tuple = Annotated[tuple[Any, ...], BeforeValidator(_tuple)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_tuple)]
Strings = list[str]
NonEmpty = Annotated[str, field(min_length=1)]
Passes = list[Literal["z1", "z3", "autosp", "autotp"]]
WriterType = Annotated[Literal["MOCK", "PYTHON", "FAST"], BeforeValidator(_upper)]
WritersPer = Annotated[Literal["REPLICA", "SOCKET", "MACHINE"], BeforeValidator(_upper)]
TagValidation = Annotated[Literal["WARN", "IGNORE", "FAIL"], BeforeValidator(_upper)]
Reduction = Annotated[Literal["mean", "sum"], BeforeValidator(_lower)]
