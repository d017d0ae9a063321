"""JSON objects that end with their own digest, so that every changed byte is detected."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from bridge.errors import SourceError
from bridge.files.shown import show_value

SEAL = re.compile(r'(\{.*), "digest": "([0-9a-f]{64})"\}', re.DOTALL)


def seal(value: Mapping[str, Any], indent: int | None = None) -> str:
    """Return `value`, which must not be empty, as a JSON object.

    The last entry is the digest of the text before that entry.
    """
    # The digest covers the text up to its own entry, without the closing bracket.
    body = json.dumps(value, indent=indent)[:-1].rstrip()
    return f'{body}, "digest": "{_digest(body)}"}}'


def unseal(text: str, where: object) -> dict[str, Any]:
    """Return the value that `seal` wrote as `text`.

    Raises `SourceError`, with a message that starts with `where`, if the text was changed.
    """
    match = SEAL.fullmatch(text)
    if match is None:
        raise SourceError(
            f"{where}: found {show_value(text[-30:])} at the end, expected a digest; the file is damaged"
        )
    if _digest(match[1]) != match[2]:
        raise SourceError(f"{where}: the digest does not match the content; the file is damaged")
    return parse_object(match[1] + "}", where)


def parse_object(text: str, where: object) -> dict[str, Any]:
    """Return a JSON object.

    Raises `SourceError`, with a message that starts with `where`, for any other text.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where}: no JSON ({error}); the file is damaged") from None
    if not isinstance(data, dict):
        raise SourceError(
            f"{where}: found {show_value(data, 30)}, expected an object; the file is damaged"
        )
    return data


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
