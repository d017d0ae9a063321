"""Values and names as messages show them: short, and with secrets hidden."""

from __future__ import annotations

from typing import Any

from bridge.files.secrets import hide


def show_value(value: Any, limit: int | None = 60) -> str:
    """`value` as Python writes it, secrets hidden, cut to `limit` characters (None: never cut)."""
    try:
        text = hide(repr(value))
    except (ValueError, RecursionError):
        # An integer of thousands of digits, or lists in lists without end.
        return f"a {type(value).__name__} too large to show"
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"


def brief(name: str, limit: int = 60) -> str:
    """A name as the source spells it, cut to `limit` characters."""
    return name if len(name) <= limit else name[: limit - 1] + "…"
