"""Reads the facts of a Megatron-LM release from its source tree: the flags of its parser, and the fields of its classes.

The release's own code builds the parser. Classes are read from their text; a default that is not a literal is kept as the
text of its expression. Besides torch, releases since 0.17 import `triton`, older ones `six`.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib import import_module
from types import FunctionType
from typing import Any

from bridge.errors import SourceError
from tests.harvesting.code import fields_of_class, plain
from tests.harvesting.rows import Facts, Row
from tests.harvesting.source import Package, Tree

PACKAGE = Package("megatron-core", "megatron", "core/package_info.py")
TABLES: Mapping[str, tuple[str, ...]] = {
    "flags.json": ("dest", "options"),
    "classes.json": ("class", "name"),
}
"""Files of facts, with the columns that identify a row."""
CLASSES: Mapping[str, str] = {
    "DistributedDataParallelConfig": "core/distributed/distributed_data_parallel_config.py",
    "MLATransformerConfig": "core/transformer/transformer_config.py",
    "ModelParallelConfig": "core/model_parallel_config.py",
    "OptimizerConfig": "core/optimizer/optimizer_config.py",
    "TransformerConfig": "core/transformer/transformer_config.py",
}
"""Config classes, and their files below the package."""
ACTIONS: Mapping[str, str] = {
    "_StoreAction": "store",
    "_StoreTrueAction": "true",
    "_StoreFalseAction": "false",
    "BooleanOptionalAction": "switch",
    "_HelpAction": "help",
}
"""Our names for argparse's actions."""
TYPES: Mapping[str, str] = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "text",
    "tuple_type": "integers",
}
"""Our names for types of flags, by the name of the release's conversion function."""
LAYERS = "_freq_type"
"""Suffix of functions that read a number, or a list with one number for each layer."""
SPACED = "[0, 1]"
"""A sample value with a space. It shows whether a conversion function accepts spaces."""
HELP = "help"


def facts(tree: Tree) -> Facts:
    """Return the rows of facts about the release, and the groups of flags of all releases so far.
    This runs the release's own code.
    """
    unread: list[str] = []
    parser = _parser(tree)
    flags = sorted(_flags(parser, unread), key=lambda row: (row["dest"], row["options"]))
    fields = [
        {"class": name, **row}
        for name, file in CLASSES.items()
        for row in fields_of_class(tree.folder / file, name)
    ]
    return Facts(
        {"flags.json": flags, "classes.json": fields},
        {"groups.json": dict(_groups(parser))},
        unread,
    )


def ready() -> None:
    """Add `typing.override` if this Python lacks it, because newer source trees import it."""
    if not hasattr(typing, "override"):  # new in Python 3.12, and used by releases since 0.19
        typing.override = lambda method: method  # type: ignore[attr-defined]


def _parser(tree: Tree) -> argparse.ArgumentParser:
    """Build the parser of the release. Raises `SourceError` for a package without Megatron's
    training scripts.
    """
    if not (tree.folder / "training").is_dir():
        raise SourceError(
            f"{tree.folder}: it has no folder named training; "
            "name the source tree of Megatron-LM, not the package that pip installs"
        )
    ready()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    result: argparse.ArgumentParser = import_module(
        "megatron.training.arguments"
    ).add_megatron_arguments(parser)
    return result


def _flags(parser: argparse.ArgumentParser, unread: list[str]) -> Iterator[Row]:
    # argparse collects the exclusive groups of all sections in the parser itself.
    groups = [group._group_actions for group in parser._mutually_exclusive_groups]
    exclusive = [
        [name for action in actions for name in action.option_strings] for actions in groups
    ]
    for action in parser._actions:
        kind, turns = ACTIONS.get(type(action).__name__), _turns(action)
        # What is not known here goes to a person, instead of becoming a wrong fact.
        if kind is None or (kind == "store" and turns is None):
            unread.append(
                f"{action.option_strings}: unknown action {type(action).__name__} or type"
                f" {getattr(action.type, '__qualname__', None)}"
            )
            continue
        row = {"options": action.option_strings, "dest": action.dest, "action": kind}
        more = (
            {"type": turns, "nargs": action.nargs, "choices": _choices(action)}
            if kind == "store"
            else {}
        )
        # Of several flags that set one argument, argparse takes the default of the first.
        default = next(other.default for other in parser._actions if other.dest == action.dest)
        others = [
            name for group in exclusive if action.option_strings[0] in group for name in group
        ]
        more |= {"default": None if kind == HELP else plain(default)}
        more |= {"excludes": [name for name in others if name not in action.option_strings] or None}
        yield {**row, **{name: value for name, value in more.items() if value is not None}}


def _turns(action: argparse.Action) -> str | None:
    """Return our name for the type of a flag's values; None for an unknown conversion function."""
    if action.type is None:
        return "text"
    name = getattr(action.type, "__qualname__", "").rpartition(".")[2]
    if name.endswith(LAYERS):
        return "layers_spaced" if _reads(action.type, SPACED) else "layers"
    return "name" if _enumeration(action) else TYPES.get(name)


def _reads(turns: Any, word: str) -> bool:
    """Whether a conversion function of the release accepts a word. The function may refuse with any
    exception.
    """
    try:
        turns(word)
    except Exception:
        return False
    return True


def _enumeration(action: argparse.Action) -> type[Enum] | None:
    """Return the enumeration of a flag, found in its choices or in its conversion function."""
    member = next((choice for choice in action.choices or () if isinstance(choice, Enum)), None)
    if member is not None or not isinstance(action.type, FunctionType):
        return type(member) if member is not None else None
    candidates = (action.type.__globals__.get(name) for name in action.type.__code__.co_names)
    return next(
        (
            candidate
            for candidate in candidates
            if isinstance(candidate, type) and issubclass(candidate, Enum)
        ),
        None,
    )


def _choices(action: argparse.Action) -> list[Any] | None:
    enumeration = _enumeration(action)
    if enumeration is None:
        return None if action.choices is None else [plain(choice) for choice in action.choices]
    words = {*enumeration.__members__}
    # A conversion function may accept words besides the members of the enumeration; they are
    # constants of its code.
    turns: Any = action.type
    for constant in turns.__code__.co_consts if isinstance(turns, FunctionType) else ():
        for part in constant if isinstance(constant, tuple | frozenset) else (constant,):
            if isinstance(part, str) and part.isidentifier() and _reads(turns, part):
                words.add(part)
    return sorted(words)


def _groups(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for group in parser._action_groups:
        title = str(group.title)
        # An acronym such as RNG keeps its capitals.
        text = title if title[:2].isupper() else title[:1].lower() + title[1:]
        yield from ((action.dest, text) for action in group._group_actions if action.dest != HELP)


def path_of(file: str, row: Row) -> str:
    """Return the name of the setting that a row describes."""
    return str(row["dest"] if file == "flags.json" else row["name"])
