"""Facts about each Merak release: its arguments, their defaults in the source, and their defaults
in the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar

from bridge.releases import Release as AnyRelease
from bridge.releases import Releases, table

RELEASES = Releases(
    "merak",
    ("0.1.0", "1.1.1", "2.0.0", "2.0.1", "2.1.0", "2.2.0", "2.2.1", "2.2.2", "2.2.2+main"),
)
KNOWN = RELEASES.known
"""Releases, oldest first: the tags of Merak's repository, and its main branch (commit 1593043 of
2026-02-11), whose setup.py still has version 2.2.2.
"""

ULYSSES = "2.2.2+main"
"""First release in which `init` has the parameter `sp` (commit 856746c of 2025-06-06). This release
also changed the meaning of `sequence_parallel`.
"""
REWRITTEN = "2.0.0"
"""First release with a trainer of its own. Earlier releases derive their trainer from the Trainer
of transformers 4.15.0.
"""

SCRIPT: Mapping[str, str] = {
    **{f"init.{name}": "0.1.0" for name in ("pp", "tp", "dp", "backend")},
    "init.sp": ULYSSES,
    **{
        f"trainer.{name}": "0.1.0"
        for name in (
            "model",
            "train_dataset",
            "eval_dataset",
            "data_collator",
            "leaf_modules",
            "loss_fn",
        )
    },
    **{
        f"tp_lists.{name}": "0.1.0"
        for name in (
            "col_para_list",
            "row_para_list",
            "input_output_mapping",
            "weight_change_list",
            "tp_attr_list",
        )
    },
    "tp_lists.conv_para_list": "2.1.0",
}
"""Parameters of `init`, of the trainer and of `set_tp_layer_lists`, each with the first release
that has it.
"""

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
def histories() -> Mapping[str, list[list[Any]]]:
    """Return the history of each argument: a list of `[release, default]` for a new default, and
    `[release]` for the removal.
    """
    record = table(__name__, "arguments.json")
    return MappingProxyType(
        {
            f"args.{name}": history
            for part in ("own", "inherited")
            for name, history in record[part].items()
        }
    )


@cache
def release(version: str) -> Release:
    """Return the facts of release `version`."""
    arguments: dict[str, Any] = {}
    for path, history in histories().items():
        # The last step up to this release; one without a default means that the argument was
        # removed.
        steps = (step for step in reversed(history) if RELEASES.since(version, step[0]))
        step: list[Any] = next(steps, [])
        if len(step) == 2:
            arguments[path] = step[1]
    script = {path: None for path, first in SCRIPT.items() if RELEASES.since(version, first)}
    documented = [row for first, row in DOCUMENTED.items() if RELEASES.since(version, first)][-1]
    return Release(version, MappingProxyType({**script, **arguments}), documented)


@cache
def lifetime(path: str) -> str:
    """Return the releases that have `path`, as text such as "1.1.1 to 2.2.2"."""
    having = [version for version in KNOWN if path in release(version).defaults]
    if not having:
        return "none"
    return having[0] if len(having) == 1 else f"{having[0]} to {having[-1]}"
