"""Translation back: a config is made again from its sidecar and from the edits that were made
since. Settings that no edit concerns are restored as they were.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bridge.errors import BridgeError, ConfigError
from bridge.files.shown import show_value
from bridge.plan.free_sections import section_settings, settings_that_changed, worth
from bridge.plan.plan import Plan
from bridge.plan.section import Values
from bridge.stack.dialect import Config, Dialect
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect, How, Rule
from bridge.stack.stack_tables import StackTables
from bridge.translation.lift import (
    Meaning,
    claims,
    meaning_of,
    plan_claims,
    settable,
    settings_for,
    unlike,
)
from bridge.translation.sidecar import Carry, edits, overrulers

Given = Mapping[str, Any]
Unit = tuple[str, ...]
ROUNDS = 2
"""Number of rounds in which settings of fields with a wrong meaning are written again."""


def sound(carry: Carry, dialect: StackTables) -> Given:
    """Return the settings of a sidecar whose values have the right type."""
    return (
        carry.given
        if _valid(dialect, carry.given)
        else {k: v for k, v in carry.given.items() if _valid(dialect, {k: v})}
    )


def _valid(dialect: StackTables, settings: Given) -> bool:
    try:
        dialect.as_section(Values(settings))
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class _Attempt:
    """A candidate for the restored config: the values, the config, and the plan fields whose
    meaning in this config is wrong.
    """

    values: Given
    config: Config
    wrong: frozenset[str]
    score: tuple[int, int, int]
    """Three numbers, compared in this order: lost edits, other fields with a wrong meaning, and
    settings that were not put back.
    """


class Way:
    """The search for the restored config. `goal` is the meaning that this config must have. The
    search keeps as many of the user's settings as possible.

    Several candidates are tried, because settings that are put back may contradict settings that
    are written, and because a stack may be unable to express the whole meaning.
    """

    def __init__(
        self, ours: Meaning, dialect: Dialect, version: str, world_size: int | None, carry: Carry
    ) -> None:
        self.ours, self.dialect, self.version, self.world_size, self.carry = (
            ours,
            dialect,
            version,
            world_size,
            carry,
        )
        self.changed, self.overruling = edits(carry, ours), overrulers(carry, dialect, ours)
        # A group is edited as a whole: its fields are only right together. Settings that overrule
        # others touch a group too, unless no field of a plan stands for it.
        self.edited = {
            path
            for rule in dialect.rules
            if not self.changed.isdisjoint(rule.ours)
            or (rule.ours and not self.overruling.isdisjoint(rule.theirs))
            for path in rule.theirs
        }
        self.best: _Attempt | None = None

    @cached_property
    def settings_with_rule(self) -> Given:
        """The settings of the sidecar that the stack's table still has a rule for."""
        return {
            path: value for path, value in self.carry.given.items() if path in claims(self.dialect)
        }

    @cached_property
    def source(self) -> Config | None:
        """The config that the sidecar was made from, or None if the stack refuses the settings in
        the sidecar.
        """
        carry = self.carry
        for world_size in (carry.world_size or self.world_size, carry.world_size):
            try:
                return self.dialect.config(carry.given, carry.version, world_size, carry.entry)
            except BridgeError:  # an error for the wanted release is raised later
                continue
        return None

    @cached_property
    def before(self) -> Meaning:
        """The meaning of the sidecar's source, or of the edited config if the source cannot be
        read.
        """
        return meaning_of(self.source) if self.source else self.ours

    @cached_property
    def goal(self) -> Meaning:
        """The meaning of the sidecar's source, with the edits that were made after the sidecar was
        written.
        """
        now = self.before | {path: self.ours.get(path) for path in self.changed}
        return Meaning((path, value) for path, value in now.items() if value is not None)

    @cached_property
    def anew(self) -> Given:
        """All settings, as the table writes them from the meaning of the edited config."""
        return settings_for(
            self.ours, self.dialect, self.version, self.world_size, self.settings_with_rule
        )

    @cached_property
    def own(self) -> Given:
        """All settings with the meaning of `goal`, as the table writes them in the source's own
        terms, such as the keys of the source's model family.
        """
        return self._in_own_terms(self.goal)

    def _in_own_terms(self, ours: Meaning) -> Given:
        return settings_for(
            ours, self.dialect, self.version, self.carry.world_size, self.settings_with_rule
        )

    def best_config(self) -> Config:
        """Return the candidate that loses the fewest edits. Among several, choose the one with the
        fewest wrong fields, and then the one that keeps the most settings of the user. Without
        edits, return the settings of the sidecar as a config.

        Raises `BridgeError` if the stack refuses all candidates.
        """
        if not self.changed:
            return self._config(self.settings_with_rule)
        refusal = None
        for values in self._values():
            try:
                attempt = self._attempt(values)
            except BridgeError as error:
                refusal = refusal or error
                continue
            # On a tie the earlier one stays: it was tried first because it keeps more of the file.
            self.best = (
                attempt if self.best is None or attempt.score < self.best.score else self.best
            )
            if not self.best.wrong:
                break
        if self.best is None:
            raise refusal or BridgeError()
        return self.best.config

    def _values(self) -> Iterator[Given]:
        """Yield candidates for the given values, until the best one has no wrong field."""
        candidate = _with(self.settings_with_rule, self.edited, self.own)
        yield self._slightly()
        yield candidate
        yield {path: value for path, value in candidate.items() if path not in self.overruling}
        for _ in range(ROUNDS):
            yield from self._mend_rules()
        yield _with(self.settings_with_rule, self.edited, self.anew)
        yield from self._mend_rules()
        yield from self._least()

    def _slightly(self) -> Given:
        """Return the kept settings, with those settings written anew that express an edit. In a
        section, only the entries that the edit changes are written anew.
        """
        was, table = self._in_own_terms(self.before), claims(self.dialect)
        stand = [
            path
            for path in self.edited
            if not self.changed.isdisjoint(table[path].paths_of_plan(path))
        ]
        merges = {
            path: _merge_values(
                self.settings_with_rule.get(path), was.get(path), self.own.get(path)
            )
            for path in stand
        }
        return _with(self.settings_with_rule, self.overruling.union(stand), {**self.own, **merges})

    def _mend_rules(self) -> Iterator[Given]:
        """Yield a variant of the best values so far: the settings of each rule with a wrong field
        are written anew.
        """
        if self.best is not None:
            rules = plan_claims(self.dialect)
            wrong = {rules[ours] for ours in self.best.wrong if ours in rules}
            paths = {path for rule in wrong if not self._holds_more(rule) for path in rule.theirs}
            yield _with(self.best.values, paths, self.own)

    def _holds_more(self, rule: Rule) -> bool:
        """Return whether the kept settings of a rule mean more than a plan can hold. Writing them
        anew would lose a part of their meaning.
        """
        if rule.blurs is None or self.source is None or not self.edited.isdisjoint(rule.theirs):
            return False
        return rule.blurs(rule.values_in_view(rule.theirs, self.source.effective))

    def _least(self) -> Iterator[Given]:
        """Yield values in which all settings are written anew, if they are better than the best so
        far. As many settings of the sidecar as possible are put back first, beginning with the
        settings whose loss has the worst effect.
        """
        whole = self._try_values(self.anew)
        if whole is None or (self.best is not None and whole.score[:2] >= self.best.score[:2]):
            return
        best, rest = self._fuller(whole)
        for other in reversed(rest):
            almost = self._with_units(best, [unit for unit in rest if unit != other])
            if almost is not None:
                best = almost
                break
        yield best.values

    def _fuller(self, whole: _Attempt) -> tuple[_Attempt, list[Unit]]:
        """Put the settings of the sidecar back into `whole`, except those that are incompatible
        with `whole`. Return the result and the settings that were left out, in the units of
        `_units`.
        """
        # By halves: most units are compatible, so few attempts are needed, each of which builds a
        # config.
        parts, rest = [self._units()], list[Unit]()
        while parts:
            part = parts.pop()
            fuller = self._with_units(whole, part)
            if fuller is not None:
                whole = fuller
            elif len(part) > 1:
                parts += [part[len(part) // 2 :], part[: len(part) // 2]]
            else:
                rest += part
        return whole, rest

    def _with_units(self, whole: _Attempt, units: list[Unit]) -> _Attempt | None:
        """Return `whole` with the settings in `units` put back, or None if the stack refuses the
        new config or if more fields are wrong in the new config.
        """
        fuller = self._try_values(
            _with(whole.values, {path for unit in units for path in unit}, self.settings_with_rule)
        )
        return fuller if fuller is not None and fuller.score[:2] <= whole.score[:2] else None

    def _units(self) -> list[Unit]:
        """Return the settings that were not edited, sorted by the effect of losing them, the worst
        effect first. The settings of one rule form one unit, but a setting that no plan field
        stands for is a unit alone.
        """
        effective = self.source.effective if self.source else Values()
        rows = [
            (rule.effect_of(effective).rank, not rule.ours, unit)
            for rule in self.dialect.rules
            for unit in ([rule.theirs] if rule.ours else [(path,) for path in rule.theirs])
            if self.edited.isdisjoint(unit) and not self.settings_with_rule.keys().isdisjoint(unit)
        ]
        return [unit for _, _, unit in sorted(rows)]

    def _try_values(self, values: Given) -> _Attempt | None:
        try:
            return self._attempt(values)
        except BridgeError:  # that, too, the stack refuses
            return None

    def _attempt(self, values: Given) -> _Attempt:
        """Make a config of `values` and compute its score. Raises `BridgeError` if the stack
        refuses the config.
        """
        config = self._config(values)
        wrong = frozenset(unlike(self.goal, meaning_of(config)))
        edit_losses = {path for path in wrong & self.changed if path in self.ours}
        setting_losses = [
            path
            for path, value in self.settings_with_rule.items()
            if path not in self.edited and config.given.get(path) != value
        ]
        return _Attempt(
            values,
            config,
            wrong,
            (len(edit_losses), len(wrong) - len(edit_losses), len(setting_losses)),
        )

    def _config(self, values: Given) -> Config:
        """Make a config of `values`. Raises `BridgeError` if the stack refuses the config."""
        in_table_order = {
            path: values[path]
            for rule in self.dialect.rules
            for path in rule.theirs
            if path in values
        }
        settings = settable(in_table_order, self.dialect, self.version, self.carry.entry)
        try:
            return self.dialect.config(settings, self.version, self.world_size, self.carry.entry)
        except ConfigError:
            if self.carry.world_size is not None:
                raise
            # A source without a world size may have ranks that no plan knows, such as those of a
            # separate encoder. Then the other side's mesh does not have the size of the world.
            return self.dialect.config(settings, self.version, None, self.carry.entry)

    def as_it_was(self, target_meaning: Meaning) -> set[str]:
        """Return the plan fields that nobody edited and that have the same meaning in
        `target_meaning` as before the conversion, or none as before.
        """
        fields = self.goal.plain.keys() | self.ours.plain.keys()
        return fields - self.changed - unlike(self.goal, target_meaning)

    def findings_on_rest(self, sidecar: Given, source: Config, target: Config) -> Iterator[Finding]:
        """Yield a finding for each setting in `sidecar` that no edit concerns and that could not be
        put back. Then yield a finding for each plan field whose meaning changed although nobody
        edited the field.
        """
        why = f"the edit of {', '.join(_names(source, self.changed))} excludes the old setting"
        table, odd, rest = (
            claims(self.dialect),
            tuple(self._meaningless(target)),
            tuple(self._not_put_back(sidecar, target, why)),
        )
        yield from odd
        for path, reason in rest:
            yield from _finding_on_setting(path, sidecar[path], reason, table.get(path), target)
        yield from self._findings_on_meaning(
            target, why, {*(finding.path for finding in odd), *(path for path, _ in rest)}
        )

    def _not_put_back(self, sidecar: Given, target: Config, why: str) -> Iterator[tuple[str, str]]:
        """Yield each setting of `sidecar` whose value in the target differs, with the reason."""
        dialect, table = self.dialect, claims(self.dialect)
        for path, value in sidecar.items():
            if (
                value is None
                or path in self.edited
                or path in self.overruling
                or target.given.get(path, target.effective.get(path)) == value
            ):
                continue
            valid = dialect.knows(path, value, target.version, self.carry.entry) and _valid(
                dialect, {path: value}
            )
            yield path, why if path in table and self.changed and valid else _refusal(path, target)

    def _meaningless(self, target: Config) -> Iterator[Finding]:
        """Yield a finding for each value in the sidecar's `meant` that no plan can have. An edit of
        such a field cannot be recognised.
        """
        table, values = plan_claims(self.dialect), self.carry.meant
        for path, value in values.items() if not _of_a_plan(values) else ():
            if not _of_a_plan({path: value}):
                effect = (
                    table[path].effect_of_losing((path,), target.effective)
                    if path in table
                    else Effect.NUMBERS
                )
                message = (
                    f"the sidecar states the meaning {show_value(value, 30)}, which is not a valid "
                    "value; the value in the file is used"
                )
                yield Finding(path, message, effect, True, How.DROPPED, value)

    def _findings_on_meaning(
        self, target: Config, why: str, finding_paths: set[str]
    ) -> Iterator[Finding]:
        """Yield a finding for each plan field that nobody edited and whose meaning is different
        now.
        """
        rules, now = plan_claims(self.dialect), meaning_of(target)
        fields = unlike(self.goal, now) - self.changed if self.changed else ()
        for ours in sorted(
            path for path in fields if self.goal.get(path) is not None and path in rules
        ):
            carriers = rules[ours].carriers(ours)
            if finding_paths.isdisjoint(carriers):
                path = next(
                    (
                        path
                        for path in carriers
                        if path in self.settings_with_rule or path in target.given
                    ),
                    ours,
                )
                effect = rules[ours].effect_of_losing((ours,), target.effective)
                message = f"{ours} has another value than before: {why}"
                yield Finding(
                    path,
                    message,
                    effect,
                    path in self.settings_with_rule,
                    How.APPROXIMATE,
                    self.goal[ours],
                    now.get(ours),
                )


def _finding_on_setting(
    path: str, value: Any, reason: str, rule: Rule | None, target: Config
) -> Iterator[Finding]:
    """Yield a finding for a setting that was not put back. For a section, yield one finding for
    each of its settings whose value in the target differs.
    """
    current, effect = (
        target.effective.get(path),
        rule.effect_of(target.effective) if rule else Effect.NUMBERS,
    )
    parts = section_settings(path, value, target.effective) if rule else ()
    rows = [
        (part.path, part.value, worth(rule, effect, part), None)
        for part in settings_that_changed(parts, current)
        if rule
    ]
    for place, old, weight, now in rows if parts else [(path, value, effect, current)]:
        # A setting of the file is not missing: it has another value, which the edit leads to.
        stays = not parts and path in target.given
        fate = f"the file has {show_value(now, 30)}" if stays else "which was not put back"
        how = How.APPROXIMATE if stays else How.DROPPED
        yield Finding(
            place,
            f"the sidecar says {show_value(old, 30)}, {fate}: {reason}",
            weight,
            True,
            how,
            old,
            now,
        )


def _of_a_plan(values: Given) -> bool:
    """Return whether a plan can have these values at these paths."""
    try:
        return Plan.of(values).values().keys() == values.keys()
    except ConfigError:
        return False


def _with(values: Given, paths: Collection[str], others: Given) -> dict[str, Any]:
    """Return `values` with the values of `others` at `paths`. A path that `others` lacks is
    removed.
    """
    rest = {path: value for path, value in values.items() if path not in paths}
    return rest | {path: value for path, value in others.items() if path in paths}


def _merge_values(base: Any, was: Any, now: Any) -> Any:
    """Return `base` with the changes from `was` to `now`. Mappings are changed entry by entry,
    other values are replaced as a whole.
    """
    if not all(isinstance(value, Mapping) for value in (base, was, now)):
        return now
    others = {name: value for name, value in base.items() if name in now or name not in was}
    changes = {name: value for name, value in now.items() if name not in was or was[name] != value}
    return others | {
        name: _merge_values(base.get(name), was.get(name), value) for name, value in changes.items()
    }


def _refusal(path: str, target: Config) -> str:
    dialect = target.dialect
    if path not in claims(dialect):
        return f"{dialect.title} has no such setting"
    return f"{dialect.title} {target.version} does not accept this value"


def _names(source: Config, fields: Iterable[str]) -> list[str]:
    """Return names for the edited fields, at most three: the settings of `source` that stand for
    them.
    """
    rules, names = plan_claims(source.dialect), dict[str, None]()
    for ours in sorted(fields):
        carriers = rules[ours].carriers(ours) if ours in rules else ()
        names |= dict.fromkeys([path for path in carriers if path in source.given] or [ours])
    return [*names][:3]
