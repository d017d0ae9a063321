"""Reads the arguments of Hugging Face's Trainer and their defaults from the text of training_args.py, without running it."""

from __future__ import annotations

import ast
from typing import Any

CLASS = "TrainingArguments"


def read_arguments(text: str) -> dict[str, Any]:
    """Return the default of each argument by name: None where it has none or where only a run tells it."""
    tree = ast.parse(text)
    (own,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == CLASS)
    names = {
        node.targets[0].id: node.value
        for node in reversed(own.body)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return {
        node.target.id: _read_default(node, names)
        for node in own.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
    }


def _read_default(node: ast.AnnAssign, names: dict[str, ast.expr]) -> Any:
    value = node.value
    if isinstance(value, ast.Call):
        words = {one.arg: one.value for one in value.keywords}
        value = words.get("default", words.get("default_factory"))
    if isinstance(value, ast.Name) and value.id in names:
        value = names[value.id]
    try:
        found = ast.literal_eval(value) if value is not None else None
    except ValueError:
        return None
    if isinstance(found, int) and not isinstance(found, bool):
        return float(found) if "float" in ast.unparse(node.annotation) else found
    return found
