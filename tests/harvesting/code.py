"""Reads a stack's Python code: fields and defaults of classes, and digests of functions."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.harvesting.rows import Row, plain_type

SKIPPED = ("self", "args", "kwargs")
PLACE = re.compile(r"([A-Za-z_][\w/]*\.py)[:,] (_*[A-Za-z][\w.]*\w)")
"""Matches a function in the text of a rule or a check, such as `training/arguments.py:
validate_args`.
"""
FACTORIES: Mapping[str, Any] = {"list": [], "dict": {}}
DTYPES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def first(names: Sequence[str]) -> Any:
    """Return the first object of `names` (each `module:name`) that exists in the release; None if none exists."""
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            candidate = getattr(import_module(module), attribute, None)
        except ModuleNotFoundError as error:
            # A missing module of the stack is an answer; one that the stack itself needs is a
            # broken installation.
            if not module.startswith(str(error.name)):
                raise
            candidate = None
        if candidate is not None:
            return candidate
    return None


def arguments(cls: Any, instance: Any = None) -> Iterator[Row]:
    """Yield the arguments of a class or function: name, type in one spelling, and default.

    A dataclass that is a default is split into its fields. With `instance`, an object that was made
    without arguments, the defaults are its values. Arguments that a dataclass does not store are
    left out.
    """
    fields = (
        {field.name: field for field in dataclasses.fields(cls)}
        if dataclasses.is_dataclass(cls)
        else {}
    )
    for name, parameter in inspect.signature(cls).parameters.items():
        variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name in SKIPPED or variable or (fields and name not in fields):
            continue
        default = parameter.default if parameter.default is not parameter.empty else None
        # In the signature a default from a factory is only a marker object.
        factory = fields[name].default_factory if name in fields else dataclasses.MISSING
        if factory is not dataclasses.MISSING:
            default = factory()
        default = getattr(instance, name, default)
        row = {"name": name, "type": _type(parameter.annotation)}
        if dataclasses.is_dataclass(default) and not isinstance(default, type):
            yield {**row, "default": None}
            yield from ({"name": f"{name}.{inner}", **rest} for inner, rest in _inside(default))
        else:
            yield {**row, "default": plain(default)}


def _inside(value: Any) -> Iterator[tuple[str, Row]]:
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            yield from ((f"{field.name}.{name}", row) for name, row in _inside(inner))
        else:
            yield field.name, {"type": _type(field.type), "default": plain(inner)}


def _type(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return plain_type(
        annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    )


def plain(value: Any) -> Any:
    """Return a default as JSON: number formats by their short names, enumeration members by their names."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value).__name__ == "dtype":
        name = str(value).removeprefix("torch.")
        return DTYPES.get(name, name)
    return getattr(value, "__qualname__", type(value).__qualname__)


# What is read from the text of a class or a function


def fields_of_class(path: Path, name: str) -> Iterator[Row]:
    """Yield the fields that a class declares itself, or the parameters of a function: name, type and default.

    A default that is not a literal is the text of its expression. Yields nothing if there is no such class
    or function.
    """
    tree = _parse_file(path)
    kinds = ast.ClassDef | ast.FunctionDef
    definition = next(
        (node for node in tree.body if isinstance(node, kinds) and node.name == name), None
    )
    if isinstance(definition, ast.FunctionDef):
        names = definition.args.args
        missing = [None] * (len(names) - len(definition.args.defaults))
        for one, default in zip(names, (*missing, *definition.args.defaults), strict=True):
            yield _field_row(one.arg, one.annotation, default)
    for node in definition.body if isinstance(definition, ast.ClassDef) else ():
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield _field_row(node.target.id, node.annotation, node.value)


def signatures_in(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each public function and class of a file with the names of the arguments that it takes. A
    class without a constructor of its own takes the fields that it declares.
    """
    for node in _parse_file(path).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        constructors = [
            one
            for one in inner
            if isinstance(one, ast.FunctionDef) and one.name in ("__init__", node.name)
        ]
        nodes = (
            [one for one in ast.walk(constructors[0].args) if isinstance(one, ast.arg)]
            if constructors
            else []
        )
        names = [one.arg for one in nodes] or [
            str(row["name"]) for row in fields_of_class(path, node.name)
        ]
        yield node.name, [name for name in names if name not in SKIPPED]


def _field_row(name: str, annotation: ast.expr | None, default: ast.expr | None) -> Row:
    kind = ast.unparse(annotation) if annotation else ""
    return {"name": name, "type": kind, "default": _literal(default)}


def _literal(node: ast.expr | None) -> Any:
    """Return the value of a default: a literal, the default inside `field(...)`, else the
    expression's text.
    """
    if node is None:
        return None
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "field":
        words = {word.arg: word.value for word in node.keywords}
        factory = ast.unparse(words["default_factory"]) if "default_factory" in words else ""
        return FACTORIES.get(factory, factory) if factory else _literal(words.get("default"))
    if all(isinstance(part, ast.BinOp | ast.operator | ast.Constant) for part in ast.walk(node)):
        return eval(ast.unparse(node), {})  # arithmetic of constants, such as 2**32
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


# Functions that rules and checks stand on


def functions_in_rules(texts: Sequence[Path]) -> list[tuple[str, str]]:
    """Return the files and functions of a stack that the rules and checks of its dialect name as sources."""
    pairs = {match.groups() for path in texts for match in PLACE.finditer(path.read_text("utf-8"))}
    return sorted((file, name) for file, name in pairs)


def places(folder: Path, functions: Sequence[tuple[str, str]]) -> Iterator[Row]:
    """Yield a digest of each existing function or class, with its place, such as `training/arguments.py: validate_args`."""
    files = sorted(path for path in folder.rglob("*.py") if "tests" not in path.parts)
    for file, name in functions:
        here = [path for path in files if f"/{path.relative_to(folder)}".endswith(f"/{file}")]
        # Several files may end in the same name; the one nearest to the root of the package is
        # meant.
        digests = (digest(path, name) for path in sorted(here, key=lambda path: len(path.parts)))
        if value := next(filter(None, digests), ""):
            yield {"place": f"{file}: {name}", "digest": value}


def digest(path: Path, name: str) -> str:
    """Return a digest (12 digits) of a function or class: of its code without comments, docstrings and types.

    The digest is empty if there is no such function or class.
    """
    node: ast.AST | None = _parse_file(path)
    for part in name.split("."):
        inside = ast.walk(node) if isinstance(node, ast.Module) else getattr(node, "body", ())
        definitions = (
            one
            for one in inside
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        )
        node = next((one for one in definitions if one.name == part), None)
    if node is None:
        return ""
    # Parsed anew, because the visitor changes the tree, and the tree of the file is cached.
    bare = ast.unparse(_Done().visit(ast.parse(ast.unparse(node))))
    return sha256(bare.encode()).hexdigest()[:12]


# Rules name many functions of one file, and the largest take a second to parse.
@cache
def _parse_file(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


class _Done(ast.NodeTransformer):
    """Removes docstrings and types from a syntax tree, so that only code is left."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return ast.Assign([node.target], node.value or ast.Constant(None), lineno=node.lineno)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        documents = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Pass() if documents else node
