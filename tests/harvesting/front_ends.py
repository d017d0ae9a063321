"""Reads the settings of a front end from its source: `python -m tests.harvesting.front_ends NAME RELEASE=TREE ...`, oldest first.

The fields of its dataclasses or pydantic models, with their defaults, are read from the syntax; nothing is run. Settings
that only older trees have are kept, each with the first release that lacks it. Effects and needs in the file stay as they are.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import compat

PLACES = {
    "llama_factory": ("src/llamafactory/hparams", "src/llamafactory/extras"),
    "axolotl": ("src/axolotl/utils/schemas", "src/axolotl/integrations"),
    "ms_swift": ("swift",),
}
CLASSES = {
    "llama_factory": (
        *("ModelArguments", "DataArguments", "FinetuningArguments", "GeneratingArguments", "TrainingArguments"),
        "Seq2SeqTrainingArguments",
    ),
    "axolotl": ("AxolotlInputConfig", "SwanLabConfig"),
    "ms_swift": ("RLHFArguments", "PretrainArguments", "SftArguments", "Seq2SeqTrainingArguments"),
}  # fmt: skip
"""The classes that the front end fills, whose bases are read too."""
INHERITED = {"Seq2SeqTrainingArguments": {"sortish_sampler": False, "predict_with_generate": False, "generation_max_length": None,
             "generation_num_beams": None, "generation_config": None, "kt_config": None}}  # fmt: skip
"""Fields of classes of transformers that are no TrainingArguments (training_args_seq2seq.py; in transformers-kt, kt_config)."""


def read_settings(name: str, tree: Path) -> dict[str, Any]:
    """Return the settings of the front end `name` in a source tree, each with its default."""
    classes: dict[str, ast.ClassDef] = {}
    for place in PLACES[name]:
        for path in sorted((tree / place).rglob("*.py")):
            nodes = ast.walk(ast.parse(path.read_text("utf-8")))
            classes |= {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    ENUMS.update(_read_enums(classes.values()))
    found: dict[str, Any] = {}
    waiting = [*CLASSES[name]]
    plugins = [one for one in classes if name == "axolotl" and one.endswith("Args")]
    for one in (*waiting, *plugins):
        found = {**_fields(one, classes), **found}
    return {key: found[key] for key in sorted(found)}


def _fields(name: str, classes: dict[str, ast.ClassDef]) -> dict[str, Any]:
    node, found = classes.get(name), dict(INHERITED.get(name, {}))
    if node is None:
        return found
    for base in node.bases:
        text = ast.unparse(base).rpartition(".")[2]
        found = {**_fields(text, classes), **found} if text != "BaseModel" else found
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            key = one.target.id
            if not key.startswith("_") and not _is_inside(one):
                found |= dict.fromkeys((key, *_aliases(one)), _default(one.value, found.get(key)))
    return found


def _aliases(node: ast.AnnAssign) -> Iterator[str]:
    """Yield further names of a field."""
    for one in node.value.keywords if isinstance(node.value, ast.Call) else ():
        if one.arg in ("alias", "validation_alias"):
            texts = (part for part in ast.walk(one.value) if isinstance(part, ast.Constant))
            yield from (part.value for part in texts if isinstance(part.value, str))


def _is_inside(node: ast.AnnAssign) -> bool:
    """Return whether a field is no setting: one that the class fills in itself."""
    value = node.value
    return isinstance(value, ast.Call) and any(
        one.arg == "init" and ast.unparse(one.value) == "False" for one in value.keywords
    )


def _default(value: ast.expr | None, before: Any) -> Any:
    if isinstance(value, ast.Call):
        words = {one.arg: one.value for one in value.keywords}
        first = value.args[0] if value.args else None
        value = words.get("default", first)
    if value is None:
        return None
    numbers = (ast.Expression, ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    if all(isinstance(node, numbers) for node in ast.walk(value)):
        return eval(compile(ast.Expression(value), "default", "eval"), {"__builtins__": {}})
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError):
        return _enum(ast.unparse(value))


ENUMS: dict[str, Any] = {}
"""The values of members of enumerations, by `Class.MEMBER`."""


def _read_enums(classes: Iterable[ast.ClassDef]) -> Iterator[tuple[str, Any]]:
    for node in classes:
        if any(ast.unparse(base).endswith("Enum") for base in node.bases):
            for one in node.body:
                if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant):
                    yield f"{node.name}.{ast.unparse(one.targets[0])}", one.value.value


def _enum(text: str) -> Any:
    return ENUMS.get(text)


def main(name: str, *trees: str) -> None:
    """Write the settings of a front end to its file."""
    path = Path(next(iter(compat.__path__)), name, "settings.json")
    table = json.loads(path.read_text("utf-8"))
    now: dict[str, Any] = {}
    gone: dict[str, str] = {}
    for release, tree in (one.split("=", 1) for one in trees):
        before, now = now, read_settings(name, Path(tree))
        gone = {key: at for key, at in gone.items() if key not in now}
        gone |= {key: release for key in before if key not in now}
        table["release"] = release
    table |= {"defaults": now, "gone": {key: gone[key] for key in sorted(gone)}}
    path.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    print(f"{path}: {len(now)} settings, {len(gone)} gone")


if __name__ == "__main__":
    main(*sys.argv[1:])
