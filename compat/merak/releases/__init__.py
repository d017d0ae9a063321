"""Facts about each Merak release: its arguments, their defaults in the source, and their defaults
in the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar

from bridge.stack.releases import Release as AnyRelease, Releases, table

DATES: Mapping[str, str] = MappingProxyType(table(__name__, "known.json"))
"""Releases with their dates, oldest first: the tags of Merak's repository, and its main branch
(commit 1593043), whose setup.py still has version 2.2.2.
"""
RELEASES = Releases("merak", tuple(DATES))
KNOWN = RELEASES.known
FACTS = ("inherited.json", "arguments.json")
"""Arguments of transformers' `TrainingArguments`, and what Merak itself declares."""

ULYSSES = "2.2.2+main"
"""First release in which `init` has the parameter `sp` (commit 856746c of 2025-06-06). This release
also changed the meaning of `sequence_parallel`.
"""
REWRITTEN = "2.0.0"
"""First release with a trainer of its own. Earlier releases derive their trainer from the Trainer
of transformers 4.15.0.
"""

TRAINER = tuple(
    f"trainer.{name}"
    for name in (
        "model",
        "train_dataset",
        "eval_dataset",
        "data_collator",
        "leaf_modules",
        "loss_fn",
    )
)
"""Settings of the trainer. A script passes each to the trainer or to its base class, or sets it as an attribute."""

DOCUMENTED: Mapping[str, Mapping[str, Any]] = {
    "0.1.0": {"args.shard_count": "num_layers * 2"},
    "1.1.1": {"args.shard_count": "num_layers * 2"},
    "2.0.0": {
        "args.partition_method": "uniform",
        "args.split_method": "farthest_min_deps",
        "args.wall_clock_breakdown": False,
        "args.zero_stage": 1,
        "args.shard_count": "num_layers * 2",
        "args.eval_iters": None,
        "args.text_generation": False,
    },
}
"""Defaults in `docs/api_doc.md` that differ from the source, by the first release that documents
them.
"""


@dataclass(frozen=True)
class Release(AnyRelease):
    """One release: its arguments and parameters by schema path, each with its default."""

    among: ClassVar[Releases] = RELEASES
    defaults: Mapping[str, Any]
    documented: Mapping[str, Any]


@cache
def release(version: str) -> Release:
    """Return the facts of release `version`."""
    # A script states its parameters; their own defaults are no values of a config.
    defaults: dict[str, Any] = dict.fromkeys(TRAINER)
    for row in (row for file in FACTS for row in table(__name__, file)):
        if RELEASES.within(version, row.get("since", ""), row.get("until", "")):
            defaults[row["name"]] = row["default"] if row["name"].startswith("args.") else None
    documented = [row for first, row in DOCUMENTED.items() if RELEASES.since(version, first)][-1]
    return Release(version, MappingProxyType(defaults), documented)


@cache
def lifetime(path: str) -> str:
    """Return the releases that have `path`, as text such as "1.1.1 to 2.2.2"."""
    having = [version for version in KNOWN if path in release(version).defaults]
    if not having:
        return "none"
    return having[0] if len(having) == 1 else f"{having[0]} to {having[-1]}"
