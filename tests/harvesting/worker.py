"""A process that runs one release of a stack.

It reads questions and writes answers, one JSON value on each line.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import compat
from bridge.errors import ConfigError
from tests.harvesting import JUDGES, STACKS, code
from tests.harvesting.machine import MachineError
from tests.harvesting.rows import Facts
from tests.harvesting.source import locate

PLACES = "places.json"
"""Name of the file that lists the functions that rules and checks name."""


def answer_question(stack: str, question: Any, tree: tuple[str, str]) -> dict[str, Any]:
    """Return the release's answer to a question: "facts", "installed", or a config as the stack's `real.pose_config` gives it."""
    if question == "facts":
        return _facts(stack, *tree)
    real = import_module(f"{JUDGES}.{stack}")
    try:
        return (
            {"installed": real.release_of_package()}
            if question == "installed"
            else {"held": real.answer(question)}
        )
    except ConfigError as error:
        return {"refused": str(error)}
    except MachineError as error:
        return {"lacks": str(error)}


def _facts(stack: str, release: str, root: str) -> dict[str, Any]:
    harvest = import_module(f"{STACKS}.{stack}")
    tree = locate(harvest.PACKAGE, release, Path(root) if root else None)
    facts: Facts = harvest.facts(tree)
    functions = code.functions_in_rules(
        sorted((Path(compat.__file__).parent / stack).rglob("*.py"))
    )
    facts.rows[PLACES] = list(code.places(tree.folder, functions))
    return asdict(facts)


def main(stack: str, release: str, root: str = "") -> None:
    """Answer questions until there are no more. Output of the stack itself is discarded."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    # Stacks print when they are imported, and from C too. Answers keep the real output, and
    # everything else goes nowhere.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    for line in sys.stdin:
        print(
            json.dumps(answer_question(stack, json.loads(line), (release, root)), default=str),
            file=answers,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
