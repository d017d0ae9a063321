"""Arguments of Hugging Face's Trainer with their defaults, by release of transformers.

The data were read from the class TrainingArguments (transformers/training_args.py) of each release.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

DATA: Mapping[str, Any] = json.loads(
    files("bridge.stack").joinpath("training_arguments.json").read_text("utf-8")
)
ARGUMENTS: Mapping[str, Any] = DATA["arguments"]
"""All arguments of the newest release, each with its default; None where the run decides. The Trainer's
AdamW is the fused one since transformers 4.54, which differs in rounding alone.
"""
SINCE: Mapping[str, str] = {
    name: row["release"] for row in DATA["changes"] for name in row.get("new", ())
}
"""Arguments that the oldest known release lacks, each with the first that has it."""
RETIRED: Mapping[str, str] = {
    name: row["release"] for row in DATA["changes"] for name in row.get("gone", ())
}
"""Arguments that the newest release lacks, each with the first that lacks it."""
CHANGED: Mapping[str, tuple[str, Any]] = {
    name: (row["release"], usual)
    for row in DATA["changes"]
    for name, usual in row.get("before", {}).items()
}
"""Arguments whose default changed: the first release with the new one, and the default before."""


def find_defaults(*names: str) -> dict[str, Any]:
    """Return arguments of the newest release with their defaults."""
    return {name: ARGUMENTS[name] for name in names}
