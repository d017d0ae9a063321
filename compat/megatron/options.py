"""Megatron's arguments across all releases: groups, types, and the flag that sets a given value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any

from bridge.stack.releases import table
from compat.megatron import flags, releases
from compat.megatron.releases import Flag

CLASS_ONLY = "config class"
DERIVED = "derived"
"""Names of groups for arguments without a flag: fields of config classes, and derived values."""

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
"""For each config field whose argument has another name: the name of the argument (arguments.py,
training.py).
"""

PARALLEL = "ModelParallelConfig"


@cache
def groups() -> Mapping[str, str]:
    """Return, for every argument and config field of every release, its group in the help of the
    parser.
    """
    flag_groups: dict[str, str] = table(releases.__name__, "groups.json")
    derivations = dict.fromkeys(WORKED_OUT, DERIVED)
    names = releases.field_names(PARALLEL, "TransformerConfig")
    # Sorted, because the order of a set differs from run to run, and pages are made from this one.
    fields = sorted(RENAMED.get(name, name) for name in names)
    # Later mappings win: a field that any release has a flag for is in the group of the flag.
    return MappingProxyType({**dict.fromkeys(fields, CLASS_ONLY), **derivations, **flag_groups})


@cache
def descriptions() -> Mapping[str, str]:
    """Return a description of each argument and config field, in one line each."""
    sections: Mapping[str, Mapping[str, str]] = table(releases.__name__, "descriptions.json")
    return MappingProxyType(
        {name: line for section in sections.values() for name, line in section.items()}
    )


@cache
def by_dest(version: str) -> Mapping[str, tuple[Flag, ...]]:
    """Return the flags of a release by destination, in the order of its parser."""
    flags: dict[str, list[Flag]] = {}
    for option, flag in releases.flags(version).items():
        # The table has a flag once for each of its spellings.
        if option == flag.options[0]:
            flags.setdefault(flag.dest, []).append(flag)
    return MappingProxyType({dest: tuple(own) for dest, own in flags.items()})


@cache
def defaults(version: str) -> Mapping[str, Any]:
    """Return the defaults of a release by argument. A field without a flag has the default of its
    class.
    """
    from compat.megatron.objects import fields

    classes = {
        RENAMED.get(name, name): value
        for name, value in fields.defaults(version, "TransformerConfig").items()
    }
    return MappingProxyType({**dict.fromkeys(WORKED_OUT), **classes, **releases.defaults(version)})


@cache
def newest(dest: str) -> tuple[Flag, ...]:
    """Return the flags of an argument in the newest release that has the argument. Public releases
    are preferred to main branches.
    """
    versions = (releases.RELEASES.newest, *reversed(releases.KNOWN))
    return next((flags for version in versions if (flags := by_dest(version).get(dest))), ())


TAKES = {
    "text": "str",
    "integers": "list of int",
    "name": "name",
    "layers": "int or pattern of layers",
}
TAKES["layers_spaced"] = TAKES["layers"]


def accepts(dest: str) -> str:
    """Return a description of the values that the newest flags of an argument accept.

    The description is empty if the argument has no flag, or if the schema has bounds for the value.
    """
    words = (_takes(flag) for flag in newest(dest))
    return " or ".join(dict.fromkeys(word for word in words if word))


def _takes(flag: Flag) -> str:
    if flag.action != "store":
        return "bool"
    if flag.choices:
        return f"one of {', '.join(map(str, flag.choices))}"
    text = TAKES.get(flag.type, "")
    return f"list of {text or flag.type}" if flag.nargs is not None else text


def spellings(dest: str) -> tuple[str, ...]:
    """Return the options that set an argument, including negations, in the newest release that has
    the argument.
    """
    return tuple(dict.fromkeys(option for flag in newest(dest) for option in flag.options))


@cache
def type_of(dest: str) -> str:
    """Return the name of an argument's type in the newest release that has the argument.

    The type is `any` if the argument has no flag, or if it has several values.
    """
    for version in reversed(releases.KNOWN):
        for flag in by_dest(version).get(dest, ()):
            if flag.nargs is not None:
                return "any"
            return "bool" if flag.action in ("true", "false", "switch") else flag.type
    return "any"


def option_for(version: str, dest: str, value: Any) -> tuple[str, ...] | None:
    """Return the option and values that set `dest` to `value` in a release; None if no flag can do
    so.
    """
    if isinstance(value, str | int | float):
        return _cached(version, dest, value)
    return _option_for(version, dest, value)  # a list cannot be a key of the cache


def _option_for(version: str, dest: str, value: Any) -> tuple[str, ...] | None:
    lines = (_line(flag, value) for flag in by_dest(version).get(dest, ()))
    return next((line for line in lines if line is not None), None)


_cached = lru_cache(maxsize=4096, typed=True)(_option_for)
"""`_option_for` with a cache, for values that can be hashed. `typed` keeps separate entries for
True and 1.
"""


def _line(flag: Flag, value: Any) -> tuple[str, ...] | None:
    if flag.action != "store":
        if not isinstance(value, bool):
            return None
        if flag.action == "switch":  # its second option is --no-...
            return (flag.options[0 if value else 1],)
        return (flag.options[0],) if value is (flag.action == "true") else None
    many = flag.nargs is not None
    values = value if many and isinstance(value, list | tuple) else [value]
    if None in values or (isinstance(flag.nargs, int) and len(values) != flag.nargs):
        return None
    if not values and flag.nargs != "*":
        return None
    if flag.choices and any(item not in flag.choices for item in values):
        return None
    words = [_word(flag, item) for item in values]
    return (
        _join_words(flag.options[0], words)
        if all(flags.takes(flag, word) for word in words)
        else None
    )


def _join_words(option: str, words: list[str]) -> tuple[str, ...] | None:
    """Return the words of an option with its values, or None if the parser could not read them.

    A value that looks like an option has to be attached with `=`, which works only for a single
    value.
    """
    if "--" in words:
        return None
    if not any(word.startswith("-") and not NEGATIVE.fullmatch(word) for word in words):
        return (option, *words)
    return (f"{option}={words[0]}",) if len(words) == 1 else None


NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
"""Pattern of words that argparse reads as a negative number, not as an option."""


def _word(flag: Flag, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else ""  # type=bool: only the empty text is false
    if isinstance(value, list | tuple):
        text = ",".join(map(str, value))
        return f"[{text}]" if flag.type.startswith("layers") else text
    # argparse takes -1e-05 for an option, and -0.00001 for a number
    return (
        format(Decimal(str(value)), "f") if isinstance(value, float) and value < 0 else str(value)
    )
