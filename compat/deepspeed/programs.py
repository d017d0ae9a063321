"""Looks into the Python program of a launch for Hugging Face's Trainer, without running it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import BridgeError
from bridge.files import find, read_text
from compat.deepspeed.trainer import NAMES

PACKAGES = ("transformers", "trl")
PARTS = ("Trainer", "TrainingArguments", "HfArgumentParser")
"""Endings of the names that only a program with Hugging Face's Trainer takes from `PACKAGES`."""
SHARED = frozenset({"--local_rank", *(f"--{name}" for name in NAMES if "_" not in name)})
"""Flags of TrainingArguments that programs without the Trainer have too, such as `--seed` and `--fp16`."""
FLAGS = frozenset(f"--{name}" for name in NAMES) - SHARED
"""Flags of TrainingArguments that show that there is a Trainer."""


@dataclass(frozen=True)
class Program:
    """What the text of a program shows: whether it imports Hugging Face's Trainer, and the options
    of its own argument parser.
    """

    trainer: bool
    options: frozenset[str]


def read(name: str, folder: Path | None) -> Program | None:
    """Return what the program `name` of a script in `folder` shows; None if it cannot be read."""
    try:
        path = find(name, folder) if name.endswith(".py") else None
        tree = ast.parse(read_text(path)) if path else None
    # A program may be of another Python, or not be one at all.
    except (BridgeError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return None if tree is None else Program(any(_imports(tree)), frozenset(_options(tree)))


def trains(program: Program | None, flags: Collection[str]) -> bool:
    """Return whether Hugging Face's Trainer runs a program that is started with `flags`: the program
    imports the Trainer, or a flag of TrainingArguments is not an option of the program's own parser.
    """
    if program is not None and program.trainer:
        return True
    own = program.options if program is not None else frozenset()
    # HfArgumentParser takes each flag with dashes too.
    return any(flag.replace("-", "_").replace("__", "--", 1) in FLAGS - own for flag in flags)


def _imports(tree: ast.Module) -> Iterator[bool]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            package = (node.module or "").partition(".")[0]
            yield package in PACKAGES and any(one.name.endswith(PARTS) for one in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id in PACKAGES and node.attr.endswith(PARTS)


def _options(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            words = (one.value for one in node.args if isinstance(one, ast.Constant))
            yield from (word for word in words if isinstance(word, str))
