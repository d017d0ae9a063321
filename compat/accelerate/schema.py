"""Settings of a run that accelerate starts: keys of its config file, and arguments of Hugging Face's Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field as field, create_model

from bridge.plan.section import Section
from bridge.stack.training_arguments import find_defaults
from compat.accelerate.slots import facts

FSDP, SIZES, ARGUMENTS = "fsdp_config.fsdp_", "parallelism_config.parallelism_config_", "arguments."
MEGATRON = "megatron_lm_config.megatron_lm_"
"""What paths of these sections begin with."""
KINDS: Mapping[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str_to_bool": bool,
    "str": str,
}
TRAINER: Mapping[str, Any] = {
    **find_defaults(
        *("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "weight_decay"),
        *("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "optim", "lr_scheduler_type"),
        *("warmup_steps", "max_steps", "num_train_epochs", "seed", "logging_steps", "save_steps", "bf16", "fp16"),
        "average_tokens_across_devices",
    ),
    "gradient_checkpointing": False,
}  # fmt: skip
"""TrainingArguments that a plan has, each with the Trainer's default."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {row["name"]: row for row in facts()["options"]}


def path_of(name: str) -> str:
    """Return the path of the config file at which the launcher's option `name` is."""
    sections = {"fsdp_": "fsdp_config.", "dynamo_": "dynamo_config.", "megatron_lm_": "megatron_lm_config.",
                "parallelism_config_": "parallelism_config."}  # fmt: skip
    return (
        next((section for start, section in sections.items() if name.startswith(start)), "") + name
    )


def _kind(name: str) -> Any:
    """Return the type of a key; what is spelled true or false is a switch."""
    row = OPTIONS.get(name)
    if row is None or row["kind"] in ("switch", "off"):
        return Any
    default = row["default"]
    return (
        bool
        if default in ("true", "false")
        else int
        if name == "fsdp_version"
        else KINDS[row["kind"]]
    )


def _open(kind: Any) -> Any:
    return kind if kind is Any else kind | None


create: Any = create_model
"""pydantic's function; its types know no fields of a mapping."""


def _section(name: str, keys: Mapping[str, Any], about: str) -> Any:
    made = create(
        name,
        __base__=Section,
        **{key: (_open(kind), field(None, description=f"{about}: {key}.")) for key, kind in keys.items()},
    )  # fmt: skip
    return made, field(made(), description=f"{about}.")


def _build() -> type[Section]:
    own = {
        title: {name: _kind(name) for name in OPTIONS if name.startswith(start)}
        for title, start in (
            ("fsdp_config", "fsdp_"),
            ("parallelism_config", "parallelism_config_"),
            ("dynamo_config", "dynamo_"),
            ("megatron_lm_config", "megatron_lm_"),
        )
    }
    own["fsdp_config"]["fsdp_ignored_modules"] = str
    sections = {title: _section(title, keys, f"Key of {title}") for title, keys in own.items()}
    trainer = {name: type(usual) for name, usual in TRAINER.items()}
    sections["arguments"] = _section("arguments", trainer, "TrainingArgument")
    top = {
        name: (
            Any if (kind := _kind(name)) is Any else kind | None,
            field(None, description=f"Key {name}."),
        )
        for name in facts()["keys"]
        if name not in sections and name != "deepspeed_config"
    }
    made: type[Section] = create("Accelerate", __base__=Section, **top, **sections)
    return made


SCHEMA = _build()
"""The schema of all settings."""
