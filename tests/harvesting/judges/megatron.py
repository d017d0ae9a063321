"""Reads the fields of the installed Megatron-Core's config classes as plain data, before and after
`__post_init__`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from importlib import import_module
from math import lcm
from signal import Signals
from types import ModuleType
from typing import Any
from unittest.mock import patch

from bridge.errors import BridgeError, ConfigError, VersionError
from bridge.plan.section import Values
from bridge.stack.dialect import Config
from compat.megatron import arguments, live, objects
from compat.megatron.arguments.namespace import member_name
from compat.megatron.formats import flag_lines
from compat.megatron.objects.fields import (
    DDP,
    DDP_FEEDS,
    LATENT,
    OPTIMIZER,
    PARALLEL,
    TRANSFORMER,
    TRANSFORMER_FEEDS,
    defaults,
    fed,
)
from compat.megatron.runtime.config_objects import ACTIVATION, build_object
from tests.harvesting.judges import megatron_parser as parser
from tests.harvesting.machine import judge

NAMES = (f".{ACTIVATION}", ".attention_backend")
"""Suffixes of fields with a function or a member of an enumeration, which are compared by name."""
LOOSER = "expected a positive number|write a finite number"
"""Pattern for our messages about numbers with which no run trains. We refuse such numbers, although
Megatron's parser accepts them.
"""
SIZES = ("num_layers", "hidden_size", "num_attention_heads")
"""Names of sizes that the class of a model requires, and a config may leave open."""
REQUIRED = (*SIZES, "seq_length", "max_position_embeddings", "micro_batch_size")
"""Names of sizes that the parser requires, two of them with or without `encoder_` before the name."""
LATER = (f"{DDP}.bucket_size",)
"""Fields that training sets after it has built the class."""
SIGNAL = "args.exit_signal"
"""An argument whose value may have two names, such as SIGIOT and SIGABRT."""
LONGEST = 4096
"""Number of positions for a config that does not set it."""

Group = dict[str, Any]
Parts = dict[str, Group]


def pose_config(config: Config) -> tuple[Parts, Group]:
    """Return the fields with which each class is built, and the values that its fields should have
    afterwards, by `Class.field`.

    Model sizes that a config leaves open are filled in. If no sizes fit, only `ModelParallelConfig`
    is built.
    """
    whole = _complete_sizes(config)
    asking = _of_flags if config.entry == "flags" else _of_object
    question, parts = asking(whole or config, TRANSFORMER if whole else PARALLEL)
    return question, _by_name(parts)


def launch_words(config: Config) -> tuple[Group, Group]:
    """Return the words and ranks of a launch, and the arguments and fields that Megatron's source tree
    should make of them. For a config object, return the same as `pose_config`.
    """
    if config.entry != "flags":
        return pose_config(config)
    whole: Any = _complete_sizes(config, REQUIRED) or config
    words = [word for line in flag_lines(whole.given, whole.version) for word in line]
    _, parts = _of_flags(whole, TRANSFORMER)
    result = _by_name({"args": whole.args, **parts})
    if result.get(SIGNAL):
        result[SIGNAL] = Signals[result[SIGNAL]].name
    return {"flags": words, "ranks": whole.ranks}, {
        path: value for path, value in result.items() if path not in LATER
    }


def _by_name(parts: Mapping[str, Mapping[str, Any]]) -> Group:
    return {
        path: member_name(value) if path.endswith(NAMES) and value else value
        for path, value in _join_fields(parts).items()
    }


def _join_fields(parts: Mapping[str, Mapping[str, Any]]) -> Group:
    return {
        f"{cls}.{name}": value for cls, fields in parts.items() for name, value in fields.items()
    }


def _complete_sizes(config: Config, names: tuple[str, ...] = SIZES) -> Config | None:
    missing = [name for name in names if config.effective.get(name) is None]
    for sizes in _sizes(config.effective) if missing else ({},):
        try:
            more = {name: sizes[name] for name in missing}
            return config.dialect.config(
                {**config.given, **more}, config.version, config.world_size, config.entry
            )
        except BridgeError:
            continue
    return None


def _sizes(values: Values) -> Iterator[Group]:
    """Yield sizes that fit the given values, with a growing number of layers."""
    tensor, stages = (
        values.get("tensor_model_parallel_size") or 1,
        values.get("pipeline_model_parallel_size") or 1,
    )
    virtual = (
        values.get("virtual_pipeline_model_parallel_size")
        or values.get("num_virtual_stages_per_pipeline_rank")
        or 1
    )
    heads = values.get("num_attention_heads") or lcm(tensor, values.get("num_query_groups") or 1)
    for layers in (1, 2, 12, 120):
        yield {
            "num_layers": layers * stages * virtual,
            "hidden_size": 64 * heads,
            "num_attention_heads": heads,
            "micro_batch_size": 1,
            # Each context rank holds two chunks of a sequence, which tensor ranks may share.
            "seq_length": 2 * (values.get("context_parallel_size") or 1) * tensor,
            "max_position_embeddings": max(
                *(values.get(f"{name}seq_length") or 0 for name in ("", "decoder_")), LONGEST
            ),
        }


def _of_object(config: Config, model: str) -> tuple[Parts, Parts]:
    if model != TRANSFORMER and config.entry == TRANSFORMER:
        return {}, {}
    cls, version = config.entry, config.version
    settings = live.fields_of(config.given, version, cls)
    return {cls: settings}, {cls: objects.from_fields(settings, version, cls)}


def raw(source: Any, config: Config) -> Group | None:
    """Return the words and ranks of a launch. The words come from `source`, an edited mapping of flags.
    Required sizes that `source` lacks come from `config`, which is valid.

    None if a value cannot be written on a command line, or if our reader accepts the launch.
    """
    whole = _complete_sizes(config, REQUIRED) or config
    words: list[str] = []
    for name in REQUIRED:
        either = (name, f"encoder_{name}")
        if not any(f"--{path.replace('_', '-')}" in source for path in either):
            sizes = {path: whole.given[path] for path in either if path in whole.given}
            words += [word for line in flag_lines(sizes, config.version) for word in line]
    for option, values in source.items():
        items = [] if values is True else values if isinstance(values, list) else [values]
        if not all(isinstance(value, str | int | float) for value in items):
            return None
        words += [option, *map(str, items)]
    ranks = config.world_size or _ranks(words, config)
    with suppress(BridgeError):
        config.dialect.read(words, config.version, ranks)
        return None
    return {"flags": words, "ranks": ranks}


def _ranks(words: list[str], config: Config) -> int:
    """Return the fewest ranks for the sizes in `words`, or in `config` if no number fits those in `words`."""
    try:
        settings = config.dialect.parse(words, config.version, True).given
        return arguments.smallest_world_size(settings, config.version)
    except BridgeError:
        return arguments.smallest_world_size(config.given, config.version)


def _of_flags(config: Any, model: str) -> tuple[Parts, Parts]:
    args, version = config.args.flat(), config.version
    cls = LATENT if model == TRANSFORMER and args.get("multi_latent_attention") else model
    whole = objects.transformer(args, version)
    own = defaults(version, cls)
    inputs = {
        cls: fed(args, version, cls, TRANSFORMER_FEEDS),
        OPTIMIZER: fed(args, version, OPTIMIZER, ()),
    }
    results = {
        cls: {name: whole[name] for name in own},
        OPTIMIZER: objects.optimizer(args, version),
    }
    if not args.get("use_torch_fsdp2"):
        inputs[DDP], results[DDP] = fed(args, version, DDP, DDP_FEEDS), objects.ddp(args, version)
        inputs[DDP]["bucket_size"] = results[DDP][
            "bucket_size"
        ]  # training.py computes it before it builds the class
    return {cls: _set_fields(fields, version, cls) for cls, fields in inputs.items()}, results


def _set_fields(fields: Mapping[str, Any], version: str, cls: str) -> Group:
    """Return the fields that differ from the defaults of the class."""
    own = defaults(version, cls)
    return {
        name: value
        for name, value in fields.items()
        if value != own[name] or type(value) is not type(own[name])
    }


def answer(question: Mapping[str, Any]) -> Group:
    """Return the values of the fields of the installed classes, by `Class.field`. Raises
    `ConfigError` with the reason of the first class that refuses the values.
    """
    with _on_a_cluster():
        if "flags" in question:
            return _launch_source(question)
        return _join_fields(
            {cls: plain_fields(ask_class(cls, fields)) for cls, fields in question.items()}
        )


def ask_class(name: str, fields: Mapping[str, Any]) -> Any:
    """Return the object that the installed class makes of plain `fields`. Raises `ConfigError` if it refuses them, and
    `MachineError` if this machine lacks what they need.
    """
    try:
        return build_object(name, fields)
    except ConfigError as error:
        judge(error)
        raise


def _launch_source(question: Mapping[str, Any]) -> Group:
    """Return the arguments and fields of a launch of the source tree."""
    parts: Parts = {}
    try:
        for result in parser.launch_parser(question["flags"], question["ranks"]):
            cls = type(result).__name__
            parts["args" if cls == "Namespace" else cls] = plain_fields(result)
    except Exception as error:
        judge(error)
        raise ConfigError(f"refused by Megatron itself: {type(error).__name__}: {error}") from error
    return _join_fields(parts)


def release_of_package() -> str:
    """Return the installed release; raises `VersionError` if there is none."""
    version = live.release_of_package()
    if version is None:
        raise VersionError("megatron-core: not installed; pip install megatron-core")
    return version


FUSED = {
    "megatron.core.models.common.embeddings.rope_utils": (
        "fused_apply_rotary_pos_emb",
        "fused_apply_rotary_pos_emb_thd",
    ),
    "megatron.core.transformer.moe.moe_utils": (
        "fused_permute",
        "fused_permute_with_probs",
        "fused_sort_chunks_by_index",
        "fused_sort_chunks_by_index_with_probs",
        "fused_unpermute",
    ),
}
"""Names of Transformer Engine's functions that the classes look for, by module."""
NEWEST = "99.0"


def _adam(
    master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: Any
) -> None:
    """Stand in for Transformer Engine's Adam. OptimizerConfig looks for these arguments in the
    signature of Adam.
    """


@contextmanager
def _on_a_cluster() -> Iterator[None]:
    """Context manager in which checks find a recent Transformer Engine, and in which this process
    is rank 0.

    Stand-ins for functions suffice, because no config class runs a kernel.
    """
    from packaging.version import Version

    names = (
        "transformer_engine",
        "transformer_engine.pytorch",
        "transformer_engine.pytorch.optimizers",
    )
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].FusedAdam = _adam  # type: ignore[attr-defined]
    with ExitStack() as stack:
        for module, functions in FUSED.items():
            for name in functions:
                stack.enter_context(
                    patch.object(import_module(module), name, object(), create=True)
                )
        with suppress(ModuleNotFoundError):  # came with 0.15
            kernels = import_module(
                "megatron.core.transformer.custom_layers.batch_invariant_kernels"
            )
            stack.enter_context(patch.object(kernels, "HAVE_DEEPGEMM_BF16", True, create=True))
        stack.enter_context(
            patch.object(
                import_module("megatron.core.utils"), "get_te_version", lambda: Version(NEWEST)
            )
        )
        stack.enter_context(patch.dict(sys.modules, modules))
        stack.enter_context(patch("torch.distributed.get_rank", lambda group=None: 0))
        yield


def plain_fields(instance: Any) -> Group:
    """Return the fields of a real config object, or arguments, as plain values. Dtypes, members of enumerations
    and the activation are given by name.
    """
    values = (
        {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
        if dataclasses.is_dataclass(instance)
        else vars(instance)
    )
    return {
        name: _as_plain(value)
        for name, value in values.items()
        if name == ACTIVATION or live.is_plain(value)
    }


def _as_plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    return (
        getattr(value, "__name__", value)
        if callable(value)
        else str(value)
        if live.is_dtype(value)
        else value
    )
