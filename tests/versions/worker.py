"""A process with one release of a stack: questions in, answers out, one JSON value to a line."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from importlib import import_module
from importlib.metadata import version
from typing import Any

from bridge.errors import ConfigError


def replied(real: Any, question: Any) -> dict[str, Any]:
    """What the release makes of a question."""
    try:
        return {"held": real.answer(question)}
    except ConfigError as error:
        return {"refused": str(error)}


def main(dialect: str, package: str, release: str) -> None:
    """Answer until there are no more questions; what the stack itself prints goes nowhere."""
    if version(package) != release:
        raise SystemExit(f"{package}: found {version(package)}, expected {release}")
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    real = import_module(f"compat.{dialect}.runtime.real")
    for line in sys.stdin:
        print(json.dumps(replied(real, json.loads(line)), default=str), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
