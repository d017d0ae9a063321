"""Reference: all facts about a field, and all facts about a pair of dialects, for pages and
commands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Any

from bridge.errors import ConfigError, nearest
from bridge.plan.plan import paths
from bridge.plan.section import fields
from bridge.stack.checks import Check
from bridge.stack.dialect import Dialect
from bridge.stack.findings import Disagreement
from bridge.stack.rules import Context, Effect, How, Rule
from bridge.stack.stack_tables import StackTables
from bridge.translation.lift import claims, plan_claims

DEPENDS = "depends on the values"
"""Text in place of the effect of losing a field, if this effect depends on the values."""


@dataclass(frozen=True, slots=True)
class Span:
    """Successive releases in which a field has the same default: the first, the last, and the
    default (None: open or derived).
    """

    since: str
    until: str
    default: Any


@dataclass(frozen=True, slots=True)
class Arrival:
    """The result of translating one field to another dialect, in the newest releases of both
    dialects.

    `paths` are the fields of the other dialect that receive the value. `how` holds for all values:
    `approximate` means that some values do not survive. `lost` are the plan paths that no field of
    the other dialect stands for. `fixed` are the plan paths that the other stack always sets to one
    value, each with this value. `reasons` state what may be lost and why.
    """

    dialect: str
    title: str
    paths: tuple[str, ...]
    how: How
    lost: tuple[str, ...] = ()
    fixed: tuple[tuple[str, Any], ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """One field of a dialect.

    `kind` describes the values that the field accepts, and `spans` has its releases and defaults.
    `plan` are the plan paths that the field stands for. `effect` is the effect of losing the field;
    None if it depends on the values. `note`, `lossy` and `source` come from the field's rule.
    `checks` are the stack's checks of the field.
    """

    dialect: str
    title: str
    path: str
    section: str
    kind: str
    doc: str
    spellings: tuple[str, ...]
    spans: tuple[Span, ...]
    plan: tuple[str, ...]
    effect: Effect | None
    note: str
    lossy: str
    source: str
    arrivals: tuple[Arrival, ...]
    disagreements: tuple[Disagreement, ...]
    checks: tuple[Check, ...] = ()

    @property
    def numbers(self) -> bool:
        """Whether losing the field changes the numbers of some run."""
        return self.effect is None or self.effect.reaches(Effect.NUMBERS)


def entry(dialect: Dialect, path: str, others: Sequence[Dialect] = ()) -> Entry:
    """Return all facts about the field at `path`. Raises `ConfigError` with the nearest names if
    there is no such field.
    """
    leaf = fields(dialect.schema).get(path)
    if leaf is None:
        raise ConfigError(unknown(dialect, path))
    rule = claims(dialect)[path]
    return Entry(
        dialect.name,
        dialect.title,
        path,
        dialect.section(path),
        dialect.accepts(path),
        leaf.doc,
        dialect.spellings(path),
        spans(dialect, path),
        meanings(dialect).get(path, ()),
        _effect(rule),
        rule.note,
        rule.lossy,
        rule.source,
        tuple(arrival(dialect, path, other) for other in others if other is not dialect),
        tuple(row for row in dialect.disagreements if row.path == path),
        tuple(check for check in dialect.checks if check.path == path),
    )


def entries(dialect: Dialect, others: Sequence[Dialect] = ()) -> Mapping[str, tuple[Entry, ...]]:
    """All fields of a dialect by section, in the order of its schema."""
    sections: dict[str, list[Entry]] = {}
    for path in fields(dialect.schema):
        sections.setdefault(dialect.section(path), []).append(entry(dialect, path, others))
    return MappingProxyType({section: tuple(group) for section, group in sections.items()})


def unknown(dialect: StackTables, path: str) -> str:
    """The message for a field that a dialect does not have, with fields that end in the same word,
    else the nearest names.
    """
    names = tuple(fields(dialect.schema))
    last = path.rpartition(".")[2].lstrip("-").replace("-", "_")
    alike = [name for name in names if name.rpartition(".")[2] == last]
    close = get_close_matches(last, {name.rpartition(".")[2]: name for name in names}, n=1)
    matches = alike or [name for name in names if close and name.rpartition(".")[2] == close[0]]
    hint = f"; did you mean {' or '.join(matches[:3])}?" if matches else nearest(path, names)
    return f"{path}: no such field in {dialect.title}{hint or f'; stagebridge show {dialect.name} lists all fields'}"


def _effect(rule: Rule) -> Effect | None:
    return rule.effect if isinstance(rule.effect, Effect) else None


@cache
def meanings(dialect: StackTables) -> Mapping[str, tuple[str, ...]]:
    """Return the plan paths that each field stands for, by the rule that claims the field and by
    other rules that read it.
    """
    plan_paths: dict[str, list[str]] = {}
    for ours, rule in plan_claims(dialect).items():
        for path in rule.carriers(ours):
            plan_paths.setdefault(path, []).append(ours)
    return MappingProxyType({path: tuple(group) for path, group in plan_paths.items()})


# Releases


@cache
def spans(dialect: StackTables, path: str) -> tuple[Span, ...]:
    """Return the releases that have a field, oldest first. Consecutive releases with one default
    form one span.
    """
    history: list[Span] = []
    last = None
    for version in dialect.versions:
        defaults = _defaults(dialect, version)
        if path in defaults:
            default, since = defaults[path], version
            # A span goes on only over neighbours: a field may go away and come back. Types are
            # compared too, as True equals 1.
            if history and history[-1].until == last:
                before = history[-1].default
                if type(before) is type(default) and before == default:
                    since = history.pop().since
            history.append(Span(since, version, default))
        last = version
    return tuple(history)


@cache
def _defaults(dialect: StackTables, version: str) -> Mapping[str, Any]:
    return dialect.defaults(version)


@cache
def current(dialect: StackTables) -> frozenset[str]:
    """Paths that the newest release has."""
    return frozenset(_defaults(dialect, dialect.newest))


# Pairs


def arrival(source: StackTables, path: str, target: StackTables) -> Arrival:
    """Return the result of translating the field at `path` of `source` to `target`."""
    plan_fields = meanings(source).get(path, ())
    there = {ours: carriers(target, ours) for ours in plan_fields}
    target_paths = tuple(dict.fromkeys(name for names in there.values() for name in names))
    gaps = tuple(ours for ours, names in there.items() if not names)
    constants = tuple((ours, value) for ours, value in always(target).items() if ours in gaps)
    limits = _limits(source, path, target) if target_paths else ()
    how = _how(source, path, target_paths, bool(gaps or limits))
    missing = [plan_claims(target)[ours].lossy or plan_claims(target)[ours].note for ours in gaps]
    own = claims(source)[path]
    reasons = dict.fromkeys((*missing, *limits) if plan_fields else (own.note or own.lossy,))
    return Arrival(
        target.name,
        target.title,
        target_paths,
        how,
        gaps,
        constants,
        tuple(reason for reason in reasons if reason),
    )


def carriers(dialect: StackTables, ours: str) -> tuple[str, ...]:
    """Return the fields of the newest release that stand for a plan path."""
    return tuple(
        path for path in plan_claims(dialect)[ours].carriers(ours) if path in current(dialect)
    )


@cache
def always(dialect: StackTables) -> Mapping[str, Any]:
    """Return the plan paths that a stack always sets to one value, each with this value. The stack
    has no settings for these paths.
    """
    # Such a rule claims no setting, so it reads its value from nothing.
    context = Context(dialect.newest)
    constants = {
        ours: value
        for rule in dialect.rules
        if not rule.theirs
        for ours, value in rule.read({}, context).items()
    }
    return MappingProxyType(constants)


def _how(source: StackTables, path: str, target_paths: tuple[str, ...], partial: bool) -> How:
    if not target_paths:
        return How.DROPPED
    if partial:
        return How.APPROXIMATE
    plan_fields = meanings(source)[path]
    alone = len(plan_fields) == len(target_paths) == 1 and carriers(source, plan_fields[0]) == (
        path,
    )
    return How.EXACT if alone else How.DERIVED


def _limits(source: StackTables, path: str, target: StackTables) -> tuple[str, ...]:
    """Return the reasons why some values do not survive, in reading the source or in writing the
    target.
    """
    plan_fields = meanings(source)[path]
    mine = [plan_claims(source)[ours] for ours in plan_fields]
    # A reader loses something if its rule blurs values, or if one field stands for several plan
    # fields.
    read = [rule.lossy for rule in mine if rule.blurs or len(plan_fields) > 1]
    write_limits = [plan_claims(target)[ours].lossy for ours in plan_fields]
    return tuple(reason for reason in dict.fromkeys((*read, *write_limits)) if reason)


@dataclass(frozen=True, slots=True)
class Passage:
    """One field of the source in a pair of dialects: the result of translating it, and the effect
    of losing it (None: depends on the values). `kept` is true if a plan path stands for the field.
    """

    path: str
    how: How
    effect: Effect | None
    arrival: Arrival
    kept: bool

    @property
    def lossless(self) -> bool:
        """Whether every value survives."""
        return self.how in (How.EXACT, How.DERIVED)


@dataclass(frozen=True, slots=True)
class Opening:
    """A field of the target that no field of the source stands for. The target's default takes
    effect.
    """

    path: str
    ours: str
    effect: Effect | None
    default: Any


@dataclass(frozen=True, slots=True)
class DialectPair:
    """The translation from one dialect to another, in the newest releases of both dialects.

    `passages` has each field of the source. Fields whose passage is not `kept` exist only in the
    source's stack, and every translation loses them. `openings` are fields of the target that the
    source leaves open. `own` is the number of target fields that no other stack can set; these
    fields have the target's defaults.
    """

    source: Dialect
    target: Dialect
    passages: tuple[Passage, ...]
    openings: tuple[Opening, ...]
    own: int

    @property
    def passages_with_meaning(self) -> tuple[Passage, ...]:
        """The passages of all fields that a plan path stands for."""
        return tuple(passage for passage in self.passages if passage.kept)

    def fare(self, how: How) -> tuple[Effect | None, ...]:
        """Return, for each field whose translation has the result `how`, the effect of losing the
        field. If `how` is `defaulted`, the fields are fields of the target; otherwise they are
        fields of the source.
        """
        if how is How.DEFAULTED:
            return tuple(opening.effect for opening in self.openings)
        return tuple(passage.effect for passage in self.passages_with_meaning if passage.how is how)


@cache
def pair(source: Dialect, target: Dialect) -> DialectPair:
    """The facts that hold for every translation from `source` to `target`."""
    passages = []
    for path in fields(source.schema):
        if path in current(source):
            outcome, effect = arrival(source, path, target), _effect(claims(source)[path])
            passages.append(Passage(path, outcome.how, effect, outcome, path in meanings(source)))
    own = [
        path
        for path in fields(target.schema)
        if path in current(target) and path not in meanings(target)
    ]
    return DialectPair(source, target, tuple(passages), tuple(_open(source, target)), len(own))


def _open(source: StackTables, target: StackTables) -> Iterator[Opening]:
    defaults, target_paths = _defaults(target, target.newest), set[str]()
    for ours in paths():
        if carriers(source, ours) or ours in always(source):
            continue
        for path in carriers(target, ours):
            # A target field may stand for several plan paths, and the source may set it through
            # another of them.
            spoken = any(carriers(source, more) for more in meanings(target)[path])
            if path not in target_paths and not spoken:
                target_paths.add(path)
                yield Opening(path, ours, _effect(claims(target)[path]), defaults.get(path))
