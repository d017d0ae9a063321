"""Translate: lift a config to a Plan, lower the Plan to a dialect, and measure and name every loss."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from bridge.errors import BridgeError, ConfigError
from bridge.files.shown import show_value
from bridge.plan.free_sections import (
    SectionSetting,
    is_told,
    nested,
    settings,
    values_in_section,
    worth,
)
from bridge.plan.plan import Plan, in_words, paths
from bridge.plan.section import Values
from bridge.plan.values import Leaves
from bridge.stack import rules
from bridge.stack.dialect import Config, Dialect, Written
from bridge.stack.effects import worst
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect, How, Rule
from bridge.stack.stack_tables import StackTables
from bridge.translation.callers import is_decided
from bridge.translation.lift import (
    DECAYED,
    Meaning,
    claims,
    differing,
    lower_values,
    meaning_of,
    plan_claims,
    unlike,
    world_of,
)
from bridge.translation.restore import Way, sound
from bridge.translation.sidecar import Carry

HABITS = ("precision.loss_scale.late", "precision.loss_scale.final")
"""Plan fields that say how a stack applies a setting. Another stack may have this setting with the
same value and apply it in another way, so that a comparison of the values does not show the loss.
"""
ALWAYS = (*HABITS, DECAYED, "loss", *(path for path in paths() if path.startswith(rules.HABITS)))
"""`HABITS`, and further plan fields that some stacks always set to one value."""
PLAN = Leaves(Plan)
SEQUENCE = "model.sequence"
CARRIED = "carry-over"
"""Text in place of the source settings of a field that a sidecar restored. No setting of the source
explains such a field.
"""


@dataclass(frozen=True, slots=True)
class FieldReport:
    """One field of the target: its value, the source fields that the value came from, the way in
    which it came about, and the effect of the field on the run.

    If no source field was given, `default_of` names the dialect whose default the value is.
    """

    path: str
    value: Any
    sources: tuple[str, ...]
    how: How
    effect: Effect
    note: str = ""
    default_of: str = ""


@dataclass(frozen=True)
class Result:
    """A translation: the target config, the plan in between, and the findings on its fields."""

    source: Config
    config: Config
    findings: tuple[Finding, ...]
    carry: Carry = field(repr=False)
    trip: _Trip = field(repr=False)
    put: Written | None = field(default=None, repr=False)
    lacking: tuple[Finding, ...] = ()

    @cached_property
    def plan(self) -> Plan:
        """The plan in between."""
        return Plan.of(self.trip.meant)

    @cached_property
    def written(self) -> Written:
        """The text of the target and everything that belongs to it. If the target was put into a
        file, this is the text in the file.
        """
        return self.put or self.config.dialect.render(self.config)

    @cached_property
    def fields(self) -> tuple[FieldReport, ...]:
        """A report on each field of the target: its value and the source of the value."""
        return tuple(_reports(self.trip))

    @property
    def code(self) -> Mapping[str, Any]:
        """The settings of the target that belong into the training script, as data."""
        return self.written.code

    @cached_property
    def missing(self) -> tuple[Finding, ...]:
        """A finding for each setting that the target's stack needs to start and that the source did
        not have.

        These findings stop the run only if the source was a whole launch. If the source was only a
        part of a launch, or if its stack keeps other settings in code, the target is only a part of
        a launch too.
        """
        source, whole = self.source, self.source.dialect.whole(self.source)
        # Within one stack, settings that the source lacked already are no news.
        same = source.dialect.name == self.config.dialect.name
        source_paths = {finding.path for finding in source.missing} if same else set()
        findings = []
        for finding in self.config.missing:
            if finding.path in source_paths:
                continue
            # No run is the same as one that may not start.
            effect = Effect.STOPS if whole else Effect.NUMBERS
            findings.append(replace(finding, effect=effect))
        return (*findings, *self.lacking)

    def has_arrived(self, path: str) -> bool:
        """Return whether the target has the whole meaning of a setting, if in other words or units."""
        return self.trip.has_arrived(claims(self.source.dialect)[path], path)

    @property
    def exact(self) -> bool:
        """Whether every setting of the user, and every value that changes numbers, arrived in the
        target unchanged.
        """
        return not any(finding.matters for finding in self.findings)


def remarks(target: Config) -> Iterator[Finding]:
    """Findings on the target, without findings on missing settings, which are in `Result.missing`."""
    return (finding for finding in target.findings if finding.how is not How.MISSING)


def remarks_alike(result: Result) -> frozenset[str]:
    """Return the ids of remarks that hold for the source and the target, which are of one stack."""
    if result.source.dialect is not result.config.dialect:
        return frozenset()
    before, after = (
        {one.id for one in remarks(config)} for config in (result.source, result.config)
    )
    return frozenset(before & after)


def _is_ignored(config: Config, path: str) -> bool:
    """Return whether a remark says that the run does without a setting, whatever it says."""
    return any(one.surprising and one.path == path for one in remarks(config))


def unheld(config: Config, blurred: bool = False) -> Iterator[Finding]:
    """Yield a finding for each given setting that no plan field stands for and whose value is not
    the default. If `blurred`, also yield one for each given setting whose value a plan holds only in
    part, so that a run by the plan would do something else.
    """
    table, values = claims(config.dialect), config.effective.flat()
    # A config of the meaning alone leaves these settings open, so its effective values are their
    # defaults.
    back = _back(meaning_of(config), config)
    usual = back.effective if back else Values()
    for path in config.given:
        rule, value = table.get(path), values.get(path)
        if rule is None or value == usual.get(path):
            continue
        view = rule.values_in_view(rule.theirs, values) if rule.blurs else {}
        loses = blurred and rule.blurs is not None and rule.blurs(view)
        if loses or not rule.ours:
            reason = rule.tells(view) if loses and rule.tells else ""
            yield Finding(
                path,
                reason or (rule.lossy if loses else "") or rule.note,
                Effect.NONE if _is_ignored(config, path) else rule.effect_of(values),
                True,
                How.DROPPED,
                value,
                origin=config.origins.get(path),
            )


def translate(
    config: Config,
    dialect: Dialect,
    version: str | None = None,
    world_size: int | None = None,
    carry: Carry | None = None,
) -> Result:
    """Translate `config` to another dialect, or to another release of its own dialect, and report
    every loss with its reason.

    `carry` has the settings that an earlier translation could not express. These settings are
    restored, except those that an edit of the file concerns.
    """
    release, meaning = dialect.release(version), meaning_of(config)
    world = world_size or world_of(meaning) or config.world_size
    same, sidecar = dialect.name == config.dialect.name, carry
    if carry is None and same:
        renewed = Values(dialect.renew(config.given))
        carry = Carry.of(replace(config, given=renewed), config, meaning)
    if sidecar is not None:
        carry = replace(sidecar, given=sound(sidecar, dialect))
    way = (
        Way(meaning, dialect, release, world, carry)
        if carry and carry.dialect == dialect.name
        else None
    )
    try:
        target = way.best_config() if way else lower_values(meaning, dialect, release, world)
    except ConfigError as error:
        if same:
            raise
        # The problems name settings that the user never wrote.
        refusal = ConfigError(
            *(f"converted to {dialect.title}: {problem}" for problem in error.problems)
        )
        refusal.words = error.words
        raise refusal from None
    if same:
        target = replace(target, opaque=config.opaque, program=config.program)
    # Loss is measured and not declared: the target is lifted again, and written back in the
    # source's own dialect.
    target_meaning = meaning_of(target)
    back = target if same else _back(target_meaning, config)
    sidecar_paths = set[str]()
    if sidecar is not None and sidecar.dialect == dialect.name:
        target_settings = target.given
        sidecar_paths = {
            path
            for path, value in target_settings.items()
            if path in sidecar.given and sidecar.given[path] == value
        }
    as_it_was = way.as_it_was(target_meaning) if way and sidecar else set[str]()
    differences = frozenset(unlike(meaning, target_meaning) - as_it_was)
    trip = _Trip(
        config, meaning, target, target_meaning, back, differences, frozenset(sidecar_paths)
    )
    losses = tuple(_losses(trip))
    losses = tuple(_one_row_each((*losses, *_nameless(trip, losses)), config.given))
    losses += tuple(_find_losses_of_caller(trip))
    openings = _openings(trip, as_it_was, losses)
    rest = way.findings_on_rest(sidecar.given, config, target) if way and sidecar else ()
    without = f"no setting of {dialect.title} stands for this"
    rows = [replace(row, message=row.message or without) for row in (*losses, *openings)]
    told_rows = (plainly(row, meaning.plain, target_meaning.plain) for row in rows)
    findings = (*told_rows, *rest, *_find_live_objects(config, target), *remarks(target))
    _check_plan(meaning)
    return Result(config, target, findings, Carry.of(config, target, target_meaning), trip)


def _check_plan(meaning: Meaning) -> None:
    """Raise a `ConfigError` with every problem if `meaning` is no plan."""
    # A plan is checked by its values, since building its sections takes longer than the translation.
    try:
        for path, value in meaning.items():
            if value is not None:
                PLAN.as_typed(path, value)
    except (KeyError, ValueError):
        Plan.of(meaning)


def _find_losses_of_caller(trip: _Trip) -> Iterator[Finding]:
    """Yield what the target loses of the program that calls the source's stack, but for the settings that this
    stack's own file decides.
    """
    run, caller = trip.config, trip.config.caller
    if caller is not None:
        own = replace(trip, config=caller, back=_back(trip.kept, caller))
        yield from (one for one in _losses(own) if one.given and not is_decided(run, one.path))


def _one_row_each(losses: Iterable[Finding], given: Container[str]) -> Iterator[Finding]:
    """Yield one finding on each of the user's settings, and what is on none of them only for the plan
    fields that no finding on such a setting names.
    """
    rows: dict[str, Finding] = {}
    others = []
    for loss in losses:
        if not loss.given and loss.path not in given:
            others.append(loss)
            continue
        worse, milder = sorted((rows.get(loss.path, loss), loss), key=lambda one: one.effect.rank)
        reasons = dict.fromkeys(filter(None, (worse.message, milder.message)))
        both = tuple(dict.fromkeys((*worse.about, *milder.about)))
        either = worse.given or milder.given
        rows[loss.path] = replace(worse, message="; ".join(reasons), about=both, given=either)
    yield from rows.values()
    for loss in others:
        about = tuple(ours for ours in loss.about if not _names(rows.values(), ours, loss.effect))
        if about or not loss.about:
            yield replace(loss, about=about)


def _names(rows: Iterable[Finding], ours: str, effect: Effect) -> bool:
    """Return whether one of the findings, at least as bad as `effect`, is about the plan field `ours`."""
    return any(ours in row.about and row.effect.reaches(effect) for row in rows)


def plainly(
    loss: Finding, source_values: Mapping[str, Any], target_values: Mapping[str, Any]
) -> Finding:
    """Return a finding whose setting has the same value before and after, or none, or that has the value
    of another field after, with what differs in its place: a plan field with its two values. Without
    one the value stands alone, which the target applies differently.
    """
    section = isinstance(loss.before, Mapping)
    same = loss.before is None or section or loss.before == loss.after
    # A switch is never what a number or a word became.
    same |= loss.after is not None and isinstance(loss.before, bool) != isinstance(loss.after, bool)
    if loss.how in (None, How.DEFAULTED) or loss.change or not same:
        return loss
    fields = [
        ours
        for ours in dict.fromkeys(loss.about)
        if ours != loss.path and source_values.get(ours) != target_values.get(ours)
    ]
    if section and not fields:
        return loss
    turns = [
        f"{ours} {full_text(source_values.get(ours))} -> {full_text(target_values.get(ours))}"
        for ours in fields
    ]
    if loss.before is not None and not section:
        turns.insert(0, show_value(loss.before))
    ours = next(iter(fields), "")
    return replace(
        loss, before=source_values.get(ours), after=target_values.get(ours), change="; ".join(turns)
    )


def full_text(value: Any) -> str:
    """Return a value as text that is never cut: two long values may differ at their ends only."""
    return "not set" if value is None else show_value(value, None)


def _back(target_meaning: Mapping[str, Any], config: Config) -> Config | None:
    """Return `config` after a translation to the target and back, where `target_meaning` is the
    meaning of the target. Return None if the source's stack refuses the result.
    """
    try:
        return lower_values(
            target_meaning,
            config.dialect,
            config.version,
            config.world_size or world_of(target_meaning),
        )
    except BridgeError:
        return None


@dataclass(frozen=True)
class _Trip:
    """One translation: `config`, its meaning `meant`, the `target` with the meaning `kept`, and
    `back`, the target translated back to the dialect of `config`.

    `back` is None if the source's stack refuses that config. `lost` are the plan fields whose
    meaning changed, except fields that a sidecar set back to an earlier state. `restored` are the
    settings of the target that a sidecar restored as the user had written them.
    """

    config: Config
    meant: Meaning
    target: Config
    kept: Meaning
    back: Config | None
    lost: frozenset[str]
    restored: frozenset[str]

    @cached_property
    def silent(self) -> frozenset[str]:
        """The given settings that the source's stack does without."""
        found = remarks(self.config)
        return frozenset(one.path for one in found if one.surprising) & self.config.given.keys()

    def value_after_return(self, path: str) -> Any:
        """Return the effective value at `path` in `back`, or None if there is no `back`."""
        return self.back.effective.get(path) if self.back else None

    def has_arrived(self, rule: Rule, path: str) -> bool:
        """Return whether the target has the whole meaning of a setting, if in other words or units. Such
        a setting is not lost, so its fate is in `Result.fields` and no finding is about it.
        """
        if rule.blurs and rule.blurs(rule.values_in_view(rule.theirs, self.config.effective)):
            return False
        meaning, target_meaning = self.meant.plain, self.kept.plain
        # A setting without fields of its own may tell those of another rule.
        rules = (
            [rule]
            if rule.ours
            else [one for one in self.config.dialect.rules if path in one.carries]
        )
        fields = [ours for one in rules for ours in one.paths_of_plan(path) if ours in meaning]
        return bool(fields) and all(target_meaning.get(ours) == meaning[ours] for ours in fields)

    def has_changed(self, ours: str) -> bool:
        """Return whether the target has another value of a plan field."""
        return self.meant.get(ours) != self.kept.get(ours)

    def all_open(self, fields: tuple[str, ...]) -> bool:
        """Return whether the target leaves all of these plan fields open."""
        return all(self.kept.get(ours) is None for ours in fields)

    def target_value(self, fields: tuple[str, ...], before: Any, otherwise: Any) -> Any:
        """Return the value that the target has for a setting with the plan fields `fields` and the
        value `before`. This is the value of the one field that the target sets. If the target sets
        several of these fields, it is `before` if one has it; else it is `otherwise`.
        """
        values = [self.kept[ours] for ours in fields if self.kept.get(ours) is not None]
        if len(values) == 1:
            return values[0]
        return before if before in values else otherwise


def _losses(trip: _Trip) -> Iterator[Finding]:
    config, back = trip.config, trip.back
    before, after = config.effective.flat(), back.effective.flat() if back else {}
    # Given, but without an effective value: the stack moved the value to another setting. Such a
    # setting is lost if its group is.
    elsewhere = {
        path
        for path, value in config.given.items()
        if value is not None and before.get(path) is None
    }
    theirs = differing(before, after) - elsewhere
    for rule, candidates in _at_stake(config, theirs | elsewhere):
        # A field of one value on both sides means something else there because of another field,
        # and the finding is about that one.
        fields = tuple(ours for ours in rule.ours if ours in trip.lost and trip.has_changed(ours))
        # Fields that the source set explain the loss better than those that only the target set.
        fields = tuple(path for path in fields if path in trip.meant) or fields
        absent = set[str]()
        if fields:
            absent = elsewhere
        elif not rule.ours:
            absent = elsewhere - trip.target.given.keys()
        differences = [path for path in candidates if path in theirs or path in absent]
        if not rule.ours:
            differences = [path for path in differences if not trip.has_arrived(rule, path)]
        if differences:
            yield from _find_losses(trip, rule, differences, fields)


def _at_stake(config: Config, differences: Set[str]) -> Iterator[tuple[Rule, Sequence[str]]]:
    """Yield the rules that claim a path in `differences`, each with the paths to compare. A rule
    with plan fields appears once, with all its paths. A rule without plan fields appears once for
    each given path in `differences`.
    """
    table = claims(config.dialect)
    rule_ids = {id(table[path]) for path in differences if path in table}
    yield from (
        (rule, rule.theirs) for rule in config.dialect.rules if id(rule) in rule_ids and rule.ours
    )
    yield from (
        (table[path], [path])
        for path in config.given
        if path in differences and path in table and not table[path].ours
    )


def _find_losses(
    trip: _Trip, rule: Rule, differences: Sequence[str], fields: tuple[str, ...]
) -> Iterator[Finding]:
    """Yield findings on the paths in `differences`, which one rule has. `fields` are the rule's
    plan fields whose meaning changed.
    """
    config, back, finding_fields, finding_paths = trip.config, trip.back, set[str](), set[str]()
    if not fields and not any(path in config.given for path in differences):
        return
    view = rule.values_in_view(rule.theirs, config.effective) if rule.blurs else {}
    blur = rule.blurs is not None and rule.blurs(view)
    unheld = blur and _holds_nothing(rule, trip.meant)
    effect = _weight(rule, fields, blur, config, trip.target)
    if not rule.ours and any(_is_ignored(config, path) for path in differences):
        effect = Effect.NONE
    for path in sorted(differences, key=lambda path: path not in config.given):
        before, after, explicit = (
            config.effective.get(path, config.given.get(path)),
            trip.value_after_return(path),
            path in config.given,
        )
        # What a setting says is not lost if the source's stack does without it.
        says = not rule.ours or path not in trip.silent
        mine = tuple(ours for ours in fields if says and ours in rule.paths_of_plan(path))
        whole = (
            rule.becomes is not None
            and not mine
            and not rule.becomes(path, rule.values_in_view(rule.theirs, config.effective))
        )
        if not explicit and (
            not fields
            or not effect.reaches(Effect.NUMBERS)
            or _is_reported_elsewhere(trip, path, mine, finding_fields)
        ):
            continue
        how = _fate(
            rule,
            path,
            mine,
            says and blur and not whole,
            says and (unheld or (bool(mine) and trip.all_open(rule.paths_of_plan(path)))),
        )
        if how is How.DERIVED and trip.has_arrived(rule, path):
            continue
        # The way back may use another setting; then the plan field has the value to show.
        moved_away = after is None if mine else not (back and path in back.given)
        if how is not How.DROPPED and moved_away:
            after = trip.target_value(mine or rule.paths_of_plan(path), before, after)
        subject = path
        if not explicit:
            # The user knows the setting that was written and not the one that follows from it.
            carriers = (carrier for ours in mine for carrier in rule.carriers(ours))
            told = config.given.keys() - trip.silent
            subject = next((carrier for carrier in carriers if carrier in told), path)
        if not back and subject not in config.given and trip.all_open(rule.paths_of_plan(path)):
            # A default that the target leaves open comes back as it is; without a config to compare
            # with, every default looks lost.
            continue
        if subject not in config.given and mine and not any(ours in trip.meant for ours in mine):
            continue  # `_openings` reports what the source leaves open
        if subject in finding_paths or (subject != path and subject in differences):
            continue  # the setting that the user wrote has a finding of its own
        if subject != path:
            before, after = config.effective.get(subject), trip.value_after_return(subject)
        weight = Effect.NONE if how is How.DERIVED else effect
        reason = _reason_of(rule, how, mine, trip, view, blur, says and unheld)
        finding_fields.update(mine)
        finding_paths.add(subject)
        change = ""
        if rule.becomes and how is not How.DERIVED and not mine:
            change = rule.becomes(subject, rule.values_in_view(rule.theirs, config.effective))
        finding = Finding(
            subject,
            reason,
            weight,
            explicit,
            how,
            before,
            after,
            config.origins.get(subject),
            change=change,
            about=mine,
        )
        yield from _in_parts(trip, rule, fields, finding)


def _holds_nothing(rule: Rule, meaning: Meaning) -> bool:
    """Return whether a plan leaves all fields of a rule open."""
    return not any(ours in meaning for ours in rule.ours)


def _is_reported_elsewhere(
    trip: _Trip, path: str, mine: tuple[str, ...], finding_fields: set[str]
) -> bool:
    """Return whether another finding reports the loss of the plan fields `mine`, which belong to a
    setting that the user did not write.

    If two settings stand for one field, the finding on the first setting reports it. `_openings`
    reports fields that the source leaves open, with the target's defaults, and `_nameless` reports
    facts of a model family.
    """
    if mine and finding_fields.issuperset(mine):
        return True
    if trip.config.effective.get(path) is not None:
        return False
    facts = (
        trip.target.dialect.model and bool(mine) and all(ours.startswith("model.") for ours in mine)
    )
    return facts or not any(ours in trip.meant for ours in mine)


def _in_parts(
    trip: _Trip, rule: Rule, fields: tuple[str, ...], whole: Finding
) -> Iterator[Finding]:
    """Split a finding on a section. Yield one finding for each setting of the section that changed,
    and one for the plan fields that these findings do not cover.

    A finding that is not on a section is yielded as it is.
    """
    config, section = trip.config, trip.value_after_return(whole.path)
    parts = settings(config, rule, whole.path, section)
    unread = _unread_text(config, rule, whole.path, parts)
    if not parts and not unread:
        yield whole
        return
    if unread:
        yield replace(
            whole, message=unread, before=None, after=None, change="kept in part", about=()
        )
    values = dict(values_in_section(section))
    for part in parts:
        mine = tuple(ours for ours in fields if ours in part.stands)
        how = _fate_of(rule, part, mine, trip)
        weight = Effect.NONE if how is How.DERIVED else _worth(trip, rule, whole, part, mine)
        after = (
            None
            if how is How.DROPPED
            else trip.target_value(mine or tuple(part.stands), part.value, values.get(part.keys))
        )
        text = rule.tells(part.alone) if part.behind and rule.tells else ""
        reason = "; ".join(filter(None, (text, _reason(rule, how, mine, trip.target))))
        yield Finding(
            part.path,
            reason,
            weight,
            True,
            how,
            part.value,
            after,
            config.origins.get(part.path, whole.origin),
            about=mine,
        )
    rest = tuple(
        ours
        for ours in fields
        if not ours.startswith("model.") and not any(ours in part.stands for part in parts)
    )
    effect = rule.effect_of_losing(rest, config.effective)
    if rest and rule.ours and effect.reaches(Effect.NUMBERS):
        reason = _reason(rule, How.APPROXIMATE, rest, trip.target)
        yield Finding(
            whole.path, reason, effect, False, How.APPROXIMATE, None, None, whole.origin, about=rest
        )


def _unread_text(config: Config, rule: Rule, path: str, parts: Sequence[SectionSetting]) -> str:
    """Return what a plan does not hold of the section at `path`, in words; an empty string if it is in
    the `parts` alone, or if this is no section.
    """
    section = config.given.get(path)
    if rule.tells is None or rule.blurs is None or not isinstance(section, Mapping):
        return ""
    behind = {part.keys for part in parts if part.behind}
    rest = {keys: value for keys, value in values_in_section(section) if keys not in behind}
    view = rule.values_in_view(rule.theirs, config.effective)
    return rule.tells(view) if rule.blurs({**view, path: nested(rest)}) else ""


def _fate_of(rule: Rule, part: SectionSetting, mine: tuple[str, ...], trip: _Trip) -> How:
    if mine:
        return How.DROPPED if trip.all_open(mine) else How.APPROXIMATE
    return How.DROPPED if part.behind or not rule.ours else How.DERIVED


def _worth(
    trip: _Trip, rule: Rule, whole: Finding, part: SectionSetting, mine: tuple[str, ...]
) -> Effect:
    """Return the effect of losing a setting of a section on the run: the effect of losing the
    setting's plan fields or the effect of losing the setting's own value, whichever is worse.
    """
    effects = []
    if mine:
        effects.append(_weight(rule, mine, False, trip.config, trip.target))
    if part.behind or not mine:
        effects.append(worth(rule, whole.effect, part))
    return worst(effects)


def _weight(
    rule: Rule, fields: tuple[str, ...], blur: bool, config: Config, target: Config
) -> Effect:
    """Return the effect of losing the plan fields `fields` on the run. If `blur`, this includes
    the loss of values of the group that no plan can hold.
    """
    # A target without a model in its config loses nothing about it: the script brings the model.
    inside = (
        rule.model is None and bool(fields) and all(path.startswith("model.") for path in fields)
    )
    if (rule.about_model or inside) and not target.dialect.model:
        beside = tuple(path for path in fields if not path.startswith("model."))
        return (
            rule.effect_of_losing(beside, config.effective)
            if rule.mixed and beside
            else Effect.NONE
        )
    # Without the setting, a stack's other release does something else, as with another value.
    same = not rule.ours and config.dialect is target.dialect
    effect = (rule.other if same else None) or rule.effect_of_losing(fields, config.effective)
    return worst((effect, rule.effect_of(config.effective))) if blur else effect


def _nameless(trip: _Trip, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a finding for each fact about the model that is lost and that no setting's finding
    reports, such as a property of a whole model family.

    Facts that are lost for the same reason make one finding.
    """
    config, meaning, target_meaning, target = trip.config, trip.meant, trip.kept, trip.target
    table, finding_paths = (
        plan_claims(config.dialect),
        {finding.path for finding in findings if finding.effect.reaches(Effect.NUMBERS)},
    )
    # A row on a whole section is about the fields that it names.
    finding_paths = {
        path for path in finding_paths if not isinstance(config.given.get(path), Mapping)
    }
    named = [finding for finding in findings if finding.path not in finding_paths]
    differences = trip.lost & meaning.keys() if target.dialect.model else ()
    yield from _otherwise(trip, finding_paths)
    yield from _find_other_meanings(trip, {finding.path for finding in findings})
    open_: dict[str, list[str]] = {}
    for ours in sorted(path for path in differences if path.startswith("model.")):
        rule = table[ours]
        effect = rule.effect_of_losing((ours,), config.effective)
        if not trip.has_changed(ours):
            continue  # another field changes what this one means, and has the finding
        in_rows = is_told(config, rule, ours, finding_paths) or _names(named, ours, effect)
        if effect.reaches(Effect.NUMBERS) and not in_rows:
            reason = _reason(rule, How.DROPPED, (ours,), target)
            if target_meaning.get(ours) is None:
                open_.setdefault(reason, []).append(ours)
            else:
                yield Finding(
                    ours,
                    reason,
                    effect,
                    False,
                    How.APPROXIMATE,
                    meaning[ours],
                    target_meaning[ours],
                    about=(ours,),
                )
    for reason, fields in open_.items():
        before = {path.removeprefix("model."): meaning[path] for path in fields}
        path = fields[0] if len(fields) == 1 else "model"
        yield Finding(
            path,
            reason,
            Effect.NUMBERS,
            False,
            How.DROPPED,
            before if len(fields) > 1 else meaning[path],
            about=tuple(fields),
        )


def _otherwise(trip: _Trip, finding_paths: set[str]) -> Iterator[Finding]:
    """Yield a finding for each plan field in `ALWAYS` that differs in the target although all
    settings have equal values.
    """
    config, meaning, target_meaning, target = trip.config, trip.meant, trip.kept, trip.target
    for ours in ALWAYS:
        differs = meaning.plain.get(ours) is not None and ours in trip.lost
        if not differs or target_meaning.plain.get(ours) in (None, meaning[ours]):
            continue
        rule = plan_claims(config.dialect)[ours]
        effect, carriers = rule.effect_of_losing((ours,), config.effective), rule.carriers(ours)
        if ours.startswith(rules.HABITS) and (rule.ours != (ours,) or not rule.theirs):
            # No setting says it, or a section that says much else.
            in_remarks = has_remark(config, ours, effect) or has_remark(target, ours, effect)
            in_rows = is_told_by_setting(config, ours) or is_told_by_setting(target, ours)
            if effect is Effect.NONE or in_remarks or in_rows:
                continue
            carriers = ()
        path = next(iter((*(rule.theirs if carriers else ()), *carriers)), ours)
        path = ours if path in trip.silent else path
        before = config.effective.get(path) if path != ours and rule.theirs else meaning[ours]
        if finding_paths.isdisjoint({path, *carriers}):
            reason = _reason(rule, How.APPROXIMATE, (ours,), target)
            yield Finding(
                path,
                reason,
                effect,
                False,
                How.APPROXIMATE,
                before,
                target_meaning.get(ours),
                config.origins.get(path),
                about=(ours,),
            )


def is_told_by_setting(config: Config, ours: str) -> bool:
    """Return whether a habit goes with a given setting that no plan holds whole: the row of this setting
    says what the stack does.
    """
    rule, table = plan_claims(config.dialect).get(ours), claims(config.dialect)
    if rule is None or rule.theirs or not ours.startswith(rules.HABITS):
        return False
    given = [table[path] for path in rule.carriers(ours) if path in config.given]
    return bool(given) and all(
        one.blurs is not None and one.blurs(one.values_in_view(one.theirs, config.effective))
        for one in given
    )


def _find_other_meanings(trip: _Trip, finding_paths: set[str]) -> Iterator[Finding]:
    """Yield a finding for each setting that has another meaning in the target, or none, although a
    translation back restores the setting's value, because it is the default of the source's stack.
    """
    config, meaning, target_meaning = trip.config, trip.meant.plain, trip.kept.plain
    for ours in sorted(trip.lost.difference(ALWAYS)):
        if meaning.get(ours) is None:
            continue
        rule = plan_claims(config.dialect).get(ours)
        if rule is None or rule.about_model or is_told(config, rule, ours, finding_paths):
            continue
        carriers, absent = rule.carriers(ours), target_meaning.get(ours) is None
        # Of several settings, the one that says most about this field alone.
        told = (path for path in carriers if path in config.given)
        path = min(told, key=lambda path: len(rule.paths_of_plan(path)), default="")
        effect = rule.effect_of_losing((ours,), config.effective)
        least = Effect.NUMBERS if absent else Effect.COST
        if not path and writes(trip.target, ours):
            path = in_words(ours)
        if path and effect.reaches(least) and not has_remark(trip.target, ours, effect):
            finding_paths.add(path)
            reason = _reason(rule, How.APPROXIMATE, (ours,), trip.target)
            yield Finding(
                path,
                reason,
                effect,
                False,
                How.DROPPED if absent else How.APPROXIMATE,
                config.effective.get(path, meaning[ours]),
                target_meaning.get(ours),
                config.origins.get(path),
                about=(ours,),
            )


def writes(config: Config, ours: str) -> bool:
    """Return whether a given setting stands for the plan field `ours`."""
    rule = plan_claims(config.dialect).get(ours)
    return rule is not None and not config.given.keys().isdisjoint(rule.carriers(ours))


def has_remark(target: Config, ours: str, effect: Effect) -> bool:
    """Return whether the target has a finding, at least as bad as `effect`, on a setting that
    stands for the plan field `ours`.
    """
    rule = plan_claims(target.dialect).get(ours)
    paths = rule.carriers(ours) if rule else ()
    return any(remark.path in paths and remark.effect.reaches(effect) for remark in remarks(target))


def _fate(rule: Rule, path: str, fields: tuple[str, ...], blur: bool, absent: bool) -> How:
    if not rule.paths_of_plan(path) or absent:
        return How.DROPPED
    if fields:
        return How.APPROXIMATE
    return How.APPROXIMATE if blur else How.DERIVED


def _reason_of(
    rule: Rule,
    how: How,
    fields: tuple[str, ...],
    trip: _Trip,
    view: Mapping[str, Any],
    blur: bool,
    unheld: bool,
) -> str:
    """Return a text that says why a setting is lost: first the reason why a plan cannot hold it. If
    a plan can hold a part of the setting, the reason why the target cannot hold this part is added.
    """
    text = rule.tells(view) if blur and rule.tells else ""
    if unheld:
        return text or rule.lossy or rule.note
    if fields and not any(ours in trip.meant for ours in fields):
        opened = f"no plan holds what this setting does here, so {trip.target.dialect.title} uses its own default"
        return "; ".join(filter(None, (text, opened)))
    return "; ".join(filter(None, (text, _reason(rule, how, fields, trip.target))))


def _reason(rule: Rule, how: How, fields: tuple[str, ...], target: Config) -> str:
    if how is How.DERIVED:
        return "both configs mean the same here, or the setting has no effect in this run"
    if not fields and how is How.DROPPED:
        return rule.note
    others = plan_claims(target.dialect)
    reasons = dict.fromkeys(others[path].why(path) for path in fields if path in others)
    return (
        "; ".join(reason for reason in reasons if reason)
        or rule.lossy
        or rule.note
        or "both configs mean the same here"
    )


def _find_live_objects(config: Config, target: Config) -> Iterator[Finding]:
    """Yield a finding for each live Python object in the config. Only the config class of the
    source's stack can hold such objects.
    """
    for path in sorted(config.opaque.keys() - target.opaque.keys()):
        message = (
            f"the value is a live Python object, which a config of {target.dialect.title} cannot hold; create "
            "the object in the training script"
        )
        yield Finding(
            path,
            message,
            Effect.NUMBERS,
            True,
            How.DROPPED,
            config.opaque[path],
            origin=config.origins.get(path),
        )


def _openings(trip: _Trip, as_it_was: Set[str], losses: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a finding for each field that the source leaves open, for which the target's stack has
    its own default, and which none of the `losses` names.
    """
    config, meaning, target_meaning, target = trip.config, trip.meant, trip.kept, trip.target
    mine, theirs, source_values, target_values = (
        plan_claims(config.dialect),
        plan_claims(target.dialect),
        meaning.plain,
        target_meaning.plain,
    )
    openings: dict[tuple[str, str], list[str]] = {}
    for ours, value in target_meaning.items():
        if (
            ours in source_values
            or ours in meaning
            or ours in as_it_was
            or ours not in target_values
            or ours not in mine
            or not _is_set_by(ours, config.dialect, target.dialect)
        ):
            continue
        rule = theirs[ours]
        effect = rule.effect_of_losing((ours,), target.effective)
        if not effect.reaches(Effect.NUMBERS) or _names(losses, ours, effect):
            continue
        if not trip.restored.isdisjoint(rule.carriers(ours)):
            continue  # nobody's default: it is as it was before the file was converted
        path, value = _setting_for(target, ours, value)
        openings.setdefault((path, repr(value)), []).append(ours)
    for (path, text), fields in openings.items():
        effects = (theirs[ours].effect_of_losing((ours,), target.effective) for ours in fields)
        loss = next(
            (mine[ours] for ours in fields if untranslated(config, meaning, mine[ours])), None
        )
        why = f"{config.dialect.name} leaves {', '.join(fields)} open"
        cause = f"{config.dialect.title} leaves the value open; {target.dialect.title} uses its own default"
        if loss is not None:
            # The same words as in the finding on the setting itself: it is one cause.
            why = cause = told_of(loss, config)
        message = f"{why}; {target.dialect.name} uses {text} by default"
        effect = worst(effects)
        after = target_meaning[fields[0]] if path in fields else target.effective.get(path)
        yield Finding(
            path,
            message,
            effect,
            False,
            How.DEFAULTED,
            None,
            after,
            cause=cause,
            about=tuple(fields),
        )


def _setting_for(target: Config, ours: str, value: Any) -> tuple[str, Any]:
    """Return the setting of the target that tells the value of a plan field, and the setting's
    value. Without such a setting, return the plan field with `value`.
    """
    rule = plan_claims(target.dialect)[ours]
    paths = [path for path in rule.carriers(ours) if target.effective.get(path) is not None]
    # A setting with this very value that stands for the field alone, else one that says most about
    # this field alone. A section is no setting.
    alone = (path for path in paths if path in rule.carries or rule.ours == (ours,))
    same = (path for path in alone if repr(target.effective[path]) == repr(value))
    plain = (path for path in paths if not isinstance(target.effective[path], Mapping))
    best = min(plain, key=lambda path: len(rule.paths_of_plan(path)), default=ours)
    path = next(same, best)
    return path, target.effective.get(path, value)


def told_of(rule: Rule, config: Config) -> str:
    """Return what no plan holds of a rule's values in `config`, in words."""
    view = rule.values_in_view(rule.theirs, config.effective)
    return (rule.tells(view) if rule.tells else "") or rule.lossy or rule.note


def untranslated(config: Config, meaning: Meaning, rule: Rule) -> str:
    """Return the given setting of a rule that a plan cannot hold at all, or an empty string if the
    plan holds some of it.
    """
    if (
        rule.blurs is None
        or not _holds_nothing(rule, meaning)
        or not rule.blurs(rule.values_in_view(rule.theirs, config.effective))
    ):
        return ""
    return next((path for path in rule.theirs if path in config.given), "")


def _is_set_by(ours: str, dialect: StackTables, target: StackTables) -> bool:
    """Return whether a config of `dialect` sets the plan field `ours`. If not, the training script
    sets the field, and a translation cannot lose it.

    Training scripts set the fields below `run.`, the habits that a stack does not have, and the
    model fields if the dialect's configs define no model. Some dialects are about one section of the plan only.
    """
    # The length of a sequence is part of the batch if the target's config is the whole run.
    if ours == SEQUENCE and target.model:
        return True
    if ours.startswith(rules.HABITS):
        return False
    script_sections = ("run.",) if dialect.model else ("run.", "model.")
    return ours.startswith(dialect.about) and not ours.startswith(script_sections)


def _reports(trip: _Trip) -> Iterator[FieldReport]:
    config, meaning, target, sidecar_paths = trip.config, trip.meant, trip.target, trip.restored
    sources, table, source_values, target_values = (
        plan_claims(config.dialect),
        claims(target.dialect),
        meaning.plain,
        trip.kept.plain,
    )
    for path, value in target.given.items():
        rule = table[path]
        ours = tuple(name for name in rule.paths_of_plan(path) if name in meaning)
        origins: tuple[str, ...] = ()
        for name in ours:
            if source := sources.get(name):
                origins += tuple(
                    one
                    for one in source.carriers(name)
                    if one in config.given and one not in origins
                )
        differs = any(
            name in source_values and source_values[name] != target_values.get(name)
            for name in ours
        )
        how = (
            How.EXACT
            if path in sidecar_paths and not origins
            else _came(rule, path, ours, origins, differs)
        )
        origins = origins or ((CARRIED,) if path in sidecar_paths or not rule.ours else ())
        effect = rule.effect_of(target.effective)
        note, default_of = (
            rule.lossy if differs else rule.note,
            (config if ours else target).dialect.name,
        )
        yield FieldReport(path, value, origins, how, effect, note, "" if origins else default_of)


def _came(
    rule: Rule, path: str, ours: tuple[str, ...], origins: tuple[str, ...], differs: bool
) -> How:
    if differs:
        return How.APPROXIMATE
    if not rule.ours:
        return How.EXACT
    if not origins:
        return How.DEFAULTED
    # A habit has no setting of its own: the setting that it goes with stands for it and for its own
    # field.
    ours = tuple(name for name in ours if name not in HABITS)
    alone = len(ours) == len(origins) == 1 and rule.carriers(ours[0]) == (path,)
    return How.EXACT if alone else How.DERIVED
