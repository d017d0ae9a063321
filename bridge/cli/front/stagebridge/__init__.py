"""What the commands do, as functions that are loaded on first use; `python -P -m stagebridge` is its command.

Python imports this package before `__main__` can clear the path, so nothing is imported here but `sys`.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from bridge import __version__ as __version__
    from bridge.api.check import check as check
    from bridge.api.convert import convert as convert
    from bridge.api.diff import diff as diff
    from bridge.api.inspect import inspect as inspect
    from bridge.api.layout import layout as layout
    from bridge.api.move import move as move
    from bridge.api.read import read as read
    from bridge.api.verify import verify as verify

__all__ = ["check", "convert", "diff", "inspect", "layout", "move", "read", "verify"]

OWN = {"bridge": "stack/dialect.py", "compat": "megatron"}
"""For each of our packages, a file or folder in it that no other package of the same name has."""
ADVICE = "move the other package away, change PYTHONPATH, or install stagebridge in an environment of its own"


def hiding_package() -> str:
    """Return an error message if another package hides or has replaced `bridge` or `compat`; else return an empty string."""
    from importlib.util import find_spec
    from os.path import exists, join

    for name, part in OWN.items():
        spec = find_spec(name)
        if not spec:
            return f"stagebridge needs its own package {name}, but Python finds none; install stagebridge again"
        folders = list(spec.submodule_search_locations or ())
        if not folders or not exists(join(folders[0], part)):
            obstacle = f"{spec.origin or folders[0]} is another package named {name}"
            return f"stagebridge needs its own package {name}, but {obstacle}; {ADVICE}"
    import bridge

    # Two distributions may install into one folder: then ours is found, with the other's `__init__`.
    if not hasattr(bridge, "BridgeError"):
        return f"stagebridge needs its own package bridge, but another distribution wrote over {bridge.__file__}; {ADVICE}"
    return ""


def __getattr__(name: str) -> "Any":
    """Return the function of a use case, or the version."""
    if name not in (*__all__, "__version__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if line := hiding_package():
        raise ImportError(line)
    if name == "__version__":
        return sys.modules["bridge"].__version__
    from importlib import import_module

    return getattr(import_module(f"bridge.api.{name}"), name)


def __dir__() -> list[str]:
    """Return the names of the use cases, which are imported when they are asked for."""
    return sorted({*globals(), *__all__})
