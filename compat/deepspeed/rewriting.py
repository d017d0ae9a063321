"""Writes new values into the user's own file: HJSON with its comments, or the here-document of a launch script."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge.dialect import Reading
from bridge.errors import BridgeError, TranslationError
from bridge.files import Document, Original, Script
from compat.deepspeed import scripts
from compat.deepspeed.formats import read
from compat.deepspeed.releases import Release

VALUE = r'(?:\$\{[^}]*\}|\$\([^)]*\)|"[^"]*"|[^,}\]\n])*?'
"""A scalar, or a shell expansion in its place."""


def reworded(given: Mapping[str, Any], original: Original, was: Release, release: Release) -> str:
    """The text of `original`, read for release `was`, with the values of `given`. Unchanged values are not touched.

    Raises `TranslationError` if a key was removed or a value spans several lines. The result was read back and compared.
    """
    before, document = _reading(original, was), _document(original)
    if before is None:
        raise TranslationError(f"{document.name}: release {was.version} cannot read it any more; write JSON")
    text = original.text
    for path, value in sorted(given.items(), key=lambda item: before.given.get(item[0]) is None):
        if not path.startswith("code.") and before.given.get(path) != value:
            text = _put(text, path, value, before, document)
    after = _reading(replace(original, text=text), release)
    if after is None or _file_part(after.given) != _file_part(given):
        raise TranslationError(f"{document.name}: its lines cannot be changed one by one; write JSON, or use --no-carry")
    return text


def _file_part(given: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in given.items() if not path.startswith("code.")}


def _document(original: Original) -> Document:
    """The config, with its lines in the text."""
    data = original.document.data
    return scripts.read(data).document if isinstance(data, Script) else original.document


def _reading(original: Original, release: Release) -> Reading | None:
    try:
        return read(original.document, release, lenient=True)
    except BridgeError:
        return None


def _put(text: str, path: str, value: Any, before: Reading, document: Document) -> str:
    """One value changed on its line, or a new key behind the bracket of its section."""
    section, _, key = path.rpartition(".")
    lines, shown = text.split("\n"), json.dumps(value)
    if path in before.given:
        origin = before.origins.get(path)
        line = origin.line if origin and origin.line else document.line(*path.split("."))
        key = origin.spelling.rpartition(".")[2] if origin and origin.spelling else key
        pattern, new = rf'(["\']?{re.escape(key)}["\']?\s*:\s*){VALUE}(?=\s*(?:[,}}\]]|(?://|#).*|$))', rf"\g<1>{shown}"
    else:
        name = section.rpartition(".")[2]
        line = document.line(*section.split(".")) if section else text[: text.index("{")].count("\n") + 1
        pattern, new = rf'(["\']?{re.escape(name)}["\']?\s*:\s*\{{)' if name else r"(\{)", rf'\g<1>"{key}": {shown}, '
    if line is None or line > len(lines):
        raise TranslationError(f"{path}: has no line of its own; write JSON")
    lines[line - 1] = re.sub(pattern, new.replace("\\n", "\\\\n"), lines[line - 1], count=1)
    return "\n".join(lines)
