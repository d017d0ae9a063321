"""Modules that need torch: an engine interface over DeepSpeed itself, and DeepSpeed's names
implemented by the native engine.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return the module `name` of DeepSpeed's package `deepspeed.runtime`."""
    from compat.deepspeed.names import resolve_name

    return resolve_name("runtime", name)
