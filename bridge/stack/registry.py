"""Finds and loads the stacks: each is a folder in `compat` or in a folder that STAGEBRIDGE_PATH
names.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from bridge.errors import BridgeError, nearest
from bridge.files.shown import show_value
from bridge.stack.dialect import Dialect
from bridge.stack.plugins import Plugin, find_dialects

PATH = "STAGEBRIDGE_PATH"
"""Environment variable with folders of further dialects, separated as in PATH."""

PACKAGE = "compat"
"""The package with a folder for each stack."""
FOLDERS = tuple(folder for folder in os.environ.get(PATH, "").split(os.pathsep) if folder)
"""Folders with dialects of users."""


_SPEC = find_spec(PACKAGE)
# Folders of other people are searched by `plugins`, which runs none of their code; here they would
# pass for our own.
_PLACES = [
    place for place in (_SPEC and _SPEC.submodule_search_locations) or () if place not in FOLDERS
]
_FOLDERS = {
    os.path.join(place, module.name)
    for place in _PLACES
    for module in pkgutil.iter_modules([place])
    if module.ispkg
}
HOSTS = tuple(
    sorted(
        os.path.basename(folder)
        for folder in _FOLDERS
        if os.path.isfile(os.path.join(folder, "host.py"))
    )
)
"""Names of the hosts: programs that start runs of several stacks. Their dialects are loaded by name, and are no
pair of every stack.
"""
FRONT_ENDS = tuple(
    sorted(
        os.path.basename(folder)
        for folder in _FOLDERS
        if os.path.isfile(os.path.join(folder, "front_end.py"))
    )
)
"""Names of the folders with a front end: a program with a config of its own, by which it starts runs of stacks."""
OWN = tuple(
    sorted(
        os.path.basename(folder)
        for folder in _FOLDERS
        if os.path.isfile(os.path.join(folder, "dialect.py"))
        and os.path.basename(folder) not in HOSTS
    )
)
"""Names of the dialects that are part of this project."""


@cache
def plugins() -> Mapping[str, Plugin]:
    """Return the dialects of users by name. To find a dialect, none of its code is run."""
    return {plugin.name: plugin for plugin in find_dialects(FOLDERS, OWN)[0]}


def faults() -> tuple[str, ...]:
    """Return a message for each folder in STAGEBRIDGE_PATH that is missing or has a fault."""
    return tuple(f"{PATH}: {fault}" for fault in find_dialects(FOLDERS, OWN)[1])


def names() -> tuple[str, ...]:
    """Names of all dialects, in alphabetical order."""
    return tuple(sorted((*OWN, *plugins())))


def candidates(data: Any) -> tuple[str, ...]:
    """Return the dialects that parsed `data` may belong to: our own, and dialects of users whose
    signature matches.
    """
    return tuple(name for name in names() if name in OWN or plugins()[name].matches(data))


@cache
def load(name: str) -> Dialect:
    """Return the dialect in the folder `name`. Raises `BridgeError` if there is no such dialect,
    with the nearest name, or if the dialect cannot be imported.
    """
    if name not in (*names(), *HOSTS):
        unknown = f"{name}: unknown dialect; known are {', '.join(names())}{nearest(name, names())}"
        raise BridgeError(unknown, *(fault for fault in faults() if f"{os.sep}{name}: " in fault))
    dialect = import_attribute(name, "" if name in plugins() else ".dialect", "DIALECT")
    if not isinstance(dialect, Dialect):
        raise BridgeError(
            f"{name}: {plugins()[name].place} has a DIALECT that is not a Dialect "
            f"({show_value(dialect)}); correct the file, or remove the folder"
        )
    return dialect


def find_host(data: Any) -> Any:
    """Return the module of the host that starts the run in parsed `data`; None if none does."""
    runs = (name for name in HOSTS if import_attribute(name, ".recognition", "score")(data))
    return next((import_module(f"{PACKAGE}.{name}.host") for name in runs), None)


def find_trainer(data: Any) -> Any:
    """Return the module of the host that runs arguments of Hugging Face's Trainer which nothing else starts; None if parsed
    `data` is none.
    """
    runs = (name for name in HOSTS if import_attribute(name, ".recognition", "has_arguments")(data))
    return next((import_module(f"{PACKAGE}.{name}.host") for name in runs), None)


def find_front_end(data: Any) -> Any:
    """Return the module of the front end whose own config, or script, parsed `data` is; None if it is none."""
    modules = (import_module(f"{PACKAGE}.{name}.front_end") for name in FRONT_ENDS)
    return next((module for module in modules if module.starts(data)), None)


def find_release(data: Any) -> str | None:
    """Return the release of the stack by which a front end's own config, or script, is read; None for the newest."""
    front_end = find_front_end(data)
    release: str | None = front_end.RELEASE if front_end else None
    return release


def name_user_config(document: Any) -> Any:
    """Return a document of a script whose launches name the config of the user that their host reads by default."""
    for name in HOSTS:
        document = import_module(f"{PACKAGE}.{name}.host").name_user_config(document)
    return document


def find_launcher(data: Any) -> Any:
    """Return the module of the host whose own config parsed `data` is, by which it starts any program; None if it is none."""
    host = find_host(data)
    path = f"{PACKAGE}.{host.NAME}.recognition" if host else ""
    return host if host and import_module(path).is_config(data) else None


def score(name: str, data: Any) -> int:
    """Return how sure the dialect `name` is that parsed `data` is its own; 0 if it is not. Of our own dialects no more
    is imported than recognises files.
    """
    if name in OWN:
        return int(import_attribute(name, ".recognition", "score")(data))
    return load(name).recognises(data)


def name_lookalike(name: str, data: Any) -> str:
    """Return a message if parsed `data` is another file that looks like a config of the dialect `name`, else an empty
    string.
    """
    if name not in OWN:
        return ""
    module = import_module(f"{PACKAGE}.{name}.recognition")
    return str(module.name_lookalike(data)) if hasattr(module, "name_lookalike") else ""


def find_text_decoder(data: Any) -> Mapping[str, Any] | None:
    """Return the config of the text decoder in parsed `data`, a model's config with several parts; None if it has none."""
    modules = (import_module(f"{PACKAGE}.{name}.recognition") for name in OWN)
    found = (one.find_text_decoder(data) for one in modules if hasattr(one, "find_text_decoder"))
    return next(filter(None, found), None)


def recognising(data: Any) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the score of each candidate for parsed `data`, and the problems of candidates that
    cannot be imported.
    """
    sure: dict[str, int] = {}
    faults: list[str] = []
    for name in candidates(data):
        try:
            sure[name] = score(name, data)
        except BridgeError as error:
            if name in OWN:
                raise
            faults += error.problems
    return sure, tuple(faults)


def import_attribute(name: str, module: str, attribute: str) -> Any:
    """Return `attribute` of a dialect's module. Raises `BridgeError` with one line if the module of
    a user's dialect fails.
    """
    try:
        return getattr(import_module(f"{PACKAGE}.{name}{module}"), attribute)
    except (Exception, SystemExit) as error:
        if name in (*OWN, *HOSTS):
            raise
        where = plugins()[name].place
        raise BridgeError(
            f"{name}: {where} cannot be imported ({type(error).__name__}: {error}); correct the module, or "
            "remove the folder"
        ) from error
