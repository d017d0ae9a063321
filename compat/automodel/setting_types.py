"""Types of settings, with their bounds and the spellings that they take."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from bridge.plan.families.schema import ModelKeys as ModelKeys
from bridge.plan.section import (
    Beta as Beta,
    Fraction as Fraction,
    NonNegative as NonNegative,
    Positive as Positive,
    tuples,
)

DTYPES = {
    name: short
    for short, names in {
        "fp64": ("fp64", "float64", "double"),
        "fp32": ("fp32", "float32", "float", "32-true", "32"),
        "fp16": ("fp16", "float16", "half", "16-true"),
        "bf16": ("bf16", "bfloat16", "bf16-true"),
    }.items()
    for name in names
}
"""Spellings of each number format, each with its short name."""
SPELLED = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bf16"}
"""Spelling of each short name in a written file."""
_TORCH = ("float64", "double", "float32", "float", "float16", "half", "bfloat16")
TAKEN = frozenset(("bf16", "auto", *(dot + name for dot in ("", "torch.") for name in _TORCH)))
"""The spellings that AutoModel itself accepts (shared/utils.py, dtype_from_str)."""


def _dtype(value: Any) -> Any:
    # A live torch.dtype is known by its type's name, so that no torch has to be imported.
    text = str(value) if type(value).__name__ == "dtype" else value
    return DTYPES.get(text.lower().removeprefix("torch."), text) if isinstance(text, str) else text


NAMED_MODES = {
    **dict.fromkeys(("false", "off", "none", "disabled", "no"), False),
    **dict.fromkeys(("true", "on", "full", "enabled", "yes"), True),
}
"""Texts that AutoModel reads as a switch (recipes/_dist_utils.py,
_normalize_activation_checkpointing).
"""


def _mode(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = value.lower().replace("-", "_")
    return NAMED_MODES.get(text, text)


Dtype = Annotated[Literal["fp64", "fp32", "fp16", "bf16"], BeforeValidator(_dtype)]
ModelDtype = Annotated[Literal["fp64", "fp32", "fp16", "bf16", "auto"], BeforeValidator(_dtype)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(tuples)]
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else tuples(value)),
]
Parts = Annotated[tuple[tuple[str, ...], ...], BeforeValidator(tuples)]
Mode = Annotated[bool | Literal["selective"], BeforeValidator(_mode)]
Rounding = Literal["up", "down"]
Strategy = Annotated[
    Literal["fsdp2", "megatron_fsdp", "megatron-fsdp", "mfsdp", "ddp"],
    BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
]
Free = dict[str, Any]

REST = "*"
"""Name of the field in which a section keeps all settings that the schema does not list."""


Shape = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
MeshAxes = Annotated[tuple[Literal["cp"]], BeforeValidator(tuples)]
Items = list[Any]
