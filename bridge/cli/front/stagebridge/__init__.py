"""The public names of `bridge` under the project's own name, loaded on first use; `python -P -m stagebridge` is its command.

Python imports this package before `__main__` can clear the path, so nothing is imported here but `sys`.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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
    """Return the object of a public name of `bridge`."""
    if name.startswith("_") and name not in ("__all__", "__version__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if line := hiding_package():
        raise ImportError(line)
    return getattr(sys.modules["bridge"], name)
