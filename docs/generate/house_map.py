"""The map of the house in CONTRIBUTING: each door with the first sentence of its package."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STACK = "deepspeed"
"""The stack whose folder shows what each has."""
OTHERS = {
    "tests": "Laws, facts and the command line; a folder for each stack; tests/versions against real releases.",
    "docs": "Pages, most of them made by `python docs/generate`.",
    "benchmarks": "Figures, and how to reproduce them.",
    "examples": "A config of each stack, with what it becomes in the others.",
}
"""Folders that are no packages."""


def door_table() -> str:
    """Return a code block with a line for each folder and loose module at the root of `bridge` and of
    one stack, and for each folder that is no package.
    """
    rows = [
        *_package_rows(ROOT / "bridge", "bridge"),
        *_package_rows(ROOT / "compat" / STACK, "compat/<stack>"),
        *((f"{name}/", text) for name, text in OTHERS.items()),
    ]
    width = max(len(name) for name, _ in rows) + 2
    lines = (
        line
        for name, text in rows
        for line in textwrap.wrap(
            text, 110, initial_indent=name.ljust(width), subsequent_indent=" " * width
        )
    )
    return "\n".join(("```text", *lines, "```"))


def _package_rows(folder: Path, shown: str) -> Iterator[tuple[str, str]]:
    yield f"{shown}/", _first_sentence(folder / "__init__.py")
    doors = sorted(path.parent for path in folder.glob("*/__init__.py"))
    yield from ((f"  {path.name}/", _first_sentence(path / "__init__.py")) for path in doors)
    modules = sorted(path for path in folder.glob("*.py") if not path.name.startswith("__"))
    yield from ((f"  {path.name}", _first_sentence(path)) for path in modules)


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"(?<=[.:])\s", " ".join(text.split()), maxsplit=1)[0]
    return sentence.removesuffix(":").removesuffix(".") + "."
