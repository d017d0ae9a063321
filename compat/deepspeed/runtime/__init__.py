"""What runs: DeepSpeed itself behind the engines' interface, and everything else of this stack that needs torch."""

from typing import Any


def __getattr__(name: str) -> Any:
    """A module of DeepSpeed's `runtime`."""
    from compat.deepspeed.names import resolved

    return resolved("runtime", name)
