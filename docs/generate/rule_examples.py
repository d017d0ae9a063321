"""An example for each rule: a source that is as small as can be found and that the rule speaks of, kept in `examples.json`.

An example that a person wrote there is kept like one that was found, as long as the rule speaks of it. A rule that no source
reaches has the reason in `example_reasons.py`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain, combinations, islice, product
from pathlib import Path
from random import Random
from types import CodeType, FunctionType
from typing import Any, Literal, get_args, get_origin

from example_reasons import REASONS
from example_starts import BASES, STARTS

import compat
from bridge.errors import BridgeError
from bridge.plan.section import fields, nest
from bridge.stack.checks import Check, Term
from bridge.stack.dialect import Dialect, Reader

FILE = Path(__file__).with_name("examples.json")
WORDS, CONTAINER = "words", "container"
FORMS: Mapping[str, Sequence[str]] = {
    "megatron": (WORDS, CONTAINER, "TransformerConfig", "ModelParallelConfig")
}
"""What sources of a stack may be, beside a file of its settings: words of a command line, a config container, a live object of
some class, whose values no parser has judged.
"""
FILE_FORM = "file"
TRAINED = ("micro_batch_size", "global_batch_size", "train_iters", "train_samples")
"""Settings that a container has among those of the training."""
RANKS = (None, 8, 1, 6, -1)
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
def heard() -> Iterator[set[Check]]:
    """The rows that speak within this block."""
    before, found = Check.says, set[Check]()

    def says(self: Check, values: Mapping[str, Any]) -> str:
        found.add(self)
        return before(self, values)

    Check.says = says  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Check.says = before  # type: ignore[method-assign]


def spoken(dialect: Reader, example: Example) -> Heard:
    """The rules that speak of an example, as it is read, or whose very words another statement of the stack says first."""
    rows, others = _said(dialect, example)
    return {row.rule for row in rows} | others


def _said(dialect: Reader, example: Example) -> tuple[set[Check], Heard]:
    """The rows that speak of an example, and the rules whose words another statement says."""
    others = set[str]()
    with heard() as found:
        try:
            _ = dialect.read(
                _source(example), example.get("version"), example.get("ranks")
            ).findings
        except BridgeError as error:
            others = {
                rule
                for problem in error.problems
                for rule, words in _wordings(dialect.name)
                if words.fullmatch(problem)
            }
    return found, others


def _source(example: Example) -> Any:
    """What is read: the example's source, or an object of a class of that name with these fields."""
    source = example["source"]
    if "object" not in example:
        return source
    made = type(example["object"], (), {})()
    vars(made).update(source)
    return made


@cache
def _wordings(name: str) -> tuple[tuple[str, re.Pattern[str]], ...]:
    """What each rule of a stack says, with anything in the place of values."""
    rows = {f"{row.path}: {row.message}": row.rule for row in compat.load(name).checks}
    return tuple(
        (rule, re.compile(re.sub(r"\\{.*?\\}", ".*", re.escape(text))))
        for text, rule in rows.items()
    )


def known() -> dict[str, dict[str, Example]]:
    """The examples of each stack by the id of their rule."""
    found: dict[str, dict[str, Example]] = (
        json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    )
    return found


def shown(example: Example) -> str:
    """An example as a person would type it, with ranks and release where they count."""
    source = example["source"]
    text = shlex.join(map(str, source)) if isinstance(source, list) else json.dumps(source)
    if "object" in example:
        text = f"{example['object']}({', '.join(f'{name}={value!r}' for name, value in source.items())})"
    beside = [f"on {example['ranks']} ranks"] if example.get("ranks") else []
    beside += [f"in {example['version']}"] if example.get("version") else []
    return (f"`{text}`" if text else "no settings") + (f" {', '.join(beside)}" if beside else "")


ELSEWHERE = "in another row of this id"


def cells(dialect: Dialect) -> Iterator[str]:
    """What stands beside each row of a stack: its example, or why there is none."""
    examples, reasons = known().get(dialect.name, {}), REASONS.get(dialect.name, {})
    rows = list(dialect.checks)
    counts = Counter(row.rule for row in rows)
    several = {rule: _said(dialect, examples[rule])[0] for rule in examples if counts[rule] > 1}
    for row in rows:
        spoken_here = several.get(row.rule, ())
        elsewhere = row not in spoken_here and any(other.rule == row.rule for other in spoken_here)
        one = examples.get(row.rule)
        yield reasons.get(row.rule, "") if one is None else ELSEWHERE if elsewhere else shown(one)


def find(names: Sequence[str] = ()) -> None:
    """Look for the examples that lack, and drop those that hold no longer."""
    every = known()
    for dialect in map(compat.load, names or compat.names()):
        rows = list(dialect.checks)
        own = {
            rule: one
            for rule, one in every.get(dialect.name, {}).items()
            if rule in spoken(dialect, one)
        }
        own = {rule: one for rule, one in own.items() if rule in {row.rule for row in rows}}
        search = _Search(dialect, own)
        for row in rows:
            if row.rule not in search.found and row.rule not in REASONS.get(dialect.name, {}):
                search.look(row)
        every[dialect.name] = dict(sorted(search.found.items()))
        lacking = sorted(
            {row.rule for row in rows} - search.found.keys() - REASONS.get(dialect.name, {}).keys()
        )
        print(
            f"{dialect.name}: {len(search.found)} examples, {len(lacking)} lacking",
            *lacking,
            sep="\n  ",
        )
        FILE.write_text(
            json.dumps({name: rows for name, rows in every.items() if rows}, indent=1) + "\n",
            encoding="utf-8",
        )


class _Search:
    """Tries small sources of one stack; whatever rule speaks of one has its example."""

    def __init__(self, dialect: Dialect, found: dict[str, Example]) -> None:
        self.dialect, self.found = dialect, found
        self.schema = fields(dialect.schema)
        self.wanted = {row.rule for row in dialect.checks}

    def look(self, row: Check) -> None:
        """Settings that a rule may be about, one, two and three at a time."""
        versions = self._versions(row)
        names = list(islice(dict.fromkeys(self._names(row)), MOST))
        values = {name: self._values(name, row) for name in names}
        tries = chain.from_iterable(
            product(*([(name, value) for value in values[name]] for name in group))
            for size in (1, 2, 3, 4)
            for group in combinations(names, size)
        )
        every = list(_sampled(tries, row.rule))
        kinds = [
            (form, version)
            for form in FORMS.get(self.dialect.name, (FILE_FORM,))
            for version in versions
        ]
        for number, start in enumerate(STARTS.get(self.dialect.name, ({},))):
            for count, pairs in enumerate(every if number == 0 else every[:FURTHER]):
                for kind, ranks in product(
                    kinds if count < FEW else kinds[:1], RANKS if count < FEW else RANKS[1:2]
                ):
                    if self.tried({**start, **dict(pairs)}, *kind, ranks, row.rule):
                        return

    def tried(
        self, given: Given, form: str, version: str | None, ranks: int | None, rule: str
    ) -> bool:
        """Whether a rule speaks of a source; every rule that does is kept."""
        example = self._example(given, form, version, ranks)
        if example is None:
            return False
        for heard_rule in spoken(self.dialect, example) & self.wanted - self.found.keys():
            self.found[heard_rule] = self.smallest(given, form, version, ranks, heard_rule)
        return rule in self.found

    def smallest(
        self, given: Given, form: str, version: str | None, ranks: int | None, rule: str
    ) -> Example:
        """The example without what the rule does not need to speak."""
        for name in list(given):
            less = {other: value for other, value in given.items() if other != name}
            example = self._example(less, form, version, ranks)
            if example is not None and rule in spoken(self.dialect, example):
                given = less
        sized = (self._example(given, form, version, size) for size in (None, ranks))
        return next(
            example for example in sized if example and rule in spoken(self.dialect, example)
        )

    def _example(
        self, given: Given, form: str, version: str | None, ranks: int | None
    ) -> Example | None:
        source: Any = (
            nest({**BASES.get(self.dialect.name, {}), **given}) if form == FILE_FORM else given
        )
        if form == WORDS:
            from compat.megatron.options import option_for

            lines = [
                option_for(version or self.dialect.newest, name, value)
                for name, value in given.items()
            ]
            if None in lines:
                return None
            source = [word for line in lines for word in line or ()]
        elif form == CONTAINER:
            training = {name: given[name] for name in TRAINED if name in given}
            model = {name: value for name, value in given.items() if name not in training}
            source = {
                "_target_": "megatron.training.config.ConfigContainer",
                "model": model,
                "train": training,
            }
        return {
            **({"object": form} if form not in (WORDS, CONTAINER, FILE_FORM) else {}),
            "source": source,
            **({"ranks": ranks} if ranks else {}),
            **({"version": version} if version else {}),
        }

    def _versions(self, row: Check) -> list[str | None]:
        """Releases that have the rule: the last one (None: the newest of all), the first, and what comes after the newest."""
        from bridge.stack.releases import Releases

        at = Releases(self.dialect.name, self.dialect.versions)
        having = [
            version for version in self.dialect.versions if at.within(version, row.since, row.until)
        ]
        last = None if self.dialect.newest in having or not having else having[-1]
        return [*dict.fromkeys((last, *having[:1], *having[-1:]))]

    def _names(self, row: Check) -> Iterator[str]:
        """Settings that a rule names: in its path, its needs, its condition and its words."""
        yield from (name for name in (row.path, *row.needs) if name in self.schema)
        words = set(_words(row.when)) | set(
            row.message.replace("{", " ").replace("}", " ").replace(",", " ").split()
        )
        yield from (name for name in self.schema if name in words)
        lasts = {word.rpartition(".")[2] for word in words}
        yield from (
            name for name in self.schema if "." in name and name.rpartition(".")[2] in lasts
        )

    def _values(self, name: str, row: Check) -> list[Any]:
        """Values that a setting is tried with: those of its type, and those that the rule speaks of."""
        types = set(_types(self.schema[name].annotation))
        lists = [
            [value]
            for value in dict.fromkeys(_constants(row.when))
            if list in types and isinstance(value, str) and value
        ]
        constants = [value for value in _constants(row.when) if type(value) in types]
        near = [value + step for value in constants if type(value) is int for step in (1, -1)]
        choices = [*_choices(self.schema[name].annotation), *self._flagged(name, row)]
        usual = [
            *((True, False) if bool in types else ()),
            *(NUMBERS if int in types else ()),
            *(FRACTIONS if float in types else ()),
            *(TEXTS if str in types and not choices else ()),
        ]
        options: dict[str, Any] = {
            repr(value): value for value in (*lists, *constants, *near, *choices, *usual)
        }
        return list(options.values())[:14]

    def _flagged(self, name: str, row: Check) -> Iterator[Any]:
        """Values that the flag of a setting lists."""
        if WORDS in FORMS.get(self.dialect.name, ()):
            from compat.megatron.options import by_dest

            for flag in by_dest(self._versions(row)[0] or self.dialect.newest).get(name, ()):
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
            own = [
                other
                for other in named
                if isinstance(other, FunctionType) and other.__module__.startswith("compat")
            ]
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
