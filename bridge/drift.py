"""Drift: what the same file means in two releases of its own stack, and the file that keeps its meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from bridge.config import fields, shown
from bridge.dialect import Config
from bridge.errors import BridgeError
from bridge.findings import Finding, Origin
from bridge.migration import Aim, differing, has, migrate, moves, readable, reworded, settable
from bridge.rules import Effect
from bridge.translation import claims, lift, plan_claims


class Kind(StrEnum):
    """How a setting differs between two releases."""

    RENAMED = "renamed"
    GONE = "gone"
    NEW = "new"
    REFUSED = "refused"
    DEFAULT = "default moved"
    DERIVED = "derived otherwise"
    MEANING = "means something else"


@dataclass(frozen=True, slots=True)
class Change:
    """One difference: effective values `before` and `after`, whether the file sets the field, and what it does to the run."""

    path: str
    kind: Kind
    message: str
    effect: Effect
    given: bool = False
    before: Any = None
    after: Any = None
    origin: Origin | None = None


@dataclass(frozen=True)
class Drift:
    """What one file means in two releases.

    `after` is the file as the second release reads it, None if that refuses it; `changes` are the differences. `migrated`
    says for the second release what the file said for the first, `left` is what it cannot say; it is None if the release
    accepts no part of the file. `new` are settings that only the second release has, `lapsed` those that only the first
    has, with what each takes where the file says nothing. `remarks` are findings that the second release adds.
    """

    before: Config
    version: str
    after: Config | None
    changes: tuple[Change, ...]
    new: Mapping[str, Any]
    lapsed: Mapping[str, Any]
    remarks: tuple[Finding, ...]
    migrated: Config | None
    left: tuple[Change, ...]

    @property
    def same(self) -> bool:
        """Whether the file means the same in both releases."""
        return not self.changes

    @cached_property
    def edits(self) -> Mapping[str, tuple[Any, Any]]:
        """What the migrated file says otherwise: the given value before and after, None where there is none."""
        old, new = self.before.given, self.migrated.given if self.migrated else self.before.given
        return {path: (old.get(path), new.get(path)) for path in {**old, **new} if old.get(path) != new.get(path)}


def drift(read: Callable[[str], Config], version: str, to_version: str) -> Drift:
    """Compare what `read` makes of one source at two releases; raises `BridgeError` if the first of them refuses it."""
    before = read(version)
    after, problems = _attempt(lambda: read(to_version))
    if problems:
        problems = dict.fromkeys((*problems, *_objections(before, to_version)))
    seen = after or readable(before, before.given, to_version)
    migrated = migrate(before, to_version) if to_version != version else before
    changes = [*_renamed(before, to_version), *_refused(before, problems), *(_unlike(before, seen) if seen else ())]
    return Drift(
        before,
        to_version,
        after,
        tuple(_merged(changes)),
        _alone(seen, before) if seen else {},
        _alone(before, seen) if seen else {},
        _remarks(before, after) if after else (),
        migrated,
        tuple(_left(before, migrated)) if migrated else (),
    )


def _attempt(read: Callable[[], Config]) -> tuple[Config | None, Iterable[str]]:
    try:
        return read(), ()
    except BridgeError as error:
        return None, error.problems


def _objections(before: Config, version: str) -> Iterable[str]:
    """What a release has against the settings that it knows, which its reader may not come to say."""
    given = settable(before.dialect, reworded(before, version), version, before.entry)
    return _attempt(lambda: before.dialect.config(given, version, before.world_size, before.entry))[1]


def _left(before: Config, migrated: Config) -> Iterator[Change]:
    """What the migrated file does not say; what it says in other words is not among it."""
    renamed = {change.path for change in _renamed(before, migrated.version)}
    aim = Aim(before)
    kept = aim.meant.keys() - aim.strayed(migrated)
    found = [*_gone(before, migrated), *_values(before, migrated)]
    for change in _merged((*found, *_meanings(before, migrated, {change.path for change in found}))):
        rule = claims(before.dialect).get(change.path)
        carried = rule.carried(change.path) if rule else ()
        moved = change.kind is Kind.GONE or (change.path in migrated.given and change.path not in before.given)
        if change.path not in renamed and not (moved and carried and kept.issuperset(carried)):
            yield change


def _merged(changes: Iterable[Change]) -> Iterator[Change]:
    """One change for each path, of the first kind found; what the second release says in refusing it is said there."""
    found: dict[str, Change] = {}
    for change in changes:
        first = found.setdefault(change.path, change)
        if change.kind is Kind.REFUSED and first is not change:
            found[change.path] = replace(first, message=change.message, effect=change.effect)
        elif first.kind is Kind.REFUSED and change.kind is Kind.GONE:
            found[change.path] = replace(change, message=first.message, effect=first.effect)
    return iter(found.values())


def _change(config: Config, path: str, kind: Kind, message: str, before: Any = None, after: Any = None) -> Change:
    given = path in config.given
    before = config.given.get(path) if before is None else before
    return Change(path, kind, message, _effect(config, path), given, before, after, config.origins.get(path))


def _effect(config: Config, path: str) -> Effect:
    rule = claims(config.dialect).get(path)
    if rule is None:
        return Effect.NUMBERS
    return rule.effect_of(config.effective)


def _renamed(before: Config, version: str) -> Iterator[Change]:
    if version == before.version:
        return
    for move, forward in moves(before.dialect, before.version, version):
        path, words = (move.old[0], move.new) if forward else (move.new[0], move.old)
        said = move.applied(before.given, forward)
        if path in before.given and path not in said:
            new = {name: said[name] for name in words if name in said}
            also = f"; {move.note}" if forward and move.note else ""
            spelled = ", ".join(f"{name}={shown(value)}" for name, value in new.items())
            message = f"{spelled} {'since' if forward else 'only since'} {move.since}{also}" if forward else f"here {spelled}"
            yield _change(before, path, Kind.RENAMED, message, None, next(iter(new.values()), None))


def _refused(before: Config, problems: Iterable[str]) -> Iterator[Change]:
    for problem in problems:
        path = _path_of(problem, before)
        yield replace(_change(before, path, Kind.REFUSED, problem), effect=Effect.STOPS)


def _path_of(problem: str, config: Config) -> str:
    """The setting that a problem is about: a given one if its beginning names one, by its path or as the file spells it."""
    heads = problem.split(": ")[:4]
    spellings = {origin.spelling: path for path, origin in config.origins.items() if origin.spelling and path in config.given}
    named = (head if head in config.given else spellings.get(head) for head in heads)
    inside = (path for head in heads for path in config.given if path.startswith(head + "."))
    known = (head for head in heads if head in fields(config.dialect.schema))
    return next((path for path in (*named, *inside, *known) if path), heads[0])


def _unlike(before: Config, after: Config) -> Iterator[Change]:
    found = [*_gone(before, after), *_came(before, after), *_values(before, after)]
    yield from (*found, *_meanings(before, after, {change.path for change in found}))


def _gone(before: Config, after: Config) -> Iterator[Change]:
    for path, value in before.given.items():
        if path not in after.given and not has(after, path, value):
            yield _change(before, path, Kind.GONE, f"{after.version} does not have it")


def _came(before: Config, after: Config) -> Iterator[Change]:
    """What the file says to the second release alone."""
    for path, value in after.given.items():
        if path not in before.given and not has(before, path, value):
            message = f"{before.version} does not have it, and leaves it out"
            yield replace(_change(after, path, Kind.NEW, message, None, value), before=None)


def _values(before: Config, after: Config) -> Iterator[Change]:
    old, new = before.dialect.defaults(before.version), before.dialect.defaults(after.version)
    for path, (was, now) in differing(before, after).items():
        default = path not in before.given and path not in after.given and old.get(path) != new.get(path)
        kind = Kind.DEFAULT if default else Kind.DERIVED
        message = f"{before.version} takes {shown(was)}, {after.version} {shown(now)}"
        yield replace(_change(before, path, kind, message, None, now), before=was)


def _meanings(before: Config, after: Config, explained: set[str]) -> Iterator[Change]:
    """Settings of equal value that stand for something else, and what a stack does otherwise without being asked."""
    rules, aim, kept = plan_claims(before.dialect), Aim(before), lift(after).values()
    for ours in aim.strayed(after):
        rule, was, now = rules[ours], aim.meant.get(ours), kept.get(ours)
        same = [path for path in rule.theirs if path in before.given and before.given[path] == after.given.get(path)]
        silent = was is not None and now is not None and explained.isdisjoint((*rule.theirs, *rule.sees))
        if same or silent:
            message = f"stands for {ours} {shown(was)} in {before.version}, {shown(now)} in {after.version}"
            path = same[0] if same else ours
            yield replace(_change(before, path, Kind.MEANING, message), before=was, after=now)


def _alone(one: Config, other: Config) -> dict[str, Any]:
    """Settings that only the release of `one` has and that its file leaves alone, with what it takes for them."""
    said = {path: value for path, value in one.effective.items() if path not in one.given and value is not None}
    return {path: value for path, value in said.items() if not has(other, path, value)}


def _remarks(before: Config, after: Config) -> tuple[Finding, ...]:
    known = {(finding.path, finding.message) for finding in before.findings}
    return tuple(finding for finding in after.findings if (finding.path, finding.message) not in known)
