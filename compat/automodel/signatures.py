"""Arguments of the classes that recipes name, and the settings in free-form sections of AutoModel's
own recipes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from bridge.errors import nearest
from bridge.releases import table

TARGET = "_target_"
KNOWN_ROOTS = ("nemo_automodel.", "torch.", "transformers.", "torchdata.")
"""Packages of the classes in AutoModel's own recipes. Only the arguments of their classes are
known.
"""
BESIDE = {"optimizer": ("param_group_overrides",)}
"""Settings that AutoModel removes from a section before it calls the class."""
APART = ("ci", "wandb", "benchmark")
"""Sections that do not affect training."""


@cache
def _facts() -> Mapping[str, Any]:
    facts: Mapping[str, Any] = table("compat.automodel.releases", "signatures.json")
    return facts


def taken() -> Collection[str]:
    """The classes whose arguments are known."""
    return tuple(_facts()["takes"])


def refused(path: str, section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names in a section that its class does not have, each with a message. AutoModel stops when it
    builds such a class.
    """
    target = section.get(TARGET)
    takes = _facts()["takes"].get(target) if path and isinstance(target, str) else None
    if takes is None:
        return
    for before, name in enumerate(section):
        if name not in (TARGET, *takes, *BESIDE.get(path, ())):
            yield (
                str(name),
                f"not an argument of {target}, which refuses it{nearest(str(name), takes, before)}",
            )


def strange(
    path: str, name: str, section: Mapping[str, Any], typed: Collection[str], before: int
) -> str:
    """Message about a name in a free-form section that is in no recipe of AutoModel's own; empty if
    one has it.

    `before` is the number of names with a message in front of this one.
    """
    known, target = _facts()["known"].get(path), section.get(TARGET)
    if known is None or name in known or name in typed:
        return ""
    # At the top level a name such as _shared is the author's own, unlike _target_.
    if not path and name.startswith("_") and not name.endswith("_"):
        return ""
    # The arguments of another package's class are not known.
    if (
        isinstance(target, str)
        and not target.startswith(KNOWN_ROOTS)
        and target not in _facts()["named"]
    ):
        return ""
    similar = nearest(name, {*known, *typed}, before)
    return (
        f"no recipe of AutoModel's own has it here, and no known code reads it; it is kept{similar}"
    )


def inside(path: str, value: Any) -> Iterator[tuple[str, str, bool]]:
    """Problems in a section that is kept unchanged, and in the sections below it: path, message,
    and whether AutoModel stops.
    """
    if not isinstance(value, Mapping):
        return
    wrong = dict(refused(path, value))
    for before, (name, inner) in enumerate(value.items()):
        written = f"{path}.{name}"
        if message := wrong.get(name) or strange(path, str(name), value, (), before):
            yield written, message, name in wrong
        else:
            yield from inside(written, inner)
