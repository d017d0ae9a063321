"""Arguments of the classes that recipes name, and the settings in free-form sections of AutoModel's
own recipes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from bridge.errors import nearest
from bridge.plan.families import FAMILIES, ROTARY, of_class, read_by
from bridge.plan.families.rope import GROUPED, SCALING
from bridge.stack.releases import table

TARGET = "_target_"
KNOWN_ROOTS = ("nemo_automodel.", "torch.", "transformers.", "torchdata.")
"""Top-level packages of the classes in AutoModel's own recipes. Arguments of classes in other
packages are not known.
"""
BESIDE = {"optimizer": ("param_group_overrides",)}
"""Settings of a section that AutoModel does not pass to the class of the section."""
APART = ("ci", "wandb", "benchmark")
"""Sections that do not affect training."""


@cache
def _facts() -> Mapping[str, Any]:
    facts: Mapping[str, Any] = table("compat.automodel.releases", "signatures.json")
    return facts


def find_wrong_keys(path: str, section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each key of a section that is not an argument of the section's class, with a message.
    AutoModel stops when it builds such a class.
    """
    target = section.get(TARGET)
    takes = _facts()["takes"].get(target) if path and isinstance(target, str) else None
    if takes is None:
        return
    for before, name in enumerate(section):
        if name not in (TARGET, *takes, *BESIDE.get(path, ())):
            yield (
                str(name),
                f"{target} does not have this argument, and refuses it{nearest(str(name), takes, before)}",
            )


def read_in(path: str, section: Mapping[str, Any]) -> Collection[str]:
    """Return the keys that the code of a section reads: the parameters of the function that it names,
    or the keys of the model's class in transformers.
    """
    target, (above, _, last) = section.get(TARGET), path.rpartition(".")
    if last in (SCALING, GROUPED):
        return ROTARY
    if last == "config" and above.endswith("model"):
        kind = of_class(target) if isinstance(target, str) else section.get("model_type")
        return read_by(kind) if kind in FAMILIES else ()
    reads: Collection[str] = _facts()["reads"].get(target, ()) if isinstance(target, str) else ()
    return reads


def strange(
    path: str, name: str, section: Mapping[str, Any], schema_keys: Collection[str], before: int
) -> str:
    """Return a message about a key in a free-form section if none of AutoModel's own recipes has
    the key there. Return "" otherwise.

    `before` is the number of messages about earlier keys.
    """
    keys, target = _facts()["known"].get(path), section.get(TARGET)
    if keys is None or name in keys or name in schema_keys or name in read_in(path, section):
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
    similar = nearest(name, {*keys, *schema_keys}, before)
    return f"no recipe of AutoModel has this key here, and no known code reads it{similar}"


def find_problems(path: str, value: Any) -> Iterator[tuple[str, str, bool]]:
    """Yield each problem in a free-form section and in the sections below it: path, message, and
    whether AutoModel stops.
    """
    if not isinstance(value, Mapping):
        return
    wrong = dict(find_wrong_keys(path, value))
    for before, (name, inner) in enumerate(value.items()):
        place = f"{path}.{name}"
        if message := wrong.get(name) or strange(path, str(name), value, (), before):
            yield place, message, name in wrong
        else:
            yield from find_problems(place, inner)
