"""Types of settings, with their bounds and the spellings that they take."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen
from pydantic import BeforeValidator

from bridge.plan.section import (
    Beta as Beta,
    Count,
    Fraction as Fraction,
    NonNegative as NonNegative,
    Positive as Positive,
    Whole,
    tuples,
)


def _word(value: Any) -> Any:
    if (
        isinstance(value, str)
        and value.startswith("-")
        and not re.fullmatch(r"-\d+|-\d*\.\d+", value)
    ):
        raise ValueError(
            "expected a word that does not start with a dash, because a command line reads such a word as an option"
        )
    return value


def _numbers(value: Any) -> Any:
    """Return a list with each number as a word, as on the command line. Return other values
    unchanged.
    """
    if isinstance(value, list | tuple):
        return tuple(
            repr(item) if isinstance(item, int | float) and not isinstance(item, bool) else item
            for item in value
        )
    return value


def _name(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", value):
        raise ValueError(
            "expected the name of a Python object, such as model or transformers.LlamaAttention"
        )
    return value


Power = Annotated[Whole, Ge(0), Le(127)]
Steps = Annotated[Whole, Ge(-1)]
Word = Annotated[str, BeforeValidator(_word)]
Words = Annotated[tuple[Word, ...], BeforeValidator(tuples), MinLen(1)]
NumberWords = Annotated[tuple[Word, ...], BeforeValidator(_numbers), MinLen(1)]
Strings = Annotated[tuple[str, ...], BeforeValidator(tuples)]
Name = Annotated[str, BeforeValidator(_name)]
Names = Annotated[tuple[Name, ...], BeforeValidator(tuples)]
Style = Literal["col", "row"]
Ratio = tuple[Count, Count, Style]
Cut = tuple[str, Literal[0, 1]]
Strategy = Literal["no", "steps", "epoch"]
Schedule = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "warmup_stable_decay",
]
Ratios = Annotated[tuple[Ratio, ...], BeforeValidator(tuples)]
Cuts = Annotated[tuple[Cut, ...], BeforeValidator(tuples)]
Free = dict[str, Any]
