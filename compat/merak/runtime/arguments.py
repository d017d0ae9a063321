"""`MerakArguments`: transformers' TrainingArguments plus Merak's own arguments, with the defaults
of Merak's newest release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Any

from transformers import TrainingArguments

from bridge.plan.section import below
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from compat.merak.dialect import DIALECT

__all__ = ["MerakArguments"]
PREFIX = "args."
DEFAULTS: Mapping[str, Any] = below(PREFIX, DIALECT.defaults(DIALECT.versions[-1]))
NUMBERS = ("num_layers", "seq_length", "hidden_size", "num_heads", "shard_count", "zero_stage")
"""Arguments that are None by default and whole numbers otherwise."""
LISTS = ("custom_split_points", "input_names", "activation_checkpoint_ratio", "custom_partition")
"""Arguments that are None by default and otherwise take several words on a command line."""


def _own() -> Iterator[tuple[str, Any, Any]]:
    """Yield name, type and default of the arguments that Merak has and transformers does not."""
    theirs = {each.name for each in fields(TrainingArguments)}
    for name, value in DEFAULTS.items():
        if name not in theirs:
            yield name, _kind(name, value) | None, field(default=value)


def _kind(name: str, default: Any) -> Any:
    """Return the type of an argument's values other than None."""
    if default is not None:
        return type(default)
    return int if name in NUMBERS else list[str] if name in LISTS else str


def _settle(self: Any) -> None:
    """Copy the value of `evaluation_strategy` to `eval_strategy`, the new name of this argument.
    Current releases of transformers do not read the old name.
    """
    if self.evaluation_strategy not in (None, "no"):
        self.eval_strategy = self.evaluation_strategy
    theirs: Any = TrainingArguments.__post_init__  # it has no types
    theirs(self)


MerakArguments: Any = make_dataclass(
    "MerakArguments",
    list(_own()),
    bases=(TrainingArguments,),
    namespace={
        "__doc__": "Arguments of a run with Merak's names and defaults.",
        "__post_init__": _settle,
    },
)


def set_arguments(arguments: Any) -> dict[str, Any]:
    """Return the arguments that differ from Merak's defaults, in the form that the dialect reads."""
    settings: dict[str, Any] = {}
    theirs = {each.name: each for each in fields(TrainingArguments)}
    for name, value in DEFAULTS.items():
        argument = getattr(arguments, name, value)
        argument = getattr(argument, "value", argument)
        usual = (
            theirs[name].default
            if name in theirs and theirs[name].default is not MISSING
            else value
        )
        if (
            argument not in (value, getattr(usual, "value", usual))
            and name not in LEFT
            and (
                isinstance(argument, str | int | float | bool | Mapping)
                or (
                    isinstance(argument, list | tuple)
                    and all(isinstance(word, str) for word in argument)
                )
            )
        ):
            settings[name] = argument
    return settings


def unread_arguments(arguments: Any) -> Iterator[Finding]:
    """Yield a finding for each argument with another value than its default that Merak never reads,
    such as those that transformers has added since, or that the engine does without.
    """
    for name in set_arguments(arguments).keys() & UNREAD.keys():
        effect = Effect.NUMBERS if name == "no_tie_modules" else Effect.NONE
        if not (name in SCALES and arguments.fp16):
            yield Finding(PREFIX + name, UNREAD[name], effect, True)
    usual = type(arguments)(output_dir=arguments.output_dir, use_cpu=arguments.use_cpu)
    for each in fields(TrainingArguments):
        argument = getattr(arguments, each.name)
        if (each.name not in DEFAULTS or each.name == "optim") and argument != getattr(
            usual, each.name
        ):
            message = "no effect: Merak does not read this argument of transformers"
            yield Finding(PREFIX + each.name, message, Effect.NONE, True, before=str(argument))


SCALES = ("initial_scale_power", "loss_scale_window", "min_loss_scale", "loss_scale", "hysteresis")
UNREAD: Mapping[str, str] = {
    **dict.fromkeys(SCALES, "no effect: only fp16 scales the loss"),
    **dict.fromkeys(
        ("num_layers", "hidden_size", "num_heads", "seq_length"),
        "no effect: the model has its own sizes",
    ),
    **dict.fromkeys(
        ("finetune", "no_load_optim", "no_load_rng"), "no effect: no checkpoint is loaded"
    ),
    **dict.fromkeys(
        ("no_save_optim", "no_save_rng"), "no effect: checkpoints of the engine are whole"
    ),
    "init_method_std": "no effect: the engine splits weights that the script has made",
    "no_tie_modules": "the engine keeps the ties that the model has",
}
"""Arguments that the engine does without, each with the reason."""
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
"""Arguments that do not affect the numbers, and arguments that the trainer reads directly. `set_arguments`
leaves them out.
"""
