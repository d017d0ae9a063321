"""Reads the facts of an accelerate release from its own code: options of the launcher, and keys of its config file."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

WORDS = {"_StoreTrueAction": "switch", "_StoreConstAction": "off", "_AppendAction": "list"}
"""The kind of each option without a value of its own, by the class of its action."""


def read_facts() -> dict[str, Any]:
    """Return the release of the installed accelerate, with its options, keys and names of modes."""
    import accelerate
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import (
        ComputeEnvironment,
        DistributedType,
        DynamoBackend,
        PrecisionType,
        constants,
    )

    parser = launch_command_parser()
    return {
        "release": accelerate.__version__,
        "options": [_option_row(one) for one in parser._actions if one.option_strings and one.dest != "help"],
        "keys": {one.name: _plain_default(one.default) for one in dataclasses.fields(ClusterConfig)},
        "environments": [one.value for one in ComputeEnvironment],
        "types": [one.value for one in DistributedType],
        "backends": [one.value for one in DynamoBackend],
        "precisions": PrecisionType.list(),
        "strategies": constants.FSDP_SHARDING_STRATEGY,
        "prefetches": constants.FSDP_BACKWARD_PREFETCH,
        "state_dicts": constants.FSDP_STATE_DICT_TYPE,
        "wraps": constants.FSDP_AUTO_WRAP_POLICY,
        "launchers": constants.DEEPSPEED_MULTINODE_LAUNCHERS,
    }  # fmt: skip


def _plain_default(value: Any) -> Any:
    return None if value is dataclasses.MISSING else value


def _option_row(action: argparse.Action) -> Mapping[str, Any]:
    names = [one for one in action.option_strings if "-" not in one.lstrip("-")]
    kind = WORDS.get(type(action).__name__, getattr(action.type, "__name__", "str"))
    row = {"name": action.dest, "flags": names, "kind": kind, "default": action.default}
    return {**row, **({"choices": list(action.choices)} if action.choices else {})}
