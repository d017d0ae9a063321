"""The map of the house in CONTRIBUTING: each door with the first sentence of its package."""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STACK = "deepspeed"
"""The stack whose folder shows what each has."""
OTHERS = {
    "tests": "A folder for each promise: convert, stacks, shell, cli, docs; and with torch engine, checkpoint, trace,"
    " verify. tests/versions asks real releases, tests/harvesting adds one.",
    "docs": "Pages, most of them made by `python docs/generate`.",
    "benchmarks": "Figures, and how to reproduce them.",
    "examples": "A config of each stack, with what it becomes in the others.",
}
"""Folders that are no packages."""


def door_table() -> str:
    """Return a code block with a line for each folder and loose module at the root of `bridge`, for
    what most stacks have in `compat`, and for each folder that is no package.
    """
    rows = [
        ("bridge/", _first_sentence(ROOT / "bridge/__init__.py")),
        *_door_rows(ROOT / "bridge"),
        (
            "compat/<stack>/",
            "A folder for each stack; most have these, here in the words of DeepSpeed:",
        ),
        *_door_rows(ROOT / "compat" / STACK, _shared_names()),
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


def _door_rows(folder: Path, names: Collection[str] | None = None) -> Iterator[tuple[str, str]]:
    doors = [path.parent for path in folder.glob("*/__init__.py")]
    modules = [path for path in folder.glob("*.py") if not path.name.startswith("__")]
    for path in (*sorted(doors), *sorted(modules)):
        if names is None or path.stem in names:
            sentence = _first_sentence(path / "__init__.py" if path.is_dir() else path)
            yield f"  {path.name}{'/' * path.is_dir()}", sentence


def _shared_names() -> set[str]:
    """Return the names of modules and folders that at least four stacks have."""
    stacks = [path.parent for path in (ROOT / "compat").glob("*/__init__.py")]
    counts = Counter(path.stem for stack in stacks for path in stack.iterdir())
    return {name for name, count in counts.items() if count >= 4 and not name.startswith("_")}


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]
