"""Recognises sources of Merak, although other stacks share many of its argument names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from bridge.files import Launch, Script
from bridge.stack.releases import table
from compat.merak import releases

ALONE = frozenset(
    {
        "train_schedule",
        "partition_method",
        "split_method",
        "custom_split_points",
        "custom_partition",
        "trace_method",
        "trace_model",
        "checkpoint_num_layers",
        "shard_count",
        "cache_sharding",
        "parallel_vocab",
        "sequence_dim",
        "dealloc_pipeoutput",
        "activation_checkpoint_ratio",
        "tp_overlapping_level",
        "zero_stage",
        "zero_allgather_bucket_size",
        "zero_reduce_bucket_size",
        "no_tie_modules",
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "lora_config",
        "split_inputs",
        "input_names",
    }
)
"""Names of keys at the top level that no other stack of stagebridge has."""


@cache
def _names() -> frozenset[str]:
    # From the facts of releases: recognition reads every source, and must not need the schema.
    rows = (row["name"] for file in releases.FACTS for row in table(releases.__name__, file))
    return frozenset(path.partition(".")[2] for path in (*releases.TRAINER, *rows))


def score(data: Any) -> int:
    """Return the number of Merak's names in a source; 0 if the source belongs to another stack."""
    if isinstance(data, Script):
        own = ALONE.difference(SHARED)
        for launch in data.launches:
            names = {word.removeprefix("--").partition("=")[0] for word in launch.texts}
            if is_launch(launch) and not names.isdisjoint(own):
                return 1
        return 0
    if isinstance(data, Mapping):
        return _sections(data) or _count([str(key) for key in data])
    if isinstance(data, Sequence) and not isinstance(data, str):
        options = (str(word).partition("=")[0] for word in data)
        return _count([option[2:] for option in options if option.startswith("--")])
    return 0


TRAINER = ("per_device_train_batch_size", "per_device_eval_batch_size")
"""Names that Merak's arguments share with TrainingArguments of Hugging Face. A config that has no
other name of Merak is not recognised as Merak's.
"""
SHARED = (*TRAINER, "zero_stage")
"""Names of arguments that scripts of other stacks with Hugging Face's arguments use too."""


def is_launch(launch: Launch) -> bool:
    """Return whether a command in a script starts a Merak run. A command with `--deepspeed` does
    not: it starts a script with Hugging Face's Trainer, whose arguments have many of Merak's names.
    """
    words = launch.texts
    return not any(word.startswith("--deepspeed") for word in words) and bool(score(words))


def _sections(data: Mapping[Any, Any]) -> int:
    sections = [name for name in ("init", "args", "trainer", "tp_lists") if name in data]
    inner = data.get("args") if "args" in data else data.get("init")
    if not set(data) <= {"init", "args", "trainer", "tp_lists"} or not isinstance(
        inner, Mapping | list | tuple
    ):
        return 0
    return len(sections) + sum(str(key) in _names() for key in inner)


def _count(names: Sequence[str]) -> int:
    # Names that other stacks have too are counted only beside one that is Merak's alone.
    own = any(name in ALONE and name not in TRAINER for name in names)
    count = sum(name in _names() for name in names)
    # Names that Merak does not have speak against it: it has one of a few shared names by chance.
    return 1 + count if own and 2 * count >= len(names) else 0
