"""What a program does to an object after the call that makes it, read from the syntax; the program is never run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

METHODS = re.compile(r"set_\w+")
"""Methods that change their object."""
MUTATORS = frozenset(
    ("update", "setdefault", "pop", "popitem", "clear", "append", "extend", "insert", "remove")
)
"""Methods that change a container."""
WHOLE = "*"
"""Stands for attributes whose names the syntax does not tell."""


@dataclass(frozen=True)
class Changes:
    """Attributes that get a literal under no condition, each with the literal and its line; and what else may change,
    each with its first line: attributes, methods with `()`, and `*` for any attribute.
    """

    literals: Mapping[str, tuple[ast.expr, int]] = field(default_factory=dict)
    others: Mapping[str, int] = field(default_factory=dict)


def find_changes(call: ast.Call, nodes: Sequence[ast.AST]) -> Changes:
    """Return what a program, whose nodes these are, does to the object that `call` makes.

    The object is followed through names, through functions of the program that take or return it, and as the
    attribute `args` of another, such as the Trainer.
    """
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    statement, is_object, others = _leave(call, parents)
    direct = _targets(statement) if is_object else set()
    names = _follow(nodes, parents, direct, statement if is_object else None)
    uses: set[ast.AST] = {
        node
        for node in nodes
        if (isinstance(node, ast.Name | ast.Attribute) and _spell(node) in names)
        or (isinstance(node, ast.Attribute) and node.attr == "args")
    }
    effects = [(name, line) for node in uses for name, line in _find_effects(node, parents)]
    effects += others + [(WHOLE, line) for line in _find_remakes(nodes, uses, direct)]
    late = _statements_after(statement, parents)
    end = next(
        (
            at
            for at, one in enumerate(late)
            for node in ast.walk(one)
            if node in uses and not isinstance(parents[node], ast.Attribute) and _loads(node)
        ),
        len(late),
    )
    literals = dict[str, tuple[ast.expr, int]]()
    for one in late[:end]:
        if not isinstance(one, ast.Assign):
            continue
        for target in one.targets:
            if isinstance(target, ast.Attribute) and _spell(target.value) in direct:
                literals[target.attr] = (one.value, one.lineno)
                effects = [own for own in effects if own != (target.attr, target.lineno)]
    rest = dict[str, int]()
    for name, line in sorted(effects, key=lambda one: one[1]):
        rest.setdefault(name, line)
    return Changes({name: one for name, one in literals.items() if name not in rest}, rest)


def _find_remakes(nodes: Sequence[ast.AST], uses: set[ast.AST], direct: set[str]) -> Iterator[int]:
    """Yield the lines that give the name of an object to what a call makes of it."""
    for node in nodes:
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(value, ast.Call):
            arguments = {*value.args, *(word.value for word in value.keywords)}
            if arguments & uses and _targets(node) & direct and _name(value) != "replace":
                yield node.lineno


def _leave(
    call: ast.Call, parents: Mapping[ast.AST, ast.AST]
) -> tuple[ast.AST, bool, list[tuple[str, int]]]:
    """Return the statement of a call, whether its value is the object, and what the expression does to it."""
    node: ast.AST = call
    is_object, effects = True, list[tuple[str, int]]()
    while not isinstance(node, ast.stmt) and node in parents:
        outer = parents[node]
        if is_object:
            effects += _find_effects(node, parents)
            inside = isinstance(outer, ast.Attribute | ast.keyword | ast.Call)
            makes = _name(outer) == "replace" or (
                isinstance(outer, ast.Call) and outer.func is node
            )
            method = isinstance(outer, ast.Attribute) and METHODS.fullmatch(outer.attr)
            is_object = not inside or makes or bool(method)
        node = outer
    return node, is_object, effects


def _follow(
    nodes: Sequence[ast.AST],
    parents: Mapping[ast.AST, ast.AST],
    direct: set[str],
    statement: ast.AST | None,
) -> set[str]:
    """Return all names that an object with the names `direct` has in a program."""
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    names, makers, size = {*direct}, set[str](), -1
    while len(names) + len(makers) > size:
        size = len(names) + len(makers)
        for node in nodes:
            value = getattr(node, "value", None)
            is_object = _spell(value) in names or _name(value) in makers
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and is_object:
                names |= _targets(node)
            elif isinstance(node, ast.Return) and (node is statement or _spell(value) in names):
                makers |= {one.name for one in _outside(node, parents)}
            elif isinstance(node, ast.Call) and (function := functions.get(_name(node))):
                places = [*function.args.posonlyargs, *function.args.args]
                pairs = zip(places, node.args, strict=False)
                names |= {place.arg for place, one in pairs if _spell(one) in names}
                names |= {
                    one.arg for one in node.keywords if one.arg and _spell(one.value) in names
                }
    return names


def _outside(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> Iterator[ast.FunctionDef]:
    """Yield the function around a node, if there is one."""
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.FunctionDef):
            yield node
            return


def _statements_after(statement: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> list[ast.stmt]:
    """Return the statements that follow one in its own block."""
    outer = parents.get(statement)
    for name in ("body", "orelse", "finalbody"):
        block = getattr(outer, name, None)
        if isinstance(block, list) and statement in block:
            return block[block.index(statement) + 1 :]
    return []


def _targets(node: ast.AST) -> set[str]:
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    return {name for one in targets if (name := _spell(one))}


def _find_effects(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield what one use of an object, the expression `node`, changes of it: its name and line."""
    outer = parents[node]
    line = getattr(outer, "lineno", getattr(node, "lineno", 0))
    match outer:
        case ast.Attribute(attr="__dict__"):
            yield from ((WHOLE, line) for _ in _find_writes(outer, parents))
        case ast.Attribute(attr="__setattr__" | "__delattr__" | "__init__"):
            yield from _find_named(parents[outer], 0, line)
        case ast.Attribute(attr=name) if METHODS.fullmatch(name):
            yield f"{name}()", line
        case ast.Attribute(attr=name) if not _loads(outer):
            yield name, line
        case ast.Attribute(attr=name):
            yield from ((name, line) for _ in _find_writes(outer, parents))
        case ast.Call(func=func) if node is not func:
            function = _name(outer)
            if function in ("setattr", "delattr", "__setattr__"):
                yield from _find_named(outer, 1, line)
            elif function == "replace":
                yield from ((word.arg or WHOLE, line) for word in outer.keywords)
            elif function == "vars" and [*_find_writes(outer, parents)]:
                yield WHOLE, line


def _find_named(call: ast.AST, at: int, line: int) -> Iterator[tuple[str, int]]:
    """Yield the attribute that the argument `at` of a call names."""
    match getattr(call, "args", [])[at : at + 1]:
        case [ast.Constant(value=str(name))]:
            yield name, line
        case _:
            yield WHOLE, line


def _find_writes(container: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    """Yield what writes into the container that is an expression's value."""
    outer = parents[container]
    writes = (
        (isinstance(outer, ast.Subscript) and outer.value is container and not _loads(outer))
        or (isinstance(outer, ast.Attribute) and outer.attr in MUTATORS)
        or (
            isinstance(outer, ast.AugAssign | ast.Assign | ast.AnnAssign)
            and _name(container) == "vars"
        )
    )
    if writes:
        yield outer


def _loads(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Load)


def _name(node: ast.AST | None) -> str:
    """Return the name of what a call calls, without those before its last dot."""
    func = getattr(node, "func", None)
    return str(getattr(func, "id", "") or getattr(func, "attr", ""))


def _spell(node: ast.AST | None) -> str:
    """Return a name with its dots; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{start}.{node.attr}" if (start := _spell(node.value)) else ""
    return ""
