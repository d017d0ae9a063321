"""Edits: a config with some of its meaning changed, and everything else as it was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from bridge.config import Values
from bridge.dialect import Config
from bridge.rules import Context, Rule
from bridge.translation import lift, seen_by


def edited(config: Config, changes: Mapping[str, Any], world_size: int | None = None) -> Config:
    """`config` on `world_size` ranks with those plan fields changed (None: unset), in its stack's words.

    Settings that stand for none of these fields stay as they were written, also where our own table would write them otherwise.
    Raises `BridgeError` if the stack refuses the result.
    """
    ours = {path: value for path, value in {**lift(config).values(), **changes}.items() if value is not None}
    given, context = dict(config.given), Context(config.version, world_size, frozenset(config.given))
    for rule, values in seen_by(ours, config.dialect, world_size):
        carriers = _carriers(rule, changes)
        written = rule.write(values, context) if carriers else {}
        given = {path: value for path, value in given.items() if path not in carriers}
        given |= {path: value for path, value in written.items() if path in carriers and _sayable(config, path, value)}
    return _with(config, given, world_size)


def without(config: Config, settings: Mapping[str, Any]) -> Config:
    """`config` with those of its own settings changed (None: unset). Raises `BridgeError` if the stack refuses the result."""
    changed = {path: value for path, value in {**config.given, **settings}.items() if value is not None or path not in settings}
    return _with(config, changed, config.world_size)


def _with(config: Config, given: Mapping[str, Any], world_size: int | None) -> Config:
    changed = replace(config, given=Values(given), world_size=world_size)
    _ = changed.effective
    return changed


def _carriers(rule: Rule, changes: Iterable[str]) -> set[str]:
    """The settings of `rule` that stand for a change."""
    return {path for ours in changes if ours in rule.ours for path in rule.carriers(ours)} & {*rule.theirs}


def _sayable(config: Config, path: str, value: Any) -> bool:
    return value is not None and config.dialect.knows(path, value, config.version, config.entry)
