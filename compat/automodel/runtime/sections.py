"""Reads sections of a recipe as mappings, and checks that the native engine knows the class of a
section and the settings in the section.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from bridge.errors import ConfigError, nearest
from bridge.plan.families import NULL
from bridge.stack.dialect import Config
from compat.automodel.formats import nest_recipe
from compat.automodel.releases import release

TARGET = "_target_"
Section = Mapping[str, Any]


def recipe(config: Config) -> dict[str, Any]:
    """Return a recipe as nested mappings of plain lists and dictionaries."""
    settings: dict[str, Any] = _plain(nest_recipe(config.given, release(config.version)))
    return settings


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return None if value == NULL else value


def section(whole: Section, name: str) -> dict[str, Any]:
    """Return the settings of a section as a mapping. A section that is only a text is the name of a
    class. The result is empty if the section is missing.
    """
    value = whole.get(name)
    return dict(value) if isinstance(value, Mapping) else {} if value is None else {TARGET: value}


def target(section: Section, path: str, names: Collection[str]) -> str:
    """Return the class name of a section without the package. Raises `ConfigError` if the name is
    not in `names`.
    """
    value = section.get(TARGET)
    name = str(value or "").rpartition(".")[2]
    if name not in names:
        raise ConfigError(
            f"{path}.{TARGET}: found {value!r}, which the native engine does not have; expected"
            f" {' or '.join(names)}{nearest(name, names)}; or train the file's plan on a small"
            " model with --model tiny"
        )
    return name


def only(section: Section, path: str, names: Collection[str]) -> None:
    """Raise `ConfigError` if a section has a setting that is neither its class nor in `names`."""
    ConfigError.raise_if(
        f"{path}.{name}: found {value!r}; the native engine does not know this"
        f" setting{nearest(name, names)}; leave it out"
        for name, value in section.items()
        if name not in names and name != TARGET and value not in (None, "none", "None")
    )
