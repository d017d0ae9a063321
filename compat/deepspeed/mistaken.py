"""Files that people take for a config of DeepSpeed: what each
of them is, and what to name instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compat.deepspeed.trainer import DEFAULTS

OWN = ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "optimizer")
"""A config of DeepSpeed has at least one of these keys."""
ACCELERATE = ("compute_environment", "distributed_type")
"""Keys of a file that `accelerate config` writes."""
PLUGIN, PLUGIN_FILE = "deepspeed_config", "deepspeed_config_file"
TRAINER = frozenset(
    {
        "output_dir",
        "num_train_epochs",
        "per_device_eval_batch_size",
        "logging_steps",
        "save_steps",
        *DEFAULTS,
    }
)
"""Names of TrainingArguments."""
ENOUGH = 3
"""A file with so many of these names is a dump of TrainingArguments."""


def mistaken(data: Any) -> str:
    """What parsed `data` is instead of a config of DeepSpeed,
    and what to do; empty if it is neither kind of file."""
    if not isinstance(data, Mapping) or any(key in data for key in OWN):
        return ""
    if any(key in data for key in ACCELERATE):
        return _accelerate(data)
    return _trainer(data) if len(TRAINER & data.keys()) >= ENOUGH else ""


def _accelerate(data: Mapping[str, Any]) -> str:
    plugin = data.get(PLUGIN)
    if not isinstance(plugin, Mapping):
        return "a config of accelerate, which says how processes start; name the training's own launch or config"
    file = plugin.get(PLUGIN_FILE)
    if isinstance(file, str) and file:
        return f"a config of accelerate; it names DeepSpeed's own file: read {file} instead"
    return (
        f"a config of accelerate, which builds DeepSpeed's config from its section {PLUGIN}; write that config as JSON, "
        f"set {PLUGIN_FILE} to the file, and read that file instead"
    )


def _trainer(data: Mapping[str, Any]) -> str:
    file = data.get("deepspeed")
    named = file if isinstance(file, str) and file else "DEEPSPEED.json"
    stands = "TrainingArguments of Hugging Face's Trainer, which fill in a DeepSpeed file"
    return f"{stands}; read {named}, and give this file with --auto-from"
