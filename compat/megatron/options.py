"""Megatron's arguments across all releases: their groups and types, and the flag that sets one to a value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from compat.megatron import releases
from compat.megatron.releases import Flag

CLASS_ONLY = "config class"
DERIVED = "derived"
"""Groups of what has no flag: fields of config classes, and what the parser's checks work out."""

WORKED_OUT = ("data_parallel_size", "params_dtype", "virtual_pipeline_model_parallel_size")
RENAMED = {
    "use_te_rng_tracker": "te_rng_tracker",
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "first_pipeline_num_layers": "decoder_first_pipeline_num_layers",
    "last_pipeline_num_layers": "decoder_last_pipeline_num_layers",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "check_for_nan_in_grad": "check_for_nan_in_loss_and_grad",
    "bucket_size": "ddp_bucket_size",
    "num_buckets": "ddp_num_buckets",
    "average_in_collective": "ddp_average_in_collective",
    "barrier_with_L1_time": "barrier_with_L1_time",
}
"""Fields of config classes that their arguments spell otherwise (arguments.py, training.py)."""

PARALLEL = "ModelParallelConfig"


@cache
def groups() -> Mapping[str, str]:
    """Every argument and config field of every release, with its group in the parser's help."""
    text = resources.files(releases.__name__).joinpath("groups.json").read_text("utf-8")
    found: dict[str, str] = json.loads(text)
    derived = dict.fromkeys(WORKED_OUT, DERIVED)
    return MappingProxyType({**dict.fromkeys(_class_fields(), CLASS_ONLY), **derived, **found})


def _class_fields() -> list[str]:
    classes = (PARALLEL, "TransformerConfig")
    names = {name for version in releases.KNOWN for cls in classes for name in releases.fields(version, cls)}
    return sorted(RENAMED.get(name, name) for name in names)


@cache
def by_dest(version: str) -> Mapping[str, tuple[Flag, ...]]:
    """The flags of a release by what they set, in the order of its parser."""
    found: dict[str, list[Flag]] = {}
    for option, flag in releases.flags(version).items():
        if option == flag.options[0]:
            found.setdefault(flag.dest, []).append(flag)
    return MappingProxyType({dest: tuple(flags) for dest, flags in found.items()})


@cache
def type_of(dest: str) -> str:
    """Type name of an argument: that of the newest release that has it; `any` where no flag sets it, or several values do."""
    for version in reversed(releases.KNOWN):
        for flag in by_dest(version).get(dest, ()):
            if flag.nargs is not None:
                return "any"
            return "bool" if flag.action in ("true", "false", "switch") else flag.type
    return "any"


def option_for(version: str, dest: str, value: Any) -> tuple[str, ...] | None:
    """Option and values that set `dest` to `value` at a release; None if nothing can."""
    lines = (_line(flag, value) for flag in by_dest(version).get(dest, ()))
    return next((line for line in lines if line is not None), None)


def _line(flag: Flag, value: Any) -> tuple[str, ...] | None:
    if flag.action != "store":
        return _switch(flag, value)
    if value is None or (flag.choices and value not in flag.choices):
        return None
    if flag.nargs is not None:
        values = value if isinstance(value, list | tuple) else [value]
        return (flag.options[0], *map(_word, values))
    return (flag.options[0], _word(value))


def _switch(flag: Flag, value: Any) -> tuple[str, ...] | None:
    if flag.action == "switch" and isinstance(value, bool):
        return (flag.options[0 if value else 1],)
    return (flag.options[0],) if value is (flag.action == "true") and isinstance(value, bool) else None


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else ""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
