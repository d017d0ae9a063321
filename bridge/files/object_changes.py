"""What a program does to an object behind the expression that makes it, read from the syntax; the program is never run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

METHODS = re.compile(r"set_\w+")
"""Methods that change their object."""
MUTATORS = frozenset(
    ("update", "setdefault", "pop", "popitem", "clear", "append", "extend", "insert", "remove")
)
"""Methods that change a container."""
WHOLE = "*"
"""Stands for attributes whose names the syntax does not tell."""
OBJECT = -1
"""Says of an expression that it is the object; another number is the index of the object in a tuple."""
BLOCKS = ("body", "orelse", "finalbody")


@dataclass(frozen=True)
class Changes:
    """Attributes that get a literal under no condition, each with the literal and its line; and what else may change,
    each with its first line: attributes, methods with `()`, and `*` for any attribute.
    """

    literals: Mapping[str, tuple[ast.expr, int]] = field(default_factory=dict)
    others: Mapping[str, int] = field(default_factory=dict)


def find_changes(makers: Mapping[ast.expr, int], nodes: Sequence[ast.AST]) -> Changes:
    """Return what a program, whose nodes these are, does to the object that the expressions `makers` make, each alone
    (`OBJECT`) or in a tuple at this index.

    The object is followed through names, through functions of the program that take or return it, and as the
    attribute `args` of another, such as the Trainer.
    """
    return _Program(makers, nodes).changes


class _Program:
    """A program with an object. `kinds` says of a name, and `functions` of a function's result, whether it is the object."""

    def __init__(self, makers: Mapping[ast.expr, int], nodes: Sequence[ast.AST]) -> None:
        self.makers, self.nodes = makers, nodes
        self.parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self.kinds, self.functions, size = dict[str, int](), dict[str, int](), -1
        own = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
        while len(self.kinds) + len(self.functions) > size:
            size = len(self.kinds) + len(self.functions)
            for node in nodes:
                kind = self.kind(getattr(node, "value", None))
                if isinstance(node, ast.Return) and kind is not None:
                    self.functions |= dict.fromkeys(self._function_around(node), kind)
                elif isinstance(node, ast.Call) and (function := own.get(name_of_call(node))):
                    places = [*function.args.posonlyargs, *function.args.args]
                    pairs = [
                        (place.arg, one) for place, one in zip(places, node.args, strict=False)
                    ]
                    pairs += [(word.arg or "", word.value) for word in node.keywords]
                    self.kinds |= {name: OBJECT for name, one in pairs if self.kind(one) == OBJECT}
                elif kind is not None:
                    self.kinds |= dict(_bind(node, kind))

    def kind(self, node: ast.AST | None) -> int | None:
        """Return whether an expression is the object, or a tuple with it; None for neither."""
        if isinstance(node, ast.expr) and node in self.makers:
            return self.makers[node]
        match node:
            case ast.Name() | ast.Attribute():
                return self.kinds.get(_spell(node))
            case ast.Call(args=[first, *_]) if name_of_call(node) == "replace":
                return self.kind(first)
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if METHODS.fullmatch(name):
                return self.kind(value)
            case ast.Call():
                return self.functions.get(name_of_call(node))
            case ast.Tuple(elts=items):
                kinds = [self.kind(one) for one in items]
                return kinds.index(OBJECT) if OBJECT in kinds else None
            case ast.Subscript(value=value, slice=ast.Constant(value=at)):
                return OBJECT if self.kind(value) == at else None
            case ast.Subscript(
                value=value, slice=ast.UnaryOp()
            ):  # counted from an end that is not known
                return None if self.kind(value) in (None, OBJECT) else OBJECT
            case ast.NamedExpr(value=value):
                return self.kind(value)
            case ast.IfExp(body=one, orelse=other):
                kind = self.kind(one)
                return self.kind(other) if kind is None else kind
        return None

    @cached_property
    def changes(self) -> Changes:
        uses = {
            node
            for node in self.nodes
            if isinstance(node, ast.expr)
            and (
                self.kind(node) == OBJECT
                or (isinstance(node, ast.Attribute) and node.attr == "args")
            )
        }
        effects = {one for node in uses for one in _find_effects(node, self.parents)}
        statements = {one for maker in self.makers for one in self._find_statements(maker)}
        direct = {
            name
            for one in statements
            if (kind := self.kind(getattr(one, "value", None))) is not None
            for name, own in _bind(one, kind)
            if own == OBJECT
        }
        effects |= {(WHOLE, line) for line in self._find_remakes(uses, direct)}
        found = [self._find_literals(one, uses, direct) for one in statements]
        for first, _ in found[:1]:
            effects -= first.intersection(*(other for other, _ in found))
        rest = dict[str, int]()
        for name, line in sorted(effects, key=lambda one: one[1]):
            rest.setdefault(name, line)
        literals = found[0][1].items() if found else ()
        return Changes({name: one for name, one in literals if name not in rest}, rest)

    def _find_statements(self, maker: ast.AST) -> Iterator[ast.stmt]:
        """Yield the statement of an expression; of one that a function returns, those that call the function."""
        while not isinstance(maker, ast.stmt):
            maker = self.parents[maker]
        names = {*self._function_around(maker)} if isinstance(maker, ast.Return) else set()
        calls = [one for one in self.nodes if names and name_of_call(one) in names]
        for node in calls or [maker]:
            while not isinstance(node, ast.stmt):
                node = self.parents[node]
            yield node

    def _find_literals(
        self, statement: ast.stmt, uses: set[ast.expr], direct: set[str]
    ) -> tuple[set[tuple[str, int]], dict[str, tuple[ast.expr, int]]]:
        """Return the assignments behind a statement, by attribute and line, that nothing between them and the statement
        keeps from counting; and the last value of each attribute.
        """
        assignments, literals = set[tuple[str, int]](), dict[str, tuple[ast.expr, int]]()
        for one in self._find_later(statement):
            uses_here = (node for node in ast.walk(one) if node in uses and _loads(node))
            if any(not isinstance(self.parents[node], ast.Attribute) for node in uses_here):
                break
            if not isinstance(one, ast.Assign):
                continue
            for target in one.targets:
                if isinstance(target, ast.Attribute) and _spell(target.value) in direct:
                    assignments.add((target.attr, target.lineno))
                    literals[target.attr] = (one.value, one.lineno)
        return assignments, literals

    def _find_later(self, statement: ast.AST) -> Iterator[ast.stmt]:
        """Yield the statements that run after one: those behind it in its block, and behind the branch that this is."""
        outer = self.parents.get(statement)
        for name in BLOCKS:
            block = getattr(outer, name, None)
            if isinstance(block, list) and statement in block:
                yield from block[block.index(statement) + 1 :]
        if isinstance(outer, ast.If | ast.With):
            yield from self._find_later(outer)

    def _find_remakes(self, uses: set[ast.expr], direct: set[str]) -> Iterator[int]:
        """Yield the lines that give the name of an object to what a call makes of it."""
        for node in self.nodes:
            value = getattr(node, "value", None)
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(value, ast.Call):
                arguments = {*value.args, *(word.value for word in value.keywords)}
                bound = {name for name, _ in _bind(node, OBJECT)}
                if self.kind(value) is None and arguments & uses and bound & direct:
                    yield node.lineno

    def _function_around(self, node: ast.AST) -> Iterator[str]:
        """Yield the name of the function around a node, if there is one."""
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, ast.FunctionDef):
                yield node.name
                return


def _bind(node: ast.AST, kind: int) -> Iterator[tuple[str, int]]:
    """Yield the names that a statement, or its target, gives a value of this kind; all of a tuple if its value is no tuple."""
    targets = getattr(node, "targets", None) or [getattr(node, "target", node)]
    for target in targets:
        if isinstance(target, ast.Tuple | ast.List):
            stars = any(isinstance(one, ast.Starred) for one in target.elts[: kind + 1])
            chosen = target.elts if stars or kind == OBJECT else target.elts[kind : kind + 1]
            for one in chosen:
                yield from _bind(one, OBJECT)
        elif name := _spell(target):
            yield name, kind


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
            function = name_of_call(outer)
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
            and name_of_call(container) == "vars"
        )
    )
    if writes:
        yield outer


def _loads(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Load)


def name_of_call(node: ast.AST | None) -> str:
    """Return the name of what a call calls, without those before its last dot."""
    return last_name(getattr(node, "func", None))


def last_name(node: ast.AST | None) -> str:
    """Return a name without those before its last dot; empty for any other expression."""
    return str(getattr(node, "id", "") or getattr(node, "attr", ""))


def _spell(node: ast.AST | None) -> str:
    """Return a name with its dots; empty for any other expression."""
    names = list[str]()
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""
