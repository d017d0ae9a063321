"""The DeepSpeed dialect: JSON configs of DeepSpeed 0.15.0 to 0.19.8, and the settings of the run
that stay in the script.
"""

from __future__ import annotations

from typing import Any

from compat.deepspeed.names import install, listen, resolve_name

__all__ = ["install"]

# `import compat.deepspeed.comm` names no file here, so the
# finder has to stand before a script asks for it.
listen()


def __getattr__(name: str) -> Any:
    """Return the native engine's implementation of a name of DeepSpeed's: `import compat.deepspeed
    as deepspeed` migrates a script.

    The engine is loaded when a script first uses one of these names, so that reading configs needs
    no torch.
    """
    return resolve_name("", name)
