"""Names of DeepSpeed that scripts use, counted in their syntax.

`python benchmarks/deepspeed_uses.py NAME=FOLDER ... > tests/stacks/deepspeed/uses.json` counts in every Python file below each
folder. Imports are followed to what they name: `dist.get_rank()` below `import deepspeed.comm as dist` is one use of
`deepspeed.comm.get_rank`. Attributes of what `deepspeed.initialize` returns first count as `engine.NAME` where DeepSpeed's engine
or `nn.Module` has that name, those of `get_accelerator()` as `accelerator.NAME`. Nothing that is read runs.

`tests/engine/test_dropin_names.py` holds what the drop-in makes of them against that file.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT, ENGINE, ACCELERATOR = "deepspeed", "engine", "accelerator"
SAID = ("self.deepspeed", "deepspeed_engine", "self.engine", "model_engine", "engine", "ds_engine")
"""What scripts call the engine where another function made it."""


def engine_names() -> frozenset[str]:
    """What DeepSpeed's engine has, by its source, and what it has as a module of torch."""
    from torch import nn

    spec = find_spec("deepspeed")
    if spec is None or spec.origin is None:
        raise SystemExit("deepspeed is not installed; its engine's names are read from its source")
    found = set(dir(nn.Module))
    for name in ("runtime/engine.py", "runtime/pipe/engine.py"):
        tree = ast.parse((Path(spec.origin).parent / name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                found.add(node.attr)
    return frozenset(found)


class Uses(ast.NodeVisitor):
    """The uses in one file."""

    def __init__(self, tree: ast.AST, engine: frozenset[str]) -> None:
        self.found: Counter[str] = Counter()
        self._names: dict[str, str] = {}
        self._engines, self._engine = set(SAID), engine
        for node in ast.walk(tree):
            self._bind(node)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and self._name(node.value.func) == f"{ROOT}.initialize"
            ):
                target = node.targets[0]
                self._engines.add(
                    ast.unparse(target.elts[0] if isinstance(target, ast.Tuple) else target)
                )
        if self._names:
            self.visit(tree)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == ROOT:
                    self._names[alias.asname or ROOT] = alias.name if alias.asname else ROOT
                    self.found[alias.name] += 1
        elif (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").partition(".")[0] == ROOT
        ):
            for alias in node.names:
                self._names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                self.found[f"{node.module}.{alias.name}"] += 1

    def _name(self, node: ast.AST) -> str | None:
        """The dotted name of DeepSpeed that an expression stands for."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        value = node.value
        if isinstance(value, ast.Call) and (self._name(value.func) or "").endswith(
            ".get_accelerator"
        ):
            return f"{ACCELERATOR}.{node.attr}"
        if node.attr in self._engine and ast.unparse(value) in self._engines:
            return f"{ENGINE}.{node.attr}"
        outer = self._name(value)
        return f"{outer}.{node.attr}" if outer and outer.partition(".")[0] == ROOT else None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Count the longest name."""
        name = self._name(node)
        if name is not None:
            self.found[name] += 1
        if name is None or isinstance(node.value, ast.Call):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """Count a name that was imported by itself."""
        name = self._names.get(node.id)
        if name is not None and isinstance(node.ctx, ast.Load) and name != ROOT:
            self.found[name] += 1


def counted(folder: Path, engine: frozenset[str]) -> Iterator[Counter[str]]:
    """The uses in each file of a folder that names DeepSpeed."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if ROOT in text:
            try:
                yield Uses(ast.parse(text), engine).found
            except SyntaxError as error:
                print(f"{path.relative_to(folder)}: left out ({error.msg})", file=sys.stderr)


def stands(name: str) -> bool:
    """Whether the installed DeepSpeed has a name."""
    words = name.split(".")
    for end in range(len(words), 0, -1):
        try:
            owner = import_module(".".join(words[:end]))
        except ImportError:
            continue
        return all((owner := getattr(owner, word, None)) is not None for word in words[end:])
    return False


def facts(folders: Mapping[str, Path]) -> dict[str, Any]:
    """Each name with its number of uses by source, the most used first, and those that DeepSpeed itself no longer has."""
    engine, found = engine_names(), dict[str, Counter[str]]()
    for source, folder in folders.items():
        for uses in counted(folder, engine):
            for name, number in uses.items():
                found.setdefault(name, Counter())[source] += number
    rows = sorted(found.items(), key=lambda row: (-row[1].total(), row[0]))
    gone = [name for name, _ in rows if name.partition(".")[0] == ROOT and not stands(name)]
    return {
        "release": version(ROOT),
        "gone": gone,
        "names": {name: dict(sorted(sources.items())) for name, sources in rows},
    }


if __name__ == "__main__":
    given = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    print(json.dumps(facts({name: Path(folder) for name, folder in given.items()}), indent=1))
