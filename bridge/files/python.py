"""A Python dictionary as data: a literal, alone or assigned to a name. It is parsed, never executed."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from bridge.errors import SourceError
from bridge.files.document import TEXT, Builder, Document, Entry, Node, check_limits, key_with_dots
from bridge.files.object_changes import OBJECT, Changes, find_changes, last_name, name_of_call

ASSIGNED = re.compile(r"\w+(?:\s*:\s*[\w.\[\], ]+)?\s*=\s*[{\[]")
"""Pattern for the beginning of a text that assigns a dictionary or list to a name."""

PARSES = re.compile(r"parse(_args_into_dataclasses|_args_and_config|_json_file|_yaml_file|_dict)?")
"""Methods of parsers that make objects of their classes: HfArgumentParser's (hf_argparser.py), and those of trl."""


class NotPythonError(SourceError):
    """Raised for text that is no Python literal; the text may be in another format."""


def load_python(text: str, name: str = TEXT) -> Document:
    """Parse one dictionary or list of literals, bare or assigned to a name.

    Raises `SourceError` for anything else.
    """
    builder = Builder(name)
    root = _literal(text, name)
    check_limits(
        sum(1 for node in ast.walk(root) if isinstance(node, ast.Constant)), 0, name, root.lineno
    )
    document = builder.document(_node(root, name, 0), "python")
    SourceError.raise_if(
        f"{name}: lines {twin.lines[0]} and {twin.lines[1]}: {key_with_dots(twin.key)} is given twice; keep one"
        for twin in document.duplicates
    )
    return document


@dataclass(frozen=True)
class Call:
    """A call in a program: the name that is called, its line, the values of keywords that are literals, and the source
    text of the others; each keyword has its line. `**` stands for keywords of a mapping. `later` are attributes that
    the object gets after the call, with their literals, and `changes` what else may change it (`Changes`).
    """

    name: str
    line: int
    values: Mapping[str, tuple[Any, int]]
    unread: Mapping[str, tuple[str, int]]
    later: Mapping[str, tuple[Any, int]] = field(default_factory=dict)
    changes: Mapping[str, int] = field(default_factory=dict)


@lru_cache(maxsize=32)
def _walk(text: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a program, its module first; none if it is no Python."""
    try:
        return tuple(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()


def find_calls(text: str, names: Collection[str]) -> tuple[Call, ...]:
    """Return the calls of `names` in a program, which is parsed and never run; none if it is no Python.

    A name that an import changes (`from x import name as other`) is found by the other one.
    """
    nodes = _walk(text)
    imports = (one for node in nodes if isinstance(node, ast.ImportFrom) for one in node.names)
    real = {one.asname: one.name for one in imports if one.asname}
    calls = (node for node in nodes if isinstance(node, ast.Call))
    named = ((node, real.get(name_of_call(node), name_of_call(node))) for node in calls)
    constants = _find_constants(nodes)
    return tuple(
        _add_changes(
            _read_call(node, name, constants), find_changes({node: OBJECT}, nodes), constants
        )
        for node, name in named
        if name in names
    )


def _add_changes(call: Call, changes: Changes, constants: Mapping[str, ast.expr]) -> Call:
    """Return a call with what the program does to the object that it makes."""
    literals = [ast.keyword(name, value) for name, (value, _) in changes.literals.items()]
    later = _read_call(ast.Call(ast.Name(""), [], literals, lineno=0), call.name, constants)
    lines = {name: line for name, (_, line) in changes.literals.items() if name in later.unread}
    return replace(call, later=later.values, changes={**changes.others, **lines})


def find_parsed(text: str, names: Collection[str]) -> Call | None:
    """Return the object of a class of `names` that a program has a parser make, as the call of the parser's class, which
    gives no values; None if there is none.

    Such a parser is made of the class, or of a tuple with it, as `HfArgumentParser((Own, TrainingArguments))` is.
    """
    nodes = _walk(text)
    makers, lines = dict[ast.expr, int](), list[tuple[int, str]]()
    constants = _find_constants(nodes)
    for node in nodes:
        if not isinstance(node, ast.Call) or not name_of_call(node).endswith("Parser"):
            continue
        for one in (*node.args, *(word.value for word in node.keywords)):
            one = constants.get(getattr(one, "id", ""), one)
            classes = [*map(last_name, getattr(one, "elts", [one]))]
            lines += ((node.lineno, name) for name in classes if name in names)
            # Parsers of several tuples leave the index open; the last one's counts.
            index = next((at for at, name in enumerate(classes) if name in names), None)
            makers |= {} if index is None else dict.fromkeys(_find_parses(nodes), index)
    if not makers:
        return None
    line, name = lines[0]
    call = Call(name, line, {}, {})
    return _add_changes(call, find_changes(makers, nodes), constants)


def _find_parses(nodes: Sequence[ast.AST]) -> Iterator[ast.Call]:
    for node in nodes:
        if isinstance(node, ast.Call) and PARSES.fullmatch(name_of_call(node)):
            yield node


def _find_constants(nodes: Sequence[ast.AST]) -> dict[str, ast.expr]:
    """Return the names of a program that one statement at its top gives a value, and nothing else changes."""
    binds = Counter(
        name
        for node in nodes
        for name in (
            node.id if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) else "",
            *(getattr(node, field, "") or "" for field in ("arg", "asname", "rest")),
            *(getattr(node, "names", ()) if isinstance(node, ast.Global | ast.Nonlocal) else ()),
            (getattr(node, "name", "") or "").partition(".")[0],
        )
        if isinstance(name, str)
    )
    # What is imported by a star may be any name.
    tops = [one for node in nodes[:1] if "*" not in binds for one in getattr(node, "body", ())]
    found: dict[str, ast.expr] = {}
    for line in tops:
        match line:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                found |= {name: value} if binds[name] == 1 else {}
    return found


def find_defaults(text: str, bases: Collection[str]) -> tuple[Call, ...]:
    """Return the fields of the dataclasses of a program that derive from one of `bases`, as if a call gave their defaults;
    none if it is no Python.
    """
    nodes = [node for node in _walk(text) if isinstance(node, ast.ClassDef)]
    return tuple(
        _read_call(
            ast.Call(ast.Name(node.name), [], [*_fields(node)], lineno=node.lineno), node.name
        )
        for node in nodes
        if any(
            str(getattr(base, "id", "") or getattr(base, "attr", "")) in bases
            for base in node.bases
        )
    )


def _fields(node: ast.ClassDef) -> Iterator[ast.keyword]:
    for line in node.body:
        match line:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                words = value.keywords if isinstance(value, ast.Call) else []
                usual = (word.value for word in words if word.arg == "default")
                yield ast.keyword(name, next(usual, value))


def find_imports(text: str) -> tuple[str, ...]:
    """Return the modules that a program imports, in its order and with dots; none if it is no Python."""
    nodes = _walk(text)
    found = list[str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            found += (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found += (module, *(f"{module}.{one.name}".lstrip(".") for one in node.names))
    return tuple(dict.fromkeys(filter(None, found)))


def find_methods(text: str, names: Collection[str]) -> tuple[Call, ...]:
    """Return the calls of methods of these names of an object, which is no module that the program imports."""
    nodes = _walk(text)
    imports = (node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
    modules = {(one.asname or one.name).partition(".")[0] for node in imports for one in node.names}
    calls = (node for node in nodes if isinstance(node, ast.Call) and name_of_call(node) in names)
    return tuple(
        _read_call(node, name_of_call(node))
        for node in calls
        if isinstance(node.func, ast.Attribute)
        and modules.isdisjoint(getattr(one, "id", "") for one in ast.walk(node.func))
    )


def find_variables(text: str) -> dict[str, int]:
    """Return the environment variables that a program sets by name, each with its first line; none if it is no Python."""
    nodes = _walk(text)
    found: dict[str, int] = {}
    for node in nodes:
        match node:
            case (
                ast.Subscript(
                    value=ast.Attribute(attr="environ") | ast.Name(id="environ"),
                    slice=ast.Constant(value=str(name)),
                    ctx=ast.Store(),
                )
                | ast.Call(
                    func=ast.Attribute(attr="setdefault" | "putenv"),
                    args=[ast.Constant(value=str(name)), *_],
                )
            ):
                found.setdefault(name, node.lineno)
    return found


def _read_call(node: ast.Call, name: str, constants: Mapping[str, ast.expr] | None = None) -> Call:
    values: dict[str, tuple[Any, int]] = {}
    unread = {f"argument {at}": (_source(one), one.lineno) for at, one in enumerate(node.args, 1)}
    for keyword in node.keywords:
        line = keyword.value.lineno
        value = (constants or {}).get(getattr(keyword.value, "id", ""), keyword.value)
        try:
            values[keyword.arg or "**"] = (ast.literal_eval(value), line)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            unread[keyword.arg or "**"] = (_source(keyword.value), line)
    return Call(name, node.lineno, values, unread)


def load_call(
    text: str, ending: str | tuple[str, ...], skipped: Collection[str] = (), name: str = TEXT
) -> Document:
    """Return the keywords of the one call in a program of a name with this ending. The values of `skipped` keywords
    may be anything, and are left out if they are no literals.

    Raises `SourceError` if there is another number of such calls, and for keywords whose value is no literal.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        raise SourceError(f"{name}: line {line}: not a Python program") from None
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and name_of_call(node).endswith(ending)
    ]
    if len(calls) != 1:
        lines = f" (lines {', '.join(str(call.lineno) for call in calls)})" if calls else ""
        wanted = ending if isinstance(ending, str) else " or ".join(ending)
        raise SourceError(f"{name}: found {len(calls)} calls of {wanted}{lines}, expected one")
    entries, problems = list[Entry](), list[str]()
    for keyword in calls[0].keywords:
        try:
            if keyword.arg is None:
                raise NotPythonError(
                    f"{name}: line {keyword.value.lineno}: found **{_source(keyword.value)}, expected"
                    " keywords; code is not run, so write them out"
                )
            entries.append((keyword.arg, _node(keyword.value, name, 1), keyword.lineno))
        except NotPythonError as error:
            if keyword.arg not in skipped:
                problems += error.problems
    SourceError.raise_if(problems)
    root = Node(entries, calls[0].lineno, "mapping")
    return Builder(name).document(root, "python")


def _literal(text: str, name: str) -> ast.expr:
    try:
        body = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        raise NotPythonError(
            f"{name}: line {line}: not a Python dictionary; expected literals in balanced brackets"
        ) from None
    if (
        len(body) != 1
        or not isinstance(body[0], ast.Expr | ast.Assign | ast.AnnAssign)
        or body[0].value is None
    ):
        line = body[1].lineno if len(body) > 1 else 1
        raise NotPythonError(
            f"{name}: line {line}: found code beside a dictionary; code is not run, so give the "
            "dictionary alone"
        )
    return body[0].value


def _node(value: ast.expr, name: str, depth: int) -> Node:
    """Return a literal as a node with its line.

    Raises `SourceError` for an expression that would have to be executed.
    """
    check_limits(0, depth, name, value.lineno)
    match value:
        case ast.Constant(value=str() | bool() | int() | float() | None as constant):
            return Node(constant, value.lineno)
        # Python has no negative literals: a minus stands before a number. `-True` is refused.
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)) if (
            not isinstance(number, bool)
        ):
            return Node(-number, value.lineno)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return Node([_node(item, name, depth + 1) for item in items], value.lineno, "list")
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return Node(
                [_entry(key, item, name, depth) for key, item in pairs], value.lineno, "mapping"
            )
    text = _source(value)
    raise NotPythonError(
        f"{name}: line {value.lineno}: found {text}, expected a literal; code is not run, so "
        "write the value"
    )


def _source(value: ast.expr) -> str:
    try:
        return ast.unparse(value)[:40]
    except RecursionError:
        return "a long expression"


def _entry(key: ast.expr | None, value: ast.expr, name: str, depth: int) -> Entry:
    if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
        text = "**" if key is None else _source(key)
        raise NotPythonError(
            f"{name}: line {value.lineno}: found the key {text}, expected text in quotes"
        )
    return key.value, _node(value, name, depth + 1), key.lineno
