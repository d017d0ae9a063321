"""Settings of two runs, which may be of two engines, and the search for settings that differ."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A setting with different values in two runs; None stands for a run that does not have it.
    `layout` is true if the setting only decides which rank computes what, or what is logged.
    """

    path: str
    first: Any
    second: Any
    layout: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.first} in A, {self.second} in B"


LAYOUT = (
    "parallel.",
    "batch.",
    "zero.",
    "schedule.",
    "stages.",
    "recompute.",
    "debug.",
    "accumulation",
    "zero_optimization.",
)
"""Prefixes of the settings that only decide which rank computes what, or which tensors are logged.
"""
SPEED = (
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "initial_lr",
    "decoupled_weight_decay",
    "param_names",
)
"""Names of settings of torch's optimizers that are not compared, because they do not affect the
update, or follow from the optimizer's class.
"""
SHARED: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("optimizer.name", "optimizer"),
    "learning rate": ("optimizer.lr", "group 0.lr", "optimizer.optimizer.lr"),
    "betas": ("optimizer.betas", "group 0.betas"),
    "eps": ("optimizer.eps", "group 0.eps", "optimizer.adam_eps"),
    "weight decay": ("optimizer.weight_decay", "group 0.weight_decay"),
    "momentum": ("optimizer.momentum", "group 0.momentum"),
}
"""Settings that can be compared between engines, each with its names in the settings of the
engines.
"""


def setting_differences(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> tuple[SettingDifference, ...]:
    """Return the settings that differ between two runs. `first` and `second` are the contents of
    the runs' files run.json. If the runs are of two engines, only settings that both engines have
    are compared.
    """
    ours, theirs = (values_of(about.get("settings", {})) for about in (first, second))
    alike = set(ours) & set(theirs)
    # With less than half of the names in common, these are two engines.
    if len(alike) * 2 < max(len(ours), len(theirs), 1):
        ours, theirs = _settings_in_common(ours), _settings_in_common(theirs)
        pairs = [(name, ours[name], theirs[name]) for name in ours if name in theirs]
    else:
        pairs = [
            (name, ours.get(name), theirs.get(name)) for name in dict.fromkeys((*ours, *theirs))
        ]
    differences = [
        SettingDifference(name, one, other, name.startswith(LAYOUT))
        for name, one, other in pairs
        if not _are_same(one, other)
    ]
    if first.get("mesh", {}) != second.get("mesh", {}):
        differences.append(SettingDifference("ranks", _mesh_text(first), _mesh_text(second), True))
    if sorted(first.get("formats", ())) != sorted(second.get("formats", ())):
        differences.append(
            SettingDifference(
                "number formats",
                ", ".join(first.get("formats", ())),
                ", ".join(second.get("formats", ())),
            )
        )
    return tuple(sorted(differences, key=lambda setting: setting.layout))


def _mesh_text(about: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{axis} {size}" for axis, size in about.get("mesh", {}).items() if size > 1)
        or "one"
    )


def values_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by name, without those in `SPEED`. A text that spells a number or a list is
    replaced by the number or list.
    """
    return {
        name: _parse_value(value)
        for name, value in settings.items()
        if name.rpartition(".")[2] not in SPEED
    }


def _parse_value(value: Any) -> Any:
    """Return the number or list that a text spells; any other value is returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


def _settings_in_common(settings: Mapping[str, Any]) -> dict[str, Any]:
    candidates = {
        name: [settings[key] for key in keys if settings.get(key) is not None]
        for name, keys in SHARED.items()
    }
    return {
        name: str(values[0]).lower() if name == "optimizer" else values[0]
        for name, values in candidates.items()
        if values
    }


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return bool(one == other)
