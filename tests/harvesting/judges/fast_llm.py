"""Asks an importable Fast-LLM for the stages and the mesh of a config, with its own config classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import prod
from typing import Any

from bridge.errors import ConfigError, VersionError
from bridge.plan.section import nest
from bridge.stack.dialect import Config
from compat.fast_llm.rules.batch import AXES
from tests.harvesting.code import first, plain

Group = dict[str, Any]
LOOSER = ""
"""Pattern of reasons for which we may refuse a config that the classes in `SECTIONS` accept. The
pattern matches every reason, because Fast-LLM checks a config outside of these classes too.
"""
DISTRIBUTED = "model.distributed"
SECTIONS: Mapping[str, str] = {
    "model.multi_stage": "fast_llm.engine.multi_stage.config:MultiStageConfig",
    DISTRIBUTED: "fast_llm.engine.distributed.config:DistributedConfig",
}
"""Sections of a config by path, each with the config class of Fast-LLM that checks the section."""
INSIDE = tuple(f"{path}." for path in SECTIONS)


def pose_config(config: Config) -> tuple[Group, Group]:
    """Return the sections for Fast-LLM's classes, and the values by path that they should hold."""
    values = {path: value for path, value in config.effective.items() if path.startswith(INSIDE)}
    return raw(nest(config.given), config), values


def raw(source: Mapping[str, Any], config: Config) -> Group:
    """Return the sections for Fast-LLM's classes from `source`, which our reader may refuse.

    A launcher sets the number of ranks. If the number is not known, it is as small as the axes allow,
    with all ranks on one node.
    """
    model = source.get("model", {})
    sections = {path: model.get(path.rpartition(".")[2]) or {} for path in SECTIONS}
    ranks = config.world_size or prod(config.given.get(axis, 1) for axis in AXES)
    sections[DISTRIBUTED] = {
        "world_size": ranks,
        "local_world_size": ranks,
        **sections[DISTRIBUTED],
    }
    return {"sections": sections}


def answer(question: Mapping[str, Any]) -> Group:
    """Return the values of Fast-LLM's objects by path. Raises `ConfigError` if one of them refuses its section."""
    values: Group = {}
    try:
        for path, section in question["sections"].items():
            instance = first([SECTIONS[path]]).from_dict(section)
            names = [
                field.name for field in fields(instance) if field.init and field.name != "type"
            ]
            values |= {f"{path}.{name}": plain(getattr(instance, name)) for name in names}
    except Exception as error:
        # What follows is a stack trace.
        reason, *_ = str(error).splitlines() or [""]
        raise ConfigError(
            f"refused by Fast-LLM itself: {type(error).__name__}: {reason}"
        ) from error
    return values


def release_of_package() -> str:
    """Return the release that is installed, or that an importable source tree names. Raises
    `VersionError` if there is neither.
    """
    try:
        return version("fast-llm")
    except PackageNotFoundError:
        if find_spec("fast_llm") is None:
            raise VersionError(
                "fast_llm: fast-llm is not installed; name its source tree with --from"
            ) from None
        return str(import_module("fast_llm").__version__)
