"""The names of keys inside free-form sections, and of arguments of optimizers and schedulers.
stagebridge does not change the values of these keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from bridge.config import shown
from bridge.errors import nearest
from bridge.releases import table
from bridge.rules import Effect
from compat.deepspeed.releases import Type, all_types

ANY = "*"
"""Key in a table of names that stands for any name that the user chooses."""

GROUPS = (".different_groups.", ".shared_parameters.")
"""Sections of the compression settings in which every name is a further section, not a single value
(compression/config.py, until 0.19.6).
"""
Names = Mapping[str, Any]
"""Names that DeepSpeed reads directly in one section. A name maps to None for a single value, and
to a mapping of further names for a section.
"""


@cache
def _facts() -> Mapping[str, Names]:
    facts: Mapping[str, Names] = table("compat.deepspeed.releases", "inside.json")
    return facts


def unread(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield path and message of each name in the section `value` at `path` that DeepSpeed does not
    read.
    """
    yield from _unread(path, value, _facts()["sections"].get(path))


def _unread(path: str, value: Any, names: Names | None) -> Iterator[tuple[str, str]]:
    if names is None:
        return
    if not isinstance(value, Mapping):
        if value is not None and any(part in path for part in GROUPS):
            yield (
                path,
                f"found {shown(value)}, expected a section with settings",
            )
        return
    for before, (name, inner) in enumerate(value.items()):
        written = f"{path}.{name}"
        if name in names or ANY in names:
            yield from _unread(written, inner, names.get(name, names.get(ANY)))
        else:
            yield (
                written,
                "DeepSpeed ignores this key, because it reads no key with this name in this"
                f" section{nearest(str(name), names, before)}",
            )


def strange(
    kind: str, forms: tuple[Type, ...], given: str, argument: str, before: int = 0
) -> tuple[str, Effect] | None:
    """Return message and effect for an argument that the optimizer or scheduler does not take in
    this release; None if the argument is allowed. `kind` is `optimizers` or `schedulers`, `given`
    the type's name, and `forms` the implementations of the type in this release. For a type that
    only other releases have, the arguments in those releases are allowed. For a type that no
    release has, the arguments of all types are allowed. `before` is the number of arguments that
    precede this one in the file.
    """
    torch = next(
        (names for name, names in _facts()["torch"][kind].items() if name.lower() == given.lower()),
        None,
    )
    if forms and torch is not None:
        # max_grad_norm has a finding of its own, which tells to use gradient_clipping.
        if argument in (*torch, "max_grad_norm"):
            return None
        return (
            f"{given} in torch 2.13 refuses this argument{nearest(argument, torch, before)}",
            Effect.STOPS,
        )
    rows = all_types(kind)
    elsewhere = [row for row in rows if row.type.lower() == given.lower() and row.args is not None]
    known = {
        name
        for row in elsewhere or rows
        for name in (*(row.args or ()), *row.required, *row.ignored)
    }
    known |= {"max_grad_norm"}
    if argument in known:
        return None
    takers = f"{given} in any release" if elsewhere else f"any of DeepSpeed's {kind}"
    return f"not an argument of {takers}{nearest(argument, known, before)}", Effect.NUMBERS
