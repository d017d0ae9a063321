"""How the code stands: its size, its near copies, its cycles, its longest functions, and how its lines are filled."""

from __future__ import annotations

import argparse
import ast
import io
import json
import random
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from copy import copy
from difflib import SequenceMatcher
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
ALIKE = 0.85
"""Share of two functions' nodes, names apart, from which on they are near copies."""
SMALLEST = 25
"""Nodes of a function below which two are alike by chance."""
WIDE = 100
"""Columns beyond which a line is wide."""
WORDS = 5
"""Words from which on a text is one that somebody reads."""
SAMPLE = 100
"""Messages, and docstrings, that are drawn."""
WINDOW = ("since", "until")
"""Keys of the release at which a row of facts begins, and of the one before which it ends."""
REFUSING = "compat.megatron"
REFUSALS = ("ConfigError", "SourceError", "UnrecognisedError")
"""Errors of which each says that a config is not valid or not readable."""
ASIDE = (".runtime", "megatron.checkpoint", ".strategies", ".releases")
"""Parts of the folder that read no config of a user."""
HELPER = 3
"""Lines of a private function's body up to which it is a small helper."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef


class Function(NamedTuple):
    """A function, where it stands, and the kinds of its nodes in order, without names and docstrings."""

    place: str
    name: str
    lines: int
    body: int
    shape: tuple[str, ...]


class Source(NamedTuple):
    """A module: its dotted name, its text and its syntax."""

    name: str
    path: Path
    text: str
    tree: ast.Module


def sources(folders: Iterable[str]) -> list[Source]:
    """Every module below the folders."""
    found = []
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text("utf-8")
        parts = (
            part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"
        )
        found.append(Source(".".join(parts), path, text, ast.parse(text)))
    return found


def statements(tree: ast.AST) -> int:
    """Statements, docstrings left out."""
    return sum(isinstance(node, ast.stmt) and not _documents(node) for node in ast.walk(tree))


def _documents(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def functions(source: Source) -> Iterator[Function]:
    """Every function and method of a module."""
    for node in ast.walk(source.tree):
        if isinstance(node, Definition):
            body = [inner for inner in node.body if not _documents(inner)]
            shape = tuple(type(part).__name__ for inner in body for part in ast.walk(inner))
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            spread = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            yield Function(
                f"{source.path.relative_to(ROOT)}:{node.lineno}", node.name, lines, spread, shape
            )


def near_copies(found: Iterable[Function]) -> Iterator[tuple[float, Function, Function]]:
    """Pairs of functions that are alike, names apart."""
    large = [function for function in found if len(function.shape) >= SMALLEST]
    for one, other in combinations(large, 2):
        shorter, longer = sorted((len(one.shape), len(other.shape)))
        if 2 * shorter < ALIKE * (shorter + longer):
            continue
        match = SequenceMatcher(None, one.shape, other.shape, autojunk=False)
        if (
            match.real_quick_ratio() >= ALIKE
            and match.quick_ratio() >= ALIKE
            and match.ratio() >= ALIKE
        ):
            yield match.ratio(), one, other


def imports(source: Source, known: set[str]) -> set[str]:
    """Modules of ours that loading a module imports."""
    return {name for node in _loading(source.tree) for name in _imported(node, known)} - {
        source.name
    }


def _loading(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not typing_only and not isinstance(node, Definition | ast.Lambda):
            yield node
            yield from _loading(node)


def _imported(node: ast.AST, known: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            name = inner if inner in known else str(node.module)
            if name in known:
                yield name


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules, or of packages, of which each leads to each."""
    reached = {name: _reached(name, graph) for name in graph}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph
    }
    return sorted((set(group) for group in groups if len(group) > 1), key=sorted)


def _reached(start: str, graph: dict[str, set[str]]) -> set[str]:
    found, open_ = {start}, [start]
    while open_:
        new = graph[open_.pop()] - found
        found |= new
        open_ += new
    return found


def packages(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same graph between packages: what a module of one imports of another, neither inside the other."""
    found: dict[str, set[str]] = {}
    for name, others in graph.items():
        mine = _package(name, graph)
        found.setdefault(mine, set())
        for other in others:
            theirs = _package(other, graph)
            if not (mine + ".").startswith(theirs + ".") and not (theirs + ".").startswith(
                mine + "."
            ):
                found[mine].add(theirs)
    return {name: {other for other in others if other in found} for name, others in found.items()}


def _package(name: str, graph: dict[str, set[str]]) -> str:
    is_package = any(other.startswith(name + ".") for other in graph)
    return name if is_package else name.rpartition(".")[0] or name


def comments(source: Source) -> int:
    """Lines with a comment of their own or at their end."""
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def used_once(found: list[Source]) -> list[Function]:
    """Private functions of up to three lines that their module calls at one place and uses nowhere else.

    A name that is used as a value is left out: what stands as a row of a table, is passed as a callback, or decorates a function
    cannot be written in place. So is a name that a module defines twice, as a class and one that derives from it may do.
    """
    small = []
    for source in found:
        called, named = _uses(source.tree)
        defined = Counter(function.name for function in functions(source))
        for function in functions(source):
            private = function.name.startswith("_") and not function.name.startswith("__")
            alone = defined[function.name] == called[function.name] == named[function.name] == 1
            if private and function.body <= HELPER and alone:
                small.append(function)
    return small


def _uses(tree: ast.Module) -> tuple[Counter[str], Counter[str]]:
    """How often each name, or attribute of that name, is called in a module, and how often it is used at all."""
    called: Counter[str] = Counter()
    named: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called[_name(node.func)] += 1
        elif isinstance(node, ast.Name | ast.Attribute):
            named[_name(node)] += 1
        elif isinstance(node, Definition):
            # The call in `@name(...)` makes a decorator, and the function below it cannot do without.
            called.subtract(
                _name(row.func) for row in node.decorator_list if isinstance(row, ast.Call)
            )
    return called, named


def _name(node: ast.expr) -> str:
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def texts(source: Source) -> Iterator[tuple[bool, str, str, str]]:
    """The docstrings of a module (true), and its other texts of at least `WORDS` words, with their places and owners."""
    inner = {
        id(part)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    documents = dict(_documented(source.tree))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(_shown(part) for part in node.values)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner
        ):
            text = node.value
        else:
            continue
        if len(text.split()) >= WORDS:
            place = f"{source.path.relative_to(ROOT)}:{node.lineno}"
            yield id(node) in documents, place, documents.get(id(node), ""), " ".join(text.split())


def _shown(part: ast.expr) -> str:
    """A part of an f-string: its text, or what stands in its braces."""
    return (
        str(part.value)
        if isinstance(part, ast.Constant)
        else "{" + ast.unparse(getattr(part, "value", part)) + "}"
    )


def _documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each docstring's identity, with the definition that it stands in or the assignment that it stands below."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, statement in pairwise([node, *body]):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield id(statement.value), _head(before)


def _head(owner: ast.AST) -> str:
    """The first line of a definition, or the whole of a short assignment."""
    if isinstance(owner, ast.Module):
        return ""
    if isinstance(owner, Definition | ast.ClassDef):
        owner = copy(owner)
        owner.body, owner.decorator_list = [ast.Pass()], []
        return ast.unparse(owner).partition(":\n")[0]
    return ast.unparse(owner).partition("\n")[0][:WIDE]


def sample(found: Iterable[Source], seed: int) -> None:
    """Print `SAMPLE` messages and as many docstrings, drawn with a seed, for somebody to read."""
    everything = [text for source in found for text in texts(source)]
    for documents in (False, True):
        own = [text for text in everything if text[0] is documents]
        print(f"\n{'Docstrings' if documents else 'Messages'}: {SAMPLE} of {len(own)}\n")
        for number, (_, place, owner, text) in enumerate(
            random.Random(seed).sample(own, SAMPLE), 1
        ):
            print(
                f"{number:3}. {place}",
                *([f"     {owner}"] if owner else []),
                f"     {text}",
                sep="\n",
            )


def without_news() -> tuple[int, int]:
    """How many known releases begin and end no row of their stack's facts, and how often those facts name one all the same.

    Such a row says that nothing changed. The list of releases itself, which the harvest writes, is not counted.
    """
    quiet = told = 0
    for known in sorted((ROOT / "compat").glob("*/releases/known.json")):
        facts = [
            json.loads(path.read_text("utf-8"))
            for path in known.parent.glob("*.json")
            if path != known
        ]
        named = Counter(pair for fact in facts for pair in _values(fact))
        for release in json.loads(known.read_text("utf-8")):
            if not any(named[key, release] for key in WINDOW):
                quiet += 1
                told += sum(count for (_, value), count in named.items() if value == release)
    return quiet, told


def refusing(found: Iterable[Source]) -> list[str]:
    """Modules of Megatron's config side at which a user's config is refused.

    An error refuses a config if its class says so: `ConfigError` (not valid for its stack and release) or `SourceError` (not
    readable). Making one counts, and so do `raise_if` of these classes and `unless` of a reading, which raise one. What does not
    count speaks of something else: `TranslationError` of what cannot be written in another form, `VersionError` of a release that
    is unknown or not installed. A `ValueError` reaches no user: the reader that calls a conversion of text notes it as a problem.
    """
    return [
        source.name
        for source in found
        if source.name.startswith(REFUSING) and any(map(_refuses, ast.walk(source.tree)))
    ]


def _refuses(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name, owner = (
        _name(node.func),
        node.func.value if isinstance(node.func, ast.Attribute) else node.func,
    )
    return name in (*REFUSALS, "unless") or (name == "raise_if" and _name(owner) in REFUSALS)


def _values(fact: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a JSON document that is no container, with the key that it stands under. Keys are values too."""
    if isinstance(fact, dict):
        for name, inner in fact.items():
            yield "", name
            yield from _values(inner, name)
    elif isinstance(fact, list):
        for inner in fact:
            yield from _values(inner, key)
    else:
        yield key, fact


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sample",
        type=int,
        metavar="SEED",
        help="print messages and docstrings to be read, drawn with a seed",
    )
    parser.add_argument(
        "--copies", action="store_true", help="print each pair of near copies in compat/"
    )
    options = parser.parse_args()
    found = sources(("bridge", "compat"))
    if options.sample is not None:
        sample(found, options.sample)
        return
    everything = [function for source in found for function in functions(source)]
    copies = list(
        near_copies(function for function in everything if function.place.startswith("compat/"))
    )
    known = {source.name for source in found}
    graph = {source.name: imports(source, known) for source in found}
    lines = [line for source in found for line in source.text.splitlines()]
    longest = max(everything, key=lambda function: function.lines)
    ordered = sorted(function.lines for function in everything)
    print(f"modules                       {len(found)}")
    print(f"statements                    {sum(statements(source.tree) for source in found)}")
    print(
        f"functions                     {len(everything)}, 90th percentile {ordered[int(0.9 * len(ordered))]} lines"
    )
    print(f"longest function              {longest.lines} lines: {longest.name}, {longest.place}")
    print(f"near copies in compat/        {len(copies)} pairs")
    print(f"cycles of modules             {len(cycles(graph))}")
    rings = cycles(packages(graph))
    print(
        f"cycles of packages            {len(rings)}",
        *("  " + " ".join(sorted(ring)) for ring in rings),
        sep="\n",
    )
    print(f"lines with a comment          {100 * sum(map(comments, found)) / len(lines):.1f} %")
    print(
        f"lines over {WIDE} columns        {100 * sum(len(line) > WIDE for line in lines) / len(lines):.1f} %"
    )
    print(f"small helpers used once       {len(used_once(found))}")
    places = refusing(source for source in found if not any(part in source.name for part in ASIDE))
    print(f"modules that refuse Megatron  {len(places)}: {' '.join(places)}")
    quiet, told = without_news()
    print(f"rows that say 'no news'       {told}, in {quiet} releases that changed no row")
    for ratio, one, other in sorted(copies, reverse=True) if options.copies else ():
        print(f"  {ratio:.2f}  {one.place} {one.name}  ~  {other.place} {other.name}")


if __name__ == "__main__":
    main()
