"""Edits: changing a part of a config's meaning, while everything else stays as it was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge.plan.section import Values
from bridge.stack.dialect import Config
from bridge.stack.rules import Context
from bridge.translation.lift import lift, rules_for


def edit_config(
    config: Config, changes: Mapping[str, Any], world_size: int | None = None
) -> Config:
    """Return `config` for `world_size` ranks, with settings changed so that the plan fields in
    `changes` have the given values. None stands for unset.

    Settings that stand for none of these fields stay as they were written, even if the dialect's
    table would write another value. Raises `BridgeError` if the stack refuses the result.
    """
    knows, version, entry = config.dialect.knows, config.version, config.entry
    ours = {
        path: value
        for path, value in {**lift(config).values(), **changes}.items()
        if value is not None
    }
    settings, context = dict(config.given), Context(version, world_size, frozenset(config.given))
    for rule, values in rules_for(ours, config.dialect, world_size):
        # One rule may claim several settings; only those that carry a changed field are written
        # anew.
        fields = [path for path in changes if path in rule.ours]
        carriers = {path for ours in fields for path in rule.carriers(ours)} & {*rule.theirs}
        if not carriers:
            continue
        settings = {path: value for path, value in settings.items() if path not in carriers}
        for path, value in rule.write(values, context).items():
            if path in carriers and value is not None and knows(path, value, version, entry):
                settings[path] = value
    return _with(config, settings, world_size)


def without(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return `config` with the values in `settings` for settings of the stack. None removes a
    setting. Raises `BridgeError` if the stack refuses the result.
    """
    # A None that the user wrote stays: it is a value, and only those in `settings` mean "unset".
    values = {path: value for path, value in config.given.items() if path not in settings}
    values |= {path: value for path, value in settings.items() if value is not None}
    return _with(config, values, config.world_size)


def _with(config: Config, settings: Mapping[str, Any], world_size: int | None) -> Config:
    result = replace(config, given=Values(settings), world_size=world_size)
    _ = result.effective  # a lazy property: the stack refuses here and not at the first use
    return result
