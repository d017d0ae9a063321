"""An example for each rule: a source that is as small as can be found and that the rule speaks of, kept in `examples.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain, combinations, islice, product
from pathlib import Path
from random import Random
from types import CodeType, FunctionType
from typing import Any, Literal, get_args, get_origin

from example_starts import BASES, STARTS

import compat
from bridge.checks import Check, Term
from bridge.config import fields, nest
from bridge.dialect import Dialect
from bridge.errors import BridgeError

FILE = Path(__file__).with_name("examples.json")
WORDS = frozenset({"megatron"})
"""Stacks whose sources are the words of a command line."""
RANKS = (None, 8, 1, 6)
NUMBERS = (2, 1, 3, 8, 0, 4, 5, 16, -1, 7, 64, 1000)
FRACTIONS = (0.5, 2.0, 0.0, -1.0, 1.0, 1.5)
TEXTS = ("x", "1", "none", "auto")
MOST = 9
"""Settings that are tried for a rule."""
TRIES, FURTHER, FEW = 800, 150, 40
"""Sources that are tried for a rule: alone, on top of others, and with several numbers of ranks."""

Given = dict[str, Any]
Example = dict[str, Any]
Heard = set[str]


@contextmanager
def heard() -> Iterator[Heard]:
    """The ids of the rules that speak within this block."""
    before, found = Check.says, set[str]()

    def says(self: Check, values: Mapping[str, Any]) -> str:
        found.add(self.rule)
        return before(self, values)

    Check.says = says  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Check.says = before  # type: ignore[method-assign]


def spoken(dialect: Dialect, example: Example) -> Heard:
    """The rules that speak of an example, as it is read, or whose very words another statement of the stack says first."""
    with heard() as found:
        try:
            _ = dialect.read(example["source"], example.get("version"), example.get("ranks")).findings
        except BridgeError as error:
            found |= {rule for problem in error.problems for rule, words in _wordings(dialect.name) if words.fullmatch(problem)}
    return found


@cache
def _wordings(name: str) -> tuple[tuple[str, re.Pattern[str]], ...]:
    """What each rule of a stack says, with anything in the place of values."""
    rows = {f"{row.path}: {row.message}": row.rule for row in compat.load(name).checks}
    return tuple((rule, re.compile(re.sub(r"\\{.*?\\}", ".*", re.escape(text)))) for text, rule in rows.items())


def known() -> dict[str, dict[str, Example]]:
    """The examples of each stack by the id of their rule."""
    found: dict[str, dict[str, Example]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    return found


def shown(example: Example) -> str:
    """An example as a person would type it, with ranks and release where they count."""
    source = example["source"]
    text = " ".join(map(str, source)) if isinstance(source, list) else json.dumps(source)
    beside = [f"on {example['ranks']} ranks"] if example.get("ranks") else []
    beside += [f"in {example['version']}"] if example.get("version") else []
    return f"`{text}`" + (f" {', '.join(beside)}" if beside else "")


def find(names: Sequence[str] = ()) -> None:
    """Look for the examples that lack, and drop those that hold no longer."""
    every = known()
    for dialect in map(compat.load, names or compat.names()):
        rows = list(dialect.checks)
        own = {rule: one for rule, one in every.get(dialect.name, {}).items() if rule in spoken(dialect, one)}
        own = {rule: one for rule, one in own.items() if rule in {row.rule for row in rows}}
        search = _Search(dialect, own)
        for row in rows:
            if row.rule not in search.found:
                search.look(row)
        every[dialect.name] = dict(sorted(search.found.items()))
        lacking = [row.rule for row in rows if row.rule not in search.found]
        print(f"{dialect.name}: {len(search.found)} examples, {len(set(lacking))} lacking")
        FILE.write_text(json.dumps({name: rows for name, rows in every.items() if rows}, indent=1) + "\n", encoding="utf-8")


class _Search:
    """Tries small sources of one stack; whatever rule speaks of one has its example."""

    def __init__(self, dialect: Dialect, found: dict[str, Example]) -> None:
        self.dialect, self.found = dialect, found
        self.schema = fields(dialect.schema)
        self.wanted = {row.rule for row in dialect.checks}

    def look(self, row: Check) -> None:
        """Settings that a rule may be about, one, two and three at a time."""
        version = self._version(row)
        names = list(islice(dict.fromkeys(self._names(row)), MOST))
        values = {name: self._values(name, row) for name in names}
        tries = chain.from_iterable(
            product(*([(name, value) for value in values[name]] for name in group))
            for size in (1, 2, 3, 4)
            for group in combinations(names, size)
        )
        every = list(_sampled(tries, row.rule))
        for number, start in enumerate(STARTS.get(self.dialect.name, ({},))):
            for count, pairs in enumerate(every if number == 0 else every[:FURTHER]):
                for ranks in RANKS if count < FEW else RANKS[1:2]:
                    if self.tried({**start, **dict(pairs)}, version, ranks, row.rule):
                        return

    def tried(self, given: Given, version: str | None, ranks: int | None, rule: str) -> bool:
        """Whether a rule speaks of a source; every rule that does is kept."""
        example = self._example(given, version, ranks)
        if example is None:
            return False
        for heard_rule in spoken(self.dialect, example) & self.wanted - self.found.keys():
            self.found[heard_rule] = self._smallest(given, version, ranks, heard_rule)
        return rule in self.found

    def _smallest(self, given: Given, version: str | None, ranks: int | None, rule: str) -> Example:
        for name in list(given):
            less = {other: value for other, value in given.items() if other != name}
            example = self._example(less, version, ranks)
            if example is not None and rule in spoken(self.dialect, example):
                given = less
        least = next(
            size for size in (None, ranks) if (one := self._example(given, version, size)) and rule in spoken(self.dialect, one)
        )
        example = self._example(given, version, least)
        assert example is not None
        return example

    def _example(self, given: Given, version: str | None, ranks: int | None) -> Example | None:
        source: Any = nest({**BASES.get(self.dialect.name, {}), **given})
        if self.dialect.name in WORDS:
            from compat.megatron.options import option_for

            lines = [option_for(version or self.dialect.newest, name, value) for name, value in given.items()]
            if None in lines:
                return None
            source = [word for line in lines for word in line or ()]
        return {
            "source": source,
            **({"ranks": ranks} if ranks else {}),
            **({"version": version} if version else {}),
        }

    def _version(self, row: Check) -> str | None:
        """The last release that has the rule; None: the newest."""
        from bridge.releases import Releases

        at = Releases(self.dialect.name, self.dialect.versions)
        having = [version for version in self.dialect.versions if at.within(version, row.since, row.until)]
        return None if self.dialect.newest in having else having[-1] if having else None

    def _names(self, row: Check) -> Iterator[str]:
        """Settings that a rule names: in its path, its needs, its condition and its words."""
        yield from (name for name in (row.path, *row.needs) if name in self.schema)
        words = set(_words(row.when)) | set(row.message.replace("{", " ").replace("}", " ").replace(",", " ").split())
        yield from (name for name in self.schema if name in words)
        lasts = {word.rpartition(".")[2] for word in words}
        yield from (name for name in self.schema if "." in name and name.rpartition(".")[2] in lasts)

    def _values(self, name: str, row: Check) -> list[Any]:
        """Values that a setting is tried with: those of its type, and those that the rule speaks of."""
        types = set(_types(self.schema[name].annotation))
        lists = [[value] for value in dict.fromkeys(_constants(row.when)) if list in types and isinstance(value, str) and value]
        constants = [value for value in _constants(row.when) if type(value) in types]
        near = [value + step for value in constants if type(value) is int for step in (1, -1)]
        choices = [*_choices(self.schema[name].annotation), *self._flagged(name, row)]
        usual = [
            *((True, False) if bool in types else ()),
            *(NUMBERS if int in types else ()),
            *(FRACTIONS if float in types else ()),
            *(TEXTS if str in types and not choices else ()),
        ]
        options: dict[str, Any] = {repr(value): value for value in (*lists, *constants, *near, *choices, *usual)}
        return list(options.values())[:14]

    def _flagged(self, name: str, row: Check) -> Iterator[Any]:
        """Values that the flag of a setting lists."""
        if self.dialect.name in WORDS:
            from compat.megatron.options import by_dest

            for flag in by_dest(self._version(row) or self.dialect.newest).get(name, ()):
                yield from flag.choices or ()


def _sampled(tries: Iterable[Any], seed: str) -> Iterator[Any]:
    """The first tries as they come, and of many more a sample."""
    every = iter(tries)
    yield from islice(every, TRIES // 2)
    rest = list(islice(every, 200_000))
    Random(seed).shuffle(rest)
    yield from rest[: TRIES // 2]


def _codes(condition: Callable[..., Any]) -> Iterator[CodeType]:
    """The code of a condition, of what it closes over and of what is inside of it."""
    seen, waiting = set[int](), [condition]
    while waiting:
        one: Any = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Term):
            waiting += [one.holds]
        elif isinstance(one, FunctionType):
            cells = [cell.cell_contents for cell in one.__closure__ or ()]
            named = [one.__globals__.get(name) for name in one.__code__.co_names]
            own = [other for other in named if isinstance(other, FunctionType) and other.__module__.startswith("compat")]
            waiting += [cell for cell in cells if isinstance(cell, FunctionType | Term)] + own
            yield from _inner(one.__code__)


def _inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _inner(constant)


def _words(condition: Callable[..., Any]) -> Iterator[str]:
    """Names and texts in a condition."""
    if isinstance(condition, Term):
        yield condition.path
    for function in (condition, *_closed(condition)):
        if isinstance(function, Term):
            yield function.path
    for code in _codes(condition):
        yield from code.co_names
        yield from (text for text in _flat(code.co_consts) if isinstance(text, str))


def _closed(condition: Any) -> list[Any]:
    cells = getattr(condition, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells]


def _constants(condition: Callable[..., Any]) -> list[Any]:
    """Values in a condition."""
    inside = [value for code in _codes(condition) for value in _flat(code.co_consts)]
    closed = [value for value in _closed(condition) if isinstance(value, str | int | float)]
    return [value for value in (*inside, *closed) if isinstance(value, str | int | float)]


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | frozenset):
            yield from _flat(value)
        elif not isinstance(value, CodeType):
            yield value


def _types(annotation: Any) -> Iterator[type]:
    """Plain types that an annotation takes."""
    if get_origin(annotation) is Literal:
        yield from map(type, get_args(annotation))
    elif isinstance(annotation, type):
        yield annotation
    for inner in get_args(annotation):
        yield from _types(inner)


def _choices(annotation: Any) -> Iterator[Any]:
    """Values that an annotation lists."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for inner in get_args(annotation):
            yield from _choices(inner)
