"""Writes new values into the user's own file: an HJSON file with its comments, or a launch script
that contains the config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError, TranslationError
from bridge.files import Document, Original, Script
from bridge.stack.dialect import Reading
from compat.deepspeed import scripts
from compat.deepspeed.formats import read
from compat.deepspeed.releases import Release

VALUE = r'(?:\$\{[^}]*\}|\$\([^)]*\)|"[^"]*"|[^,}\]\n])*?'
"""Pattern of a value on one line: a scalar, or a shell expansion such as `${LR}`."""


def reword_text(
    settings: Mapping[str, Any], original: Original, was: Release, release: Release
) -> str:
    """Return the text of `original` with the values of `settings`. `was` is the release that the text
    was written for. Lines with unchanged values stay as they are. The result is read again for
    `release`. Raises `TranslationError` if the result does not have exactly the values of `settings`,
    for example if a key was removed or a value spans several lines.
    """
    before, document = _read_values(original, was), original.document
    if isinstance(document.data, Script):
        # The config inside the script, whose lines are those of the script.
        document = scripts.read(document.data).document
    if before is None:
        raise TranslationError(
            f"{document.name}: release {was.version} refuses this config, so stagebridge cannot"
            " change single values in it; write JSON instead"
        )
    text = original.text
    # Known keys first: each takes the first match on its line,
    # and a new key is put in front of what its line has.
    for path, value in sorted(settings.items(), key=lambda item: before.given.get(item[0]) is None):
        if not path.startswith("code.") and before.given.get(path) != value:
            text = _put_value(text, path, value, before, document)
    after = _read_values(replace(original, text=text), release)
    if after is None or _file_part(after.given) != _file_part(settings):
        raise TranslationError(
            f"{document.name}: these changes cannot be made line by line; write JSON instead, or"
            " use --no-carry"
        )
    return text


def _file_part(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in settings.items() if not path.startswith("code.")}


def _read_values(original: Original, release: Release) -> Reading | None:
    """Return the values in the file or the script; None if the release refuses the source."""
    try:
        return read(original.document, release, lenient=True)
    except BridgeError:
        return None


def _put_value(text: str, path: str, value: Any, before: Reading, document: Document) -> str:
    """Change one value on its line, or add a new key after the opening bracket of its section."""
    section, _, key = path.rpartition(".")
    lines, value_text = text.split("\n"), json.dumps(value)
    if path in before.given:
        # The key as the user spelled it: a second name, such as prefetch_bucket_size, stays.
        origin = before.origins.get(path)
        line = origin.line if origin and origin.line else document.line(*path.split("."))
        key = origin.spelling.rpartition(".")[2] if origin and origin.spelling else key
        # HJSON takes keys without quotes. The value ends before a
        # comma, a bracket, a comment or the end of the line.
        pattern, new = (
            rf'(["\']?{re.escape(key)}["\']?\s*:\s*){VALUE}(?=\s*(?:[,}}\]]|(?://|#).*|$))',
            rf"\g<1>{value_text}",
        )
    else:
        name = section.rpartition(".")[2]
        line = (
            document.line(*section.split("."))
            if section
            else text[: text.index("{")].count("\n") + 1
        )
        pattern, new = (
            rf'(["\']?{re.escape(name)}["\']?\s*:\s*\{{)' if name else r"(\{)",
            rf'\g<1>"{key}": {value_text}, ',
        )
    if line is None or line > len(lines):
        raise TranslationError(f"{path}: the line of this key is not known; write JSON instead")
    # `re.sub` reads \n in the replacement as a line break; JSON's own \n must stay two characters.
    lines[line - 1] = re.sub(pattern, new.replace("\\n", "\\\\n"), lines[line - 1], count=1)
    return "\n".join(lines)
