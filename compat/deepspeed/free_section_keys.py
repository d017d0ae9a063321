"""The names of keys inside free-form sections, and of arguments of optimizers and schedulers.
stagebridge does not change the values of these keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from bridge.errors import nearest
from bridge.files import scalar
from bridge.files.shown import show_value
from bridge.stack.releases import table
from bridge.stack.rules import Effect
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


IGNORED = "DeepSpeed reads no key of this name in this section, and ignores it"
"""DeepSpeed asks a section for its keys by name (runtime/config.py: get_scalar_param, and get of a
mapping); only sections of `DeepSpeedConfigModel` refuse other keys (runtime/config_utils.py).
"""


def is_remark(name: str) -> bool:
    """Return whether a key is a remark of the file's author: no key of DeepSpeed starts like this."""
    return not name[:1].isalpha()


def suggest_spelling(name: str, value: Any, names: Names, before: int = 0) -> str:
    """Return "; did you mean X?" if `name` is probably a misspelling of one of `names`, else an empty
    string. A text is no section, whatever its name is.
    """
    if is_remark(name):
        return ""
    prose = [scalar(value)] if isinstance(value, str) else value
    prose = isinstance(prose, list) and all(isinstance(one, str) and one != "auto" for one in prose)
    candidates = [
        candidate
        for candidate, inner in names.items()
        if not (prose and isinstance(inner, Mapping))
    ]
    return nearest(name, candidates, before)


def unread(path: str, value: Any) -> Iterator[tuple[str, str, Effect]]:
    """Yield path, message and effect of each name in the section `value` at `path` that DeepSpeed
    does not read.
    """
    yield from _find_unread(path, value, _facts()["sections"].get(path))


def _find_unread(path: str, value: Any, names: Names | None) -> Iterator[tuple[str, str, Effect]]:
    if names is None:
        return
    if not isinstance(value, Mapping):
        if value is not None and any(part in path for part in GROUPS):
            yield (
                path,
                f"found {show_value(value)}, expected a section with settings",
                Effect.NUMBERS,
            )
        return
    for before, (name, inner) in enumerate(value.items()):
        if name in names or ANY in names:
            yield from _find_unread(f"{path}.{name}", inner, names.get(name, names.get(ANY)))
        else:
            advice = suggest_spelling(str(name), inner, names, before)
            yield f"{path}.{name}", IGNORED + advice, Effect.NUMBERS if advice else Effect.NONE


def strange(
    kind: str, forms: tuple[Type, ...], type_name: str, argument: str, before: int = 0
) -> tuple[str, Effect] | None:
    """Return message and effect for an argument that the optimizer or scheduler does not take in
    this release; None if the argument is allowed. `kind` is `optimizers` or `schedulers`, `type_name`
    the type's name, and `forms` the implementations of the type in this release. For a type that
    only other releases have, the arguments in those releases are allowed. For a type that no
    release has, the arguments of all types are allowed. `before` is the number of arguments that
    precede this one in the file.
    """
    torch = next(
        (
            names
            for name, names in _facts()["torch"][kind].items()
            if name.lower() == type_name.lower()
        ),
        None,
    )
    if forms and torch is not None:
        # max_grad_norm has a finding of its own, which tells to use gradient_clipping.
        if argument in (*torch, "max_grad_norm"):
            return None
        return (
            f"{type_name} in torch 2.13 refuses this argument{nearest(argument, torch, before)}",
            Effect.STOPS,
        )
    rows = all_types(kind)
    elsewhere = [
        row for row in rows if row.type.lower() == type_name.lower() and row.args is not None
    ]
    allowed_names = {
        name
        for row in elsewhere or rows
        for name in (*(row.args or ()), *row.required, *row.ignored)
    }
    allowed_names |= {"max_grad_norm"}
    if argument in allowed_names:
        return None
    takers = f"{type_name} in any release" if elsewhere else f"any of DeepSpeed's {kind}"
    return f"not an argument of {takers}{nearest(argument, allowed_names, before)}", Effect.NUMBERS
