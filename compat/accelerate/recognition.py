"""Recognises runs that accelerate starts: its config files, its launches, and arguments of the Trainer with FSDP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bridge.files import Launch, Script
from bridge.shell import spell_pieces

PROGRAMS = frozenset(
    {
        "accelerate",
        "accelerate-launch",
        "accelerate.commands.launch",
        "accelerate.commands.accelerate_cli",
    }
)
SIGNS = ("distributed_type", "compute_environment")
"""Keys of which every config of accelerate has one."""
VARIABLES = re.compile(
    r"ACCELERATE_(USE_(DEEPSPEED|FSDP|MEGATRON_LM|PARALLELISM_CONFIG|CPU)|MIXED_PRECISION|GRADIENT_\w+|(DEEPSPEED|DYNAMO)_\w+)"
)
"""Variables by which `Accelerator()` of a program that something else starts is set up."""
SWITCH, CONFIG = "fsdp", "fsdp_config"
"""The Trainer's arguments for FSDP."""


def score(data: Any) -> int:
    """Return a positive score for a config of accelerate, or a script that starts a run by it."""
    return 3 * recognises(data)


def recognises(data: Any) -> bool:
    """Return whether parsed `data` is a config of accelerate, arguments of the Trainer with FSDP, or a script that
    starts such a run.
    """
    if isinstance(data, Script):
        return any(starts_run(launch, data) for launch in data.launches)
    return isinstance(data, Mapping) and (
        (any(name in data for name in SIGNS) and not {"_target_", "optimizer"} & data.keys())
        or has_fsdp(data)
    )


def is_config(data: Any) -> bool:
    """Return whether parsed `data` is a config file of accelerate, by which it starts any program."""
    return isinstance(data, Mapping) and recognises(data) and not has_fsdp(data)


def is_launch(launch: Launch) -> bool:
    """Return whether accelerate starts a run."""
    return any(spell_pieces(word).rpartition("/")[2] in PROGRAMS for word in launch.launcher)


def has_fsdp(data: Mapping[Any, Any]) -> bool:
    """Return whether a mapping is arguments of the Trainer with FSDP."""
    return (
        bool(data.get(SWITCH))
        and bool({CONFIG, "output_dir"} & data.keys())
        and "distributed_type" not in data
        and not data.get("deepspeed")
    )


def has_arguments(data: Any) -> bool:
    """Return whether parsed data is arguments of the Trainer, with nothing that shares out the model."""
    own = isinstance(data, Mapping) and "output_dir" in data and not data.get("deepspeed")
    return own and not any(name in data for name in SIGNS)


def starts_run(launch: Launch, script: Script) -> bool:
    """Return whether accelerate sets a run up: it starts it, or its program is the Trainer or has variables of accelerate."""
    return is_launch(launch) or starts_trainer(launch) or has_variables(launch, script)


def has_variables(launch: Launch, script: Script) -> bool:
    """Return whether the environment of a launch sets up the program's `Accelerator()`."""
    return any(VARIABLES.fullmatch(name) for name in (*script.outside, *launch.environment))


def starts_trainer(launch: Launch) -> bool:
    """Return whether the words of a command are the Trainer's: FSDP, or the batch and the folder that it needs."""
    names = {text.partition("=")[0].removeprefix("--").replace("-", "_") for text in launch.texts}
    return SWITCH in names or names >= {"output_dir", "per_device_train_batch_size"}
