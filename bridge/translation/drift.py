"""Drift: the difference in meaning of one file between two releases of a stack, and a changed file
that means the same in the second release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from bridge.errors import BridgeError
from bridge.files.shown import show_value
from bridge.plan.section import fields
from bridge.stack.dialect import Config
from bridge.stack.findings import Finding, Origin
from bridge.stack.rules import HABITS, Effect
from bridge.translation.lift import claims, lift, plan_claims
from bridge.translation.migrate import (
    Aim,
    differing,
    has,
    migrate,
    moves,
    readable,
    reword_settings,
    settable,
)


class ChangeKind(StrEnum):
    """The ways in which a setting differs between two releases."""

    RENAMED = "renamed"
    GONE = "gone"
    NEW = "new"
    REFUSED = "refused"
    DEFAULT = "default moved"
    DERIVED = "derived otherwise"
    MEANING = "means something else"


@dataclass(frozen=True, slots=True)
class DriftChange:
    """One difference between two releases: the effective values `before` and `after`, whether the
    file sets the field, and the effect on the run.
    """

    path: str
    kind: ChangeKind
    message: str
    effect: Effect
    given: bool = False
    before: Any = None
    after: Any = None
    origin: Origin | None = None


@dataclass(frozen=True)
class Drift:
    """The meaning of one file in two releases.

    `after` is the file as the second release reads it; None if that release refuses the file.
    `changes` are the differences. `migrated` is a config for the second release that means what the
    file meant in the first; it is None if the second release accepts no part of the file. `left`
    are differences that `migrated` cannot undo. `new` are settings that only the second release
    has, and `lapsed` are settings that only the first release has. The file sets none of these
    settings, so each has the value that the release uses by default. `remarks` are findings that
    the second release adds, and findings on settings that nobody knows.
    """

    before: Config
    version: str
    after: Config | None
    changes: tuple[DriftChange, ...]
    new: Mapping[str, Any]
    lapsed: Mapping[str, Any]
    remarks: tuple[Finding, ...]
    migrated: Config | None
    left: tuple[DriftChange, ...]

    @property
    def same(self) -> bool:
        """Whether the file means the same in both releases: no difference has an effect on the run."""
        return all(change.effect is Effect.NONE for change in self.changes)

    @cached_property
    def edits(self) -> Mapping[str, tuple[Any, Any]]:
        """Settings that the migrated file changes, each with the given values before and after the
        migration. None stands for a setting that is not given.
        """
        old, new = self.before.given, self.migrated.given if self.migrated else self.before.given
        return {
            path: (old.get(path), new.get(path))
            for path in {**old, **new}
            if old.get(path) != new.get(path)
        }


def drift(read: Callable[[str], Config], version: str, to_version: str) -> Drift:
    """Compare the configs that `read` makes of one source for two releases.

    Raises `BridgeError` if the first release refuses the source.
    """
    before = read(version)
    after, problems = _attempt(lambda: read(to_version))
    if problems:
        # A reader that stops at a name which the release lost says nothing about the values of the
        # others.
        settings = settable(
            before.dialect, reword_settings(before, to_version), to_version, before.entry
        )
        _, more = _attempt(
            lambda: before.dialect.config(settings, to_version, before.world_size, before.entry)
        )
        problems = dict.fromkeys((*problems, *more))
    readable_config = after or readable(before, before.given, to_version)
    target = migrate(before, to_version) if to_version != version else before
    changes = [*_find_renames(before, to_version)]
    for problem in problems:
        change = _change(before, _path_of(problem, before), ChangeKind.REFUSED, problem)
        changes.append(replace(change, effect=Effect.STOPS))
    if readable_config:
        changes += _unlike(before, readable_config)
    old_remarks = {(finding.path, finding.message) for finding in before.findings}
    # What nobody knows may have another meaning in the second release, and nothing shows it.
    remarks = (
        [one for one in after.findings if one.unknown or (one.path, one.message) not in old_remarks]
        if after
        else []
    )
    return Drift(
        before,
        to_version,
        after,
        tuple(_merge_changes(changes)),
        _alone(readable_config, before) if readable_config else {},
        _alone(before, readable_config) if readable_config else {},
        tuple(remarks),
        target,
        tuple(_remaining_changes(before, target)) if target else (),
    )


def _attempt(read: Callable[[], Config]) -> tuple[Config | None, Iterable[str]]:
    try:
        return read(), ()
    except BridgeError as error:
        return None, error.problems


def _remaining_changes(before: Config, target: Config) -> Iterator[DriftChange]:
    """Yield the changes between releases that remain in the migrated file. Fields that the migrated
    file sets through other settings do not count.
    """
    old_names = {change.path for change in _find_renames(before, target.version)}
    aim = Aim(before)
    stable_fields = aim.meaning.keys() - aim.differing_fields(target)
    changes = [*_find_removals(before, target), *_values(before, target)]
    for change in _merge_changes(
        (*changes, *_meanings(before, target, {change.path for change in changes}))
    ):
        rule = claims(before.dialect).get(change.path)
        plan_fields = rule.paths_of_plan(change.path) if rule else ()
        elsewhere = change.kind is ChangeKind.GONE or (
            change.path in target.given and change.path not in before.given
        )
        if change.path not in old_names and not (
            elsewhere and plan_fields and stable_fields.issuperset(plan_fields)
        ):
            yield change


def _merge_changes(changes: Iterable[DriftChange]) -> Iterator[DriftChange]:
    """Return one change for each path, the first one found. If one of the changes of a path is a
    refusal, the result has the message of this refusal.
    """
    by_path: dict[str, DriftChange] = {}
    for change in changes:
        first = by_path.setdefault(change.path, change)
        if change.kind is ChangeKind.REFUSED and first is not change:
            by_path[change.path] = replace(first, message=change.message, effect=change.effect)
        elif first.kind is ChangeKind.REFUSED and change.kind is ChangeKind.GONE:
            by_path[change.path] = replace(change, message=first.message, effect=first.effect)
    return iter(by_path.values())


def _change(
    config: Config, path: str, kind: ChangeKind, message: str, before: Any = None, after: Any = None
) -> DriftChange:
    explicit = path in config.given
    before = config.given.get(path) if before is None else before
    return DriftChange(
        path,
        kind,
        message,
        _effect(config, path),
        explicit,
        before,
        after,
        config.origins.get(path),
    )


def _effect(config: Config, path: str) -> Effect:
    rule = claims(config.dialect).get(path)
    if rule is None:
        return Effect.NUMBERS
    return rule.effect_of(config.effective)


def _find_renames(before: Config, version: str) -> Iterator[DriftChange]:
    if version == before.version:
        return
    for move, forward in moves(before.dialect, before.version, version):
        path, words = (move.old[0], move.new) if forward else (move.new[0], move.old)
        settings = move.apply_to(before.given, forward)
        if path in before.given and path not in settings:
            new = {name: settings[name] for name in words if name in settings}
            spelling = ", ".join(f"{name}={show_value(value)}" for name, value in new.items())
            message = f"here {spelling}"
            if forward:
                message = f"{spelling} since {move.since}" + (f"; {move.note}" if move.note else "")
            yield _change(
                before, path, ChangeKind.RENAMED, message, None, next(iter(new.values()), None)
            )


def _path_of(problem: str, config: Config) -> str:
    """Return the setting that a problem is about. This is the given setting that the problem begins
    with, by path or as spelled in the file. If there is none, return the setting of the schema that
    the problem begins with, or else the text before the first colon.
    """
    # A file, a line and an option may stand before the name, each with a colon.
    heads = problem.split(": ")[:4]
    spellings = {
        origin.spelling: path
        for path, origin in config.origins.items()
        if origin.spelling and path in config.given
    }
    mentions = (head if head in config.given else spellings.get(head) for head in heads)
    inside = (path for head in heads for path in config.given if path.startswith(head + "."))
    schema_names = (head for head in heads if head in fields(config.dialect.schema))
    return next((path for path in (*mentions, *inside, *schema_names) if path), heads[0])


def _unlike(before: Config, after: Config) -> Iterator[DriftChange]:
    changes = [*_find_removals(before, after), *_came(before, after), *_values(before, after)]
    yield from (*changes, *_meanings(before, after, {change.path for change in changes}))


def _find_removals(before: Config, after: Config) -> Iterator[DriftChange]:
    for path, value in before.given.items():
        if path not in after.given and not has(after, path, value):
            yield _change(
                before, path, ChangeKind.GONE, f"{after.version} does not have this setting"
            )


def _came(before: Config, after: Config) -> Iterator[DriftChange]:
    """Yield a change for each setting of the file that only the second release knows."""
    for path, value in after.given.items():
        if path not in before.given and not has(before, path, value):
            message = f"{before.version} does not have this setting and ignores it"
            yield replace(_change(after, path, ChangeKind.NEW, message, None, value), before=None)


def _values(before: Config, after: Config) -> Iterator[DriftChange]:
    old, new = before.dialect.defaults(before.version), before.dialect.defaults(after.version)
    for path, (was, now) in differing(before, after).items():
        default = (
            path not in before.given and path not in after.given and old.get(path) != new.get(path)
        )
        kind = ChangeKind.DEFAULT if default else ChangeKind.DERIVED
        message = f"{before.version} uses {show_value(was)}, {after.version} uses {show_value(now)}"
        yield replace(_change(before, path, kind, message, None, now), before=was)


def _meanings(before: Config, after: Config, change_paths: set[str]) -> Iterator[DriftChange]:
    """Yield a change for each setting that keeps its value and changes its meaning, and for each
    plan field whose value changes although no setting changes.
    """
    rules, aim, values = plan_claims(before.dialect), Aim(before), lift(after).values()
    for ours in aim.differing_fields(after):
        rule, was, now = rules[ours], aim.meaning.get(ours), values.get(ours)
        same = [
            path
            for path in rule.theirs
            if path in before.given and before.given[path] == after.given.get(path)
        ]
        silent = (
            was is not None
            and now is not None
            and change_paths.isdisjoint((*rule.theirs, *rule.sees))
        )
        if same or silent:
            message = f"the setting means {ours} {show_value(was)} in {before.version}, but {show_value(now)} in {after.version}"
            if not same and ours.startswith(HABITS):
                message = rule.note
            path = same[0] if same else ours
            yield replace(_change(before, path, ChangeKind.MEANING, message), before=was, after=now)


def _alone(one: Config, other: Config) -> dict[str, Any]:
    """Return the settings that only the release of `one` has and that the file does not set, with
    their effective values.
    """
    values = {
        path: value
        for path, value in one.effective.items()
        if path not in one.given and value is not None
    }
    return {path: value for path, value in values.items() if not has(other, path, value)}
