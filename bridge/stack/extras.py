"""What the native engine imports, and the error of a command that needs it where it is not installed."""

from __future__ import annotations

from importlib.util import find_spec

from bridge.errors import BridgeError

ENGINE = ("torch", "numpy", "safetensors")
"""Packages of the extra `engine`."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra, as README prints it."""
    return f"in a clone of stagebridge, pip install -c constraints.txt '.[{extra}]'"


def engine_lacks() -> str:
    """Return a sentence about a package that the native engine needs and that is not installed; else an empty string."""
    lacking = next((name for name in ENGINE if find_spec(name) is None), "")
    return lacking and f"{lacking} is not installed; {install_command('engine')}"


def need_engine(who: str) -> None:
    """Raise `BridgeError` if the packages of the native engine are not installed. `who` needs them."""
    if lacks := engine_lacks():
        raise BridgeError(f"{who}: {lacks}")
