"""Sections of a recipe as mappings of a class's settings, with checks that the settings and the
class are known here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from bridge.dialect import Config
from bridge.errors import ConfigError, nearest
from bridge.families import NULL
from compat.automodel.formats import nested
from compat.automodel.releases import release

TARGET = "_target_"
Section = Mapping[str, Any]


def recipe(config: Config) -> dict[str, Any]:
    """A recipe as nested mappings, with plain values."""
    found: dict[str, Any] = _plain(nested(config.given, release(config.version)))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return None if value == NULL else value


def section(whole: Section, name: str) -> dict[str, Any]:
    """The settings of a section; only its class if the section is a text; empty if there is no
    section.
    """
    found = whole.get(name)
    return dict(found) if isinstance(found, Mapping) else {} if found is None else {TARGET: found}


def target(section: Section, path: str, known: Collection[str]) -> str:
    """The last part of the name of a section's class. Raises `ConfigError` if it is not
    in `known`.
    """
    said = section.get(TARGET)
    name = str(said or "").rpartition(".")[2]
    if name not in known:
        raise ConfigError(
            f"{path}.{TARGET}: found {said!r}, which the native engine does not have; expected"
            f" {' or '.join(known)}{nearest(name, known)}; or train the file's plan on a small"
            " model with --model tiny"
        )
    return name


def only(section: Section, path: str, known: Collection[str]) -> None:
    """Raise `ConfigError` for settings of a section other than its class and those in `known`."""
    ConfigError.raise_if(
        f"{path}.{name}: found {value!r}; the native engine does not know this"
        f" setting{nearest(name, known)}; leave it out"
        for name, value in section.items()
        if name not in known and name != TARGET and value not in (None, "none", "None")
    )
