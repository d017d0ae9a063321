"""Arguments of Hugging Face's Trainer with their defaults, by release of transformers.

The data were read from the class TrainingArguments (transformers/training_args.py) of each release.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from importlib.resources import files
from typing import Any

from packaging.version import Version

from bridge.files import scalar
from bridge.stack.sources import DEFAULT, Placed, Said

DATA: Mapping[str, Any] = json.loads(
    files("bridge.stack").joinpath("training_arguments.json").read_text("utf-8")
)
TRL: Mapping[str, Any] = json.loads(
    files("bridge.stack").joinpath("trl_arguments.json").read_text("utf-8")
)
"""Classes of trl that are TrainingArguments with other defaults, read from its release (trl/trainer/*_config.py)."""
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

INSTEAD: Mapping[str, str] = {
    "evaluation_strategy": "write eval_strategy",
    "adafactor": "write optim adafactor",
    "no_cuda": "write use_cpu",
    "per_gpu_train_batch_size": "write per_device_train_batch_size, from which alone DeepSpeed's sizes follow",
    "fsdp_min_num_params": "write min_num_params in fsdp_config",
    "fsdp_transformer_layer_cls_to_wrap": "write transformer_layer_cls_to_wrap in fsdp_config",
    "group_by_length": "write train_sampling_strategy group_by_length",
    "warmup_ratio": "write the share as warmup_steps, a number below 1",
}
"""What to do in place of a retired argument."""

QUIET = frozenset(
    {
        "batch_eval_metrics", "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory",
        "dataloader_prefetch_factor", "ddp_timeout", "debug", "disable_tqdm", "do_eval", "do_predict",
        "enable_jit_checkpoint", "eval_accumulation_steps", "eval_delay", "eval_do_concat_batches", "eval_on_start",
        "eval_steps", "eval_strategy", "eval_use_gather_object", "evaluation_strategy", "greater_is_better",
        "hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy", "hub_token",
        "include_for_metrics", "include_num_input_tokens_seen", "load_best_model_at_end", "local_rank", "log_level",
        "log_level_replica", "log_on_each_node", "logging_dir", "logging_first_step", "logging_nan_inf_filter",
        "logging_steps", "logging_strategy", "metric_for_best_model", "output_dir", "overwrite_output_dir",
        "per_device_eval_batch_size", "prediction_loss_only", "project", "push_to_hub", "report_to", "run_name",
        "save_only_model", "save_safetensors", "save_steps", "save_strategy", "save_total_limit",
        "skip_memory_metrics", "torch_empty_cache_steps", "trackio_bucket_id", "trackio_space_id",
        "trackio_static_space_id",
    }
)  # fmt: skip
"""TrainingArguments that no training step depends on: evaluation, logs, checkpoints, and how data is
loaded (trainer.py in transformers 4 and 5).
"""

SHOWN: Mapping[str, Any] = {
    name: usual
    for name, usual in {**dict.fromkeys(RETIRED), **ARGUMENTS}.items()
    if name not in QUIET and name != "deepspeed"
}
"""Arguments that a training step may depend on, each with its default; the DeepSpeed file is a source of its own."""


TRUTHS = {
    **dict.fromkeys(("yes", "true", "t", "y", "1"), True),
    **dict.fromkeys(("no", "false", "f", "n", "0"), False),
}
"""What HfArgumentParser takes for a truth value, in any case (hf_argparser.py: string_to_bool)."""


SHARES = ("warmup_steps", "logging_steps", "save_steps", "eval_delay")
"""Arguments with a whole number as default that take a share of all steps too."""


def find_negated(flag: str) -> str:
    """Return the argument that a flag such as `--no_average_tokens_across_devices` sets to false; empty for another flag.
    HfArgumentParser has one for each switch that is on by default (hf_argparser.py: _parse_dataclass_field).
    """
    name = flag.removeprefix("--no").replace("-", "_")
    usual = (ARGUMENTS, *TRL["defaults"].values())
    is_on = name[:1] == "_" and any(own.get(name[1:]) is True for own in usual)
    return name[1:] if is_on else ""


def read_word(name: str, text: str, flag: str = "") -> Any:
    """Return the value of an argument from its word on a command line, behind `flag`. A number that is no whole one
    stays a text where the parser takes whole ones alone, and stops.
    """
    if find_negated(flag):
        return False
    usual, value = ARGUMENTS.get(name), scalar(text)
    if isinstance(usual, bool):
        return TRUTHS.get(text.lower(), value)
    whole = type(usual) is int and name not in SHARES
    return text if whole and isinstance(value, float) else value


def describe_lack(name: str, window: str) -> str:
    """Return the message about an argument that releases in `window` lack: `since` or `before` one of them."""
    return (
        f"transformers has no such argument {window}, and its parser stops there unless the program has"
        f" one of its own; {INSTEAD.get(name, 'drop it')}"
    )


def find_last_release(names: Collection[str]) -> str | None:
    """Return the newest release in the data that still has all arguments of `names`; None if none of them is retired."""
    gone = [Version(RETIRED[name]) for name in names if name in RETIRED]
    known = (DATA["oldest"], *(row["release"] for row in DATA["changes"]))
    return max((one for one in known if Version(one) < min(gone)), key=Version) if gone else None


def default_of_trl(name: str, given: Collection[str]) -> Placed:
    """Return the defaults of a class of trl, next to the arguments `given`; nothing for another class. It computes in bf16
    unless it is told to in fp16 (trl/trainer/base_config.py).
    """
    own = dict(TRL["defaults"].get(name, {}))
    if "fp16" in given:
        own.pop("bf16", None)
    source = f"trl {TRL['release']} {name}{DEFAULT}"
    return Placed(own, {key: Said(key, value, source) for key, value in own.items()})


def find_defaults(*names: str) -> dict[str, Any]:
    """Return arguments of the newest release with their defaults."""
    return {name: ARGUMENTS[name] for name in names}
