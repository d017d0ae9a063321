"""Libraries that train on DeepSpeed find in the drop-in what they reach for: their sources are read, and every name is
looked up.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import compat.deepspeed
from compat.deepspeed.names import Absent

LIBRARIES = ("accelerate", "peft", "transformers", "trl")
ULYSSES = "Ulysses' sequence axis, which the drop-in refuses with what to do instead"
LACKING = {
    "deepspeed.ops.adagrad": "imported for torch's Adagrad alone, which the drop-in refuses",
    "deepspeed.ops.lion": "imported for an optimizer Lion alone, which the drop-in refuses",
    "deepspeed.runtime.sequence_parallel": ULYSSES,
    "deepspeed.tp_model_init": "for tensor_parallel.autotp_size, and the error names that key",
    "deepspeed.utils.is_initialized": "DeepSpeed itself has not had this name since 0.4",
}
"""Names that the drop-in lacks, and the reason why this is right."""
FOREIGN = {"ds_config", "ds_config_file", "ds_device_mesh"}
"""Names that a library gives to attributes of its own."""


def chain(node: ast.AST) -> list[str]:
    """The words of `a.b.c`; none for anything else."""
    if isinstance(node, ast.Attribute):
        found = chain(node.value)
        return [*found, node.attr] if found else []
    return [node.id] if isinstance(node, ast.Name) else []


def reached(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """The names below `deepspeed` that a module imports or asks for, under whatever name it imports them."""
    bound: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] == "deepspeed":
                    yield one.name
                    bound[one.asname or "deepspeed"] = one.name if one.asname else "deepspeed"
        elif isinstance(node, ast.ImportFrom):
            below = not node.level and str(node.module).split(".")[0] == "deepspeed"
            for one in node.names if below else ():
                bound[one.asname or one.name] = f"{node.module}.{one.name}"
                yield f"{node.module}.{one.name}"
    for node in nodes:
        words = chain(node)
        if words[1:] and words[0] in bound:
            yield ".".join([bound[words[0]], *words[1:]])


def attributes(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """The attributes of DeepSpeed's parameters and modules that a module asks for, also by `hasattr`."""
    for node in nodes:
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
        if isinstance(name, str) and re.fullmatch(r"ds_\w+", name):
            yield name


def syntax(library: str) -> Iterator[Sequence[ast.AST]]:
    """The nodes of each module of a library that speaks of DeepSpeed."""
    spec = find_spec(library)
    if spec is None:
        pytest.skip(f"{library} is not installed")
    for path in sorted(Path(str(spec.origin)).parent.rglob("*.py")):
        text = path.read_bytes()
        if b"deepspeed" in text or (b"ds_" in text and b"zero3" in text):
            yield list(ast.walk(ast.parse(text)))


def lacks(name: str) -> bool:
    """Whether the drop-in lacks a name."""
    owner: Any = compat.deepspeed
    try:
        for word in name.split(".")[1:]:
            owner = getattr(owner, word)
    except (AttributeError, Absent):
        return True
    return False


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_a_library_reaches_for_is_there_or_has_a_reason(library: str) -> None:
    asked, wanted = set[str](), set[str]()
    for nodes in syntax(library):
        asked.update(reached(nodes))
        wanted.update(attributes(nodes))
    assert asked
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
    model = compat.deepspeed.initialize(model=nn.Linear(2, 2), config=config)[0].module
    missing = {
        name
        for name in asked
        if lacks(name) and not any(f"{name}.".startswith(f"{known}.") for known in LACKING)
    }
    missing |= {
        name
        for name in wanted - FOREIGN
        if not hasattr(model, name) and not hasattr(model.weight, name)
    }
    assert not missing


def test_no_reason_is_for_a_name_that_is_there() -> None:
    assert all(map(lacks, LACKING))
