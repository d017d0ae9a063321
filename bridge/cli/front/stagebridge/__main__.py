"""The `stagebridge` command, which `python -P -m stagebridge` runs too. It imports no file of the current directory."""

import os  # like `sys` it is part of the interpreter and never comes from the path
import sys


def clear_path() -> None:
    """Take the current directory off Python's path, where `-m` or an empty entry of PYTHONPATH put it.

    An entry of PYTHONPATH that names the directory in full stays.
    """
    from_variable = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    try:
        here = os.getcwd()
    except FileNotFoundError:
        here = ""
    sys.path[:] = [
        entry
        for entry in sys.path
        if os.path.isabs(entry) and (entry != here or entry in from_variable)
    ]


def main() -> None:
    """Run the command line; print one line and end with exit code 1 if another package hides ours."""
    clear_path()
    from stagebridge import hiding_package

    try:
        line = hiding_package()
    except Exception as error:  # whatever another package of that name raises
        line = (
            "stagebridge needs its own package bridge, but another package of that name raised "
            f"{type(error).__name__}: {error}"
        )
    if line:
        sys.exit(f"error: {line}")
    from bridge.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
