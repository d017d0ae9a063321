"""Values of options that are pairs, NAME=VALUE."""

from __future__ import annotations

from bridge.errors import BridgeError


def split_pair(pair: str, option: str) -> tuple[str, str]:
    """Return the two parts of a value of `option`. Raises `BridgeError` if `pair` is not NAME=VALUE."""
    name, equals, value = pair.partition("=")
    BridgeError.raise_if([f"{option} {pair}: expected NAME=VALUE"] if not equals else [])
    return name, value
