"""Reads a `config.json`, a folder with one, text or a mapping into typed values, and writes JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from bridge.errors import SourceError, nearest
from bridge.files import Document, check_nested, load
from bridge.files.shown import show_value
from bridge.plan.families import FAMILIES, NULL, ROTARY
from bridge.plan.families.refusals import find_unread_keys
from bridge.plan.families.setting_types import REST, spell_value
from bridge.plan.section import Values, fields
from bridge.stack.dialect import Reading, Written
from bridge.stack.findings import Finding, Origin, unknown
from bridge.stack.rules import Effect
from compat.huggingface.schema import HuggingFace

NAME = "config.json"
INSIDE = ("text_config", "vision_config", "audio_config")
"""Keys that hold the config of one part of a model, such as its text decoder. A plan describes only
models with a single part.
"""


def read(source: Any, lenient: bool = False) -> Reading:
    """Read a path, folder, text or mapping. Raises one error with every problem; if `lenient`, an
    unknown model type is left out.
    """
    data, document = _load_source(source)
    settings, origins, problems = dict[str, Any](), dict[str, Origin](), list[str]()
    others: dict[str, Any] = {}
    findings = list[Finding]()
    for name, value in data.items():
        line = document.line(name) if document else None
        key = str(name)
        if key not in fields(HuggingFace) or key == REST:
            others[key] = value
            continue
        try:
            setting = _as_typed(key, value)
        except ValueError as error:
            problems.append(f"{f'line {line}: ' if line else ''}{key}: {error}")
            continue
        if setting is not None:
            settings[key] = setting
            origins |= {key: Origin(line)} if line else {}
    if (flaw := _unknown(settings.get("model_type"), data)) and lenient:
        findings.append(unknown("model_type", flaw, None, origins.get("model_type")))
        del settings["model_type"]
    elif flaw:
        problems.append(flaw)
    findings += (
        *find_unread_keys(settings.get("model_type"), data, lambda key: _origin(document, key)),
        *_unread_rope(data, document),
    )
    # Keys that no family reads are kept as they are, so that a file that is written again has them.
    return Reading(
        Values({**settings, **({REST: others} if others else {})}), "file", origins, tuple(findings)
    ).unless(problems)


def _unread_rope(data: Mapping[str, Any], document: Document | None) -> Iterator[Finding]:
    """Yield findings on unknown keys of rotary positions."""
    for name in ("rope_scaling", "rope_parameters"):
        inner = data.get(name)
        for key in map(str, inner) if isinstance(inner, Mapping) else ():
            if key not in ROTARY:
                message = f"has no effect: transformers reads no such key of rotary positions{nearest(key, ROTARY)}"
                yield Finding(
                    f"{name}.{key}",
                    message,
                    Effect.NUMBERS,
                    True,
                    origin=_origin(document, name),
                    surprising=True,
                )


def _origin(document: Document | None, key: str) -> Origin | None:
    line = document.line(key) if document else None
    return Origin(line) if line else None


def _load_source(source: Any) -> tuple[Mapping[str, Any], Document | None]:
    if isinstance(source, Mapping):
        check_nested(source, "mapping")
        return source, None
    if isinstance(source, Written):
        source = source.text
    if not isinstance(source, str | Path | Document):
        raise SourceError(
            f"huggingface: found {show_value(source)}; expected a path, a folder, text or a mapping"
        )
    document = load(_file(source))
    if not isinstance(document.data, Mapping):
        raise SourceError(f"{document.name}: found {show_value(document.data)}; expected a mapping")
    return document.data, document


def _file(source: str | Path | Document) -> str | Path | Document:
    """Return the path of the `config.json` in a folder. Return any other source unchanged."""
    if isinstance(source, Document) or (
        isinstance(source, str) and ("\n" in source or source.lstrip().startswith("{"))
    ):
        return source
    place = Path(source)
    return place / NAME if place.is_dir() else source


def _unknown(model_type: Any, data: Mapping[str, Any]) -> str:
    """Return the problem with a model type that no plan can describe; empty if there is no problem."""
    inside = [name for name in INSIDE if isinstance(data.get(name), Mapping)]
    if inside:
        return (
            f"model_type: found {show_value(model_type)} with {', '.join(inside)}; "
            "expected the config of a single text decoder"
        )
    if model_type is None or model_type in FAMILIES:
        return ""
    return (
        f"model_type: found {show_value(model_type)}, whose layers stagebridge"
        f" cannot translate{nearest(str(model_type), FAMILIES)}"
    )


# pydantic compiles a validator for each adapter, which takes far longer than the check of one
# value.
@cache
def _adapter(key: str) -> TypeAdapter[Any]:

    return TypeAdapter(
        fields(HuggingFace)[key].annotation, config=ConfigDict(strict=True, allow_inf_nan=False)
    )


def _as_typed(key: str, value: Any) -> Any:
    """Return the value converted to the type of its key, with a tuple for a list. Null becomes
    `NULL` if it has another meaning than a missing key.
    """
    if value is None:
        return NULL if nullable(key) else None
    if value == NULL:
        raise ValueError(f"found the text {NULL!r}; write null")
    try:
        return _adapter(key).validate_python(value)
    except ValidationError as error:
        messages = dict.fromkeys(
            detail["msg"].removeprefix("Value error, ")
            for detail in error.errors(include_url=False)
            if detail.get("ctx") != {"expected": repr(NULL)}  # which a file writes as null
        )
        raise ValueError(f"found {show_value(value)}; {'; '.join(messages)}") from None


@cache
def nullable(key: str) -> bool:
    """Return whether null has another meaning than a missing key."""
    return NULL in str(fields(HuggingFace)[key].annotation)


def text(settings: Mapping[str, Any]) -> str:
    """Return the config as JSON, with the model type first."""
    entries = {
        key: spell_value(key, settings[key])
        for key in ("model_type", *fields(HuggingFace))
        if key in settings and key != REST
    }
    return json.dumps({**entries, **settings.get(REST, {})}, indent=2) + "\n"
