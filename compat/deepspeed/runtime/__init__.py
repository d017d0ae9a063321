"""Code that needs torch: DeepSpeed itself behind the interface of an engine, and the names of
DeepSpeed over the native engine.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """The module `name` of DeepSpeed's package `deepspeed.runtime`."""
    from compat.deepspeed.names import resolved

    return resolved("runtime", name)
