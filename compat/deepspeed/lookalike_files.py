"""Recognizes files that people confuse with a config of DeepSpeed, and names the file that they
need instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compat.deepspeed.trainer import DEFAULTS

OWN = ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "optimizer")
"""Keys of DeepSpeed's configs. A file with one of these keys counts as a DeepSpeed config."""
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
"""A file with at least this many TrainingArguments counts as a dump of TrainingArguments."""


def name_other_file(data: Any) -> str:
    """Return a message if the parsed file `data` belongs to accelerate or to Hugging Face's
    Trainer, else an empty string. The message says what the file is and which file to give instead.
    """
    if not isinstance(data, Mapping) or any(key in data for key in OWN):
        return ""
    if any(key in data for key in ACCELERATE):
        return _accelerate(data)
    return _trainer(data) if len(TRAINER & data.keys()) >= ENOUGH else ""


def _accelerate(data: Mapping[str, Any]) -> str:
    plugin = data.get(PLUGIN)
    if not isinstance(plugin, Mapping):
        return (
            "a config of accelerate, which only describes how processes are started; give the"
            " DeepSpeed config or the launch script of the training instead"
        )
    file = plugin.get(PLUGIN_FILE)
    if isinstance(file, str) and file:
        return f"a config of accelerate, which names DeepSpeed's own file; give {file} instead"
    return (
        f"a config of accelerate, which builds DeepSpeed's config from its section {PLUGIN} and"
        " from the launch; give the script with the line: accelerate launch --config_file FILE"
        " train.py"
    )


def _trainer(data: Mapping[str, Any]) -> str:
    file = data.get("deepspeed")
    config = file if isinstance(file, str) and file else "DEEPSPEED.json"
    return (
        "TrainingArguments of Hugging Face's Trainer, which fill in a DeepSpeed config; give"
        f" {config} instead, and pass this file with --auto-from"
    )
