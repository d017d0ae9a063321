"""Reads and makes live config objects of Megatron-Core.

Outside `runtime`, only this module imports megatron.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from importlib import metadata
from typing import Any

from bridge.errors import VersionError
from bridge.files.shown import show_value
from bridge.plan.section import Values, tuples
from bridge.stack.dialect import Config, Reading
from bridge.stack.findings import unknown
from compat.megatron import objects, options, releases
from compat.megatron.arguments.evaluation import OPEN
from compat.megatron.arguments.namespace import member_name
from compat.megatron.objects import fields

CLASSES = ("TransformerConfig", "ModelParallelConfig")
"""Names of config classes whose objects can be read; each is the name of an entry point."""

ACTIVATION = "activation_func"
"""Name of the field with the activation, which is a function. The name of the function is the
field's value, and the function itself is carried over.
"""


def class_of(source: Any) -> str | None:
    """Return the name of the class in `CLASSES` that `source` is an instance of, or None."""
    # By name, so that megatron is not imported to look at an object of something else.
    names = {cls.__name__ for cls in type(source).__mro__}
    return next((name for name in CLASSES if name in names), None)


def read(source: Any, cls: str, version: str) -> Reading:
    """Read the given values of a live object: the fewest fields that lead to an equal object."""
    attributes = dict(vars(source))
    opaque = {name: value for name, value in attributes.items() if not is_plain(value)}
    fields = objects.from_fields({}, version, cls, check=False)
    plain = {
        name: _plain(value)
        for name, value in attributes.items()
        if name in fields and (name not in opaque or name == ACTIVATION)
    }
    # The object holds the default function, of which the class's facts have only the name.
    if plain.get(ACTIVATION) == member_name(fields.get(ACTIVATION)):
        del plain[ACTIVATION]
    settings = {
        options.RENAMED.get(name, name): value
        for name, value in _set_fields(plain, cls, version).items()
    }
    # A class of the user's own, or of another release, may have more fields than ours.
    more = {name: _plain(value) for name, value in attributes.items() if name not in fields}
    message = f"{cls} of Megatron {version} does not have this field"
    findings = tuple(
        unknown(name, message, show_value(value))
        for name, value in more.items()
        if not _by_default(name, value, cls)
    )
    return Reading(Values(settings), cls, findings=findings, opaque=opaque)


def _by_default(name: str, value: Any, cls: str) -> bool:
    """Whether some release has the field with this value as its default, so that nobody set it."""
    tables = (fields.defaults(version, cls) for version in releases.KNOWN)
    return any(name in table and tuples(table[name]) == tuples(value) for table in tables)


def _set_fields(plain: Mapping[str, Any], cls: str, version: str) -> dict[str, Any]:
    """Return the fields of a live object that somebody must have set, because they are neither
    defaults nor derived from other fields.
    """
    silent = objects.from_fields({}, version, cls, check=False)
    fields = {name: value for name, value in plain.items() if value != silent[name]}
    # A field is dropped if the others lead to it; the last line restores whatever the remaining
    # ones no longer give.
    for name in list(fields):
        rest = {other: value for other, value in fields.items() if other != name}
        if objects.from_fields(rest, version, cls, check=False)[name] == fields[name]:
            fields = rest
    result = objects.from_fields(fields, version, cls, check=False)
    return {**fields, **{name: value for name, value in plain.items() if value != result[name]}}


def is_plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, bool | int | float | str | list | tuple | dict | Enum)
        or is_dtype(value)
    )


def is_dtype(value: Any) -> bool:
    return type(value).__module__ == "torch" and type(value).__name__ == "dtype"


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    return str(value) if is_dtype(value) else getattr(value, "__name__", value)


def as_arguments(settings: Mapping[str, Any], cls: str, version: str) -> dict[str, Any]:
    """Return the effective fields of a live object by argument name. Sizes that were not given are
    None.
    """
    values = objects.from_fields(fields_of(settings, version, cls), version, cls)
    arguments = {options.RENAMED.get(name, name): value for name, value in values.items()}
    arguments.update({name: None for name in OPEN if name in arguments and name not in settings})
    # The class has no such switch: query groups take effect as soon as their number is given.
    return {**arguments, "group_query_attention": "num_query_groups" in settings}


def fields_of(settings: Mapping[str, Any], version: str, cls: str) -> dict[str, Any]:
    """Return the given values by the names of the class's fields, which may differ from the names
    of the arguments.
    """
    own = objects.from_fields({}, version, cls, check=False)
    # Several fields of several releases go by one argument; the class has one of them.
    original = {flag: name for name, flag in options.RENAMED.items() if name in own}
    return {original.get(path, path): value for path, value in settings.items()}


def has_field(path: str, cls: str, version: str) -> bool:
    """Whether the class has a field for the argument `path` in release `version`."""
    names = {*releases.fields(version, options.PARALLEL), *releases.fields(version, cls)}
    return path in {options.RENAMED.get(name, name) for name in names}


def model_parallel(settings: Mapping[str, Any], cls: str, version: str) -> dict[str, Any]:
    """Return the effective `ModelParallelConfig` fields of a live object."""
    values = objects.from_fields(fields_of(settings, version, cls), version, cls)
    return {
        name: value
        for name, value in values.items()
        if name in releases.fields(version, options.PARALLEL)
    }


def release_of_package() -> str | None:
    """Return the release of the installed Megatron-Core; None if it is not installed."""
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return None


def model_parallel_config(config: Config) -> Any:
    """Build a real `ModelParallelConfig` with the effective fields and the callables that were
    carried over.

    Raises `VersionError` if megatron-core is not installed, or if another release is installed.
    """
    release = release_of_package()
    if release is None:
        raise VersionError(
            f"megatron-core: not installed; this config is for {config.version}: pip install megatron-core=={config.version}"
        )
    if release != config.version:
        raise VersionError(
            f"megatron-core: found {release} installed; expected {config.version}, the release of this config; "
            f"install that release, or convert to {release}"
        )
    import megatron.core
    import torch

    cls: Any = megatron.core.ModelParallelConfig
    # Fields that the class derives itself cannot be passed.
    names = {field.name for field in dataclasses.fields(cls) if field.init}
    values = {
        **config.model_parallel,  # type: ignore[attr-defined]
        **{name: value for name, value in config.opaque.items() if value is not None},
    }
    for name, value in values.items():
        # A dtype, which configs hold by name.
        if isinstance(value, str) and value.startswith("torch."):
            values[name] = getattr(torch, value.removeprefix("torch."))
    return cls(**{name: value for name, value in values.items() if name in names})
