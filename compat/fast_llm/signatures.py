"""Checks free-form sections against their release's config classes: names, types and bounds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from bridge.errors import nearest
from bridge.files.shown import show_value
from bridge.stack.releases import table
from compat.fast_llm.releases import KNOWN, RELEASES

MODEL = "model.base_model"
FACTS = "compat.fast_llm.releases"
TYPE = "type"
KINDS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
}
SIMPLE = re.compile(r"(int|float|bool|str)(?:([<>]=?)(.+))?")
WITHIN = {
    ">": lambda value, limit: value > limit,
    ">=": lambda value, limit: value >= limit,
    "<": lambda value, limit: value < limit,
    "<=": lambda value, limit: value <= limit,
}

ELSEWHERE = (
    *(
        ("gpt", "GPTModelConfig"),
        ("multimodal", "MultiModalModelConfig"),
        ("gpt", "GPTTrainerConfig"),
    ),
    *(("multimodal", "MultiModalTrainerConfig"), ("train_gpt", "GPTTrainerConfig")),
    ("train_multimodal", "MultiModalTrainerConfig"),
)
"""The config class for each type name that `FastLLMModelConfig` and `RunnableConfig` register
(models/*/config.py).
"""
Class = Mapping[str, Any]
"""A config class.

`fields` maps names to types. A type is a plain type with its bound (`int>=0`), a class, `{}` and a
class for a mapping of named entries, or `?` for any value. `types` maps the values of the key
`type` to classes. `below` has the subclasses. Without a `type`, the class `default` applies, or
this class itself if it has none.
"""


@cache
def _classes(version: str) -> Mapping[str, Class]:
    """Return the config classes of a release by name."""
    return {row["class"]: row for row in table(FACTS, "classes.json") if _holds(row, version)}


def _holds(row: Mapping[str, Any], version: str) -> bool:
    return RELEASES.within(version, row.get("since", ""), row.get("until", ""))


@cache
def bags(version: str) -> Mapping[str, str]:
    """Return the class of each free-form section by its path, in the notation of `Class.fields`."""
    kinds = {
        row["key"]: str(row["type"]) for row in table(FACTS, "keys.json") if _holds(row, version)
    }
    return {
        path: kind for path, kind in kinds.items() if kind.removeprefix("{}") in _classes(version)
    }


def fields_at(path: str, version: str) -> tuple[bool, Mapping[str, str]]:
    """Return whether the section at `path` is a mapping of named entries, and the fields of the
    section (or of each entry) that have plain types.
    """
    classes = _classes(version)
    kind = bags(version).get(path, "?")
    name = kind.removeprefix("{}")
    own_fields = _fields(name, None, classes) if name in classes else {}
    return kind.startswith("{}"), {
        field: simple for field, simple in own_fields.items() if SIMPLE.fullmatch(simple)
    }


def problems(model: Mapping[str, Any], path: str, version: str) -> Iterator[tuple[str, str]]:
    """Yield path and message of each refusal of the section at `path`. Yield nothing if the release
    has no class for this section.
    """
    classes = _classes(version)
    yield from _value(model, path, bags(version).get(path, "?"), classes)


def of_another_release(model: Mapping[str, Any], path: str, version: str) -> str:
    """Return the newest other release that accepts the section unchanged; empty if no release does."""
    others = (other for other in reversed(KNOWN) if other != version and path in bags(other))
    return next((other for other in others if not any(problems(model, path, other))), "")


COUNTED = (
    *(
        "heads",
        "num_attention_heads",
        "n_qk_heads",
        "n_v_heads",
        "d_inner",
        "d_xb",
        "chunk_size",
        "rank",
        "lr_scale",
        "theta",
    ),
    *(
        "scale_factor",
        "rotary_embedding_scale",
        "low_frequency_factor",
        "high_frequency_factor",
        "attention_factor",
    ),
    *(
        "original_context_length",
        "patch_height",
        "patch_width",
        "max_length",
        "parameters_per_file",
        "max_vocab_size",
    ),
)
"""Fields that must not be negative in a run, although their classes state no bound."""


def below_zero(section: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each negative number that the classes accept but no run can use."""
    for name, value in section.items() if isinstance(section, Mapping) else ():
        if name in COUNTED and isinstance(value, int | float) and value < 0:
            yield f"{path}.{name}", value
        yield from below_zero(value, f"{path}.{name}")


def _walk(
    data: Any, path: str, name: str, classes: Mapping[str, Class]
) -> Iterator[tuple[str, str]]:
    """Yield refusals of `data` at `path` as a section of class `name`."""
    if data is None:
        return
    if not isinstance(data, Mapping):
        yield path, f"found {show_value(data)}; expected a mapping"
        return
    own_fields = _fields(name, data.get(TYPE), classes)
    for before, (key, value) in enumerate(data.items()):
        inner = f"{path}.{key}"
        # Since 0.3.0 every class has the key `type` (fast_llm/config.py, Config).
        if key == TYPE and any("types" in row for row in classes.values()):
            types = _types(name, classes)
            # Unregistered types are refused as `Unknown type ... for base class`.
            if value is not None and not (isinstance(value, str) and value in types):
                options = (
                    f"one of {', '.join(types)}"
                    if types
                    else "no type, because this section has only one class; drop the key"
                )
                yield inner, f"found {show_value(value)}; expected {options}"
        elif key not in own_fields:
            of = " of the model" if path.startswith(MODEL) else ""
            yield inner, f"unknown field{of}{nearest(str(key), (*own_fields, TYPE), before)}"
        else:
            yield from _value(value, inner, own_fields[key], classes)


def _types(name: str, classes: Mapping[str, Class]) -> Mapping[str, str]:
    """Return the classes that the key `type` may choose for a section of class `name`, by type
    name: the class and its subclasses.

    The type names are registered by this class or by one of its parents (fast_llm/config.py,
    Config.get_subclass).
    """
    names = {name, *classes[name].get("below", ())}
    above = (row for one, row in classes.items() if name in (one, *row.get("below", ())))
    pairs = [pair for row in above for pair in row.get("types", {}).items()]
    return {kind: chosen for kind, chosen in (*pairs, *ELSEWHERE) if chosen in names}


def _fields(name: str, kind: Any, classes: Mapping[str, Class]) -> Mapping[str, str]:
    """Return the fields of the class that the key `type` chooses, else of the default class."""
    chosen = _types(name, classes).get(kind) if isinstance(kind, str) else None
    own_fields: Mapping[str, str] = classes[chosen or classes[name].get("default") or name][
        "fields"
    ]
    return own_fields


def _value(
    value: Any, path: str, kind: str, classes: Mapping[str, Class]
) -> Iterator[tuple[str, str]]:
    if kind in classes:
        yield from _walk(value, path, kind, classes)
    elif kind.startswith("{}"):
        if not isinstance(value, Mapping):
            yield path, f"found {show_value(value)}; expected a mapping"
            return
        for key, inner in value.items():
            if inner is None:
                yield f"{path}.{key}", "found null; expected a mapping"
            yield from _walk(inner, f"{path}.{key}", kind[2:], classes)
    elif (simple := SIMPLE.fullmatch(kind)) and value is not None:
        yield from _simple(value, path, *simple.groups())


def _simple(
    value: Any, path: str, kind: str, sign: str | None, limit: str | None
) -> Iterator[tuple[str, str]]:
    if not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "bool"):
        yield path, f"found {show_value(value)}; expected {kind}"
    elif sign and limit and not WITHIN[sign](value, float(limit)):
        yield path, f"found {show_value(value)}; expected {kind} {sign} {limit}"
