"""TOML as data. No stack reads it, so that lines are not kept; it is parsed to say what the file is."""

from __future__ import annotations

import tomllib

from bridge.errors import SourceError
from bridge.files.document import TEXT, Document, check_nested


def load_toml(text: str, name: str = TEXT) -> Document:
    """Parse a TOML text. Raises `SourceError` for text that is no TOML."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise SourceError(f"{name}: not valid TOML: {error}; fix the syntax there") from None
    check_nested(data, name)
    return Document(data, {}, "toml", name=name)
