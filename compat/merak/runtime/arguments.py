"""`MerakArguments`: transformers' TrainingArguments with Merak's further arguments, and the
defaults of Merak's newest release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Any

from transformers import TrainingArguments

from bridge.config import below
from compat.merak import DIALECT

__all__ = ["MerakArguments"]
PREFIX = "args."
DEFAULTS: Mapping[str, Any] = below(
    PREFIX, DIALECT.defaults(DIALECT.versions[-1])
)
NUMBERS = ("num_layers", "seq_length", "hidden_size", "num_heads", "shard_count", "zero_stage")
"""Arguments whose value, if given, is a whole number."""


def _own() -> Iterator[tuple[str, Any, Any]]:
    """Arguments that Merak has and transformers does not, with their defaults."""
    theirs = {each.name for each in fields(TrainingArguments)}
    for name, value in DEFAULTS.items():
        if name not in theirs:
            kind = type(value) if value is not None else int if name in NUMBERS else str
            yield name, kind | None, field(default=value)


MerakArguments: Any = make_dataclass(
    "MerakArguments",
    list(_own()),
    bases=(TrainingArguments,),
    namespace={"__doc__": "Arguments of a run with Merak's names and defaults."},
)


def said(arguments: Any) -> dict[str, Any]:
    """Values that differ from Merak's defaults, in the form that the dialect reads."""
    found: dict[str, Any] = {}
    theirs = {each.name: each for each in fields(TrainingArguments)}
    for name, value in DEFAULTS.items():
        given = getattr(arguments, name, value)
        given = getattr(given, "value", given)
        usual = (
            theirs[name].default
            if name in theirs and theirs[name].default is not MISSING
            else value
        )
        if (
            given not in (value, getattr(usual, "value", usual))
            and name not in LEFT
            and (isinstance(given, str | int | float | bool) or _words(given))
        ):
            found[name] = given
    return found


def _words(given: Any) -> bool:
    """Whether an argument is a list of words."""
    return isinstance(given, list | tuple) and all(isinstance(word, str) for word in given)


LEFT = (
    "output_dir",
    "logging_dir",
    "report_to",
    "disable_tqdm",
    "run_name",
    "local_rank",
    "use_cpu",
    "optim",
    "resume_from_checkpoint",
)
"""Arguments that do not affect the numbers, and arguments that the trainer itself reads."""
