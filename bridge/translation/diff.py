"""Differences in the meaning of two configs, of one stack or of two, each with its effect on the
run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from bridge.errors import BridgeError
from bridge.plan.free_sections import SectionSetting, settings, values_in_section, worth
from bridge.plan.plan import in_words
from bridge.plan.section import Values
from bridge.stack.dialect import Config
from bridge.stack.effects import worst
from bridge.stack.findings import DIFFERENCE, Finding
from bridge.stack.rules import HABITS, Effect, How, Rule
from bridge.translation.callers import is_decided
from bridge.translation.lift import Meaning, claims, differing, meaning_of, plan_claims, unlike
from bridge.translation.rank_changes import effect_of_ranks
from bridge.translation.translate import (
    full_text,
    has_remark,
    is_told_by_setting,
    plainly,
    remarks,
    told_of,
    translate,
    unheld,
    untranslated,
    writes,
)

TRIED = 60
"""Maximum number of settings that are tried one by one, to find what a difference follows from."""
SOURCES = 6
"""Maximum number of settings that a row names as those from which it follows."""
SCRIPTED = ("model.", "run."), ("run.",)
"""Prefixes of plan fields that the training script sets where no file does: if the stack's config
defines no model, and if it does.
"""


@dataclass(frozen=True)
class ConfigPair:
    """Two configs with their meanings, and the plan fields in which the meanings differ."""

    one: Config
    other: Config
    meant: Meaning
    kept: Meaning
    strayed: frozenset[str]

    @cached_property
    def sources(self) -> Mapping[str, tuple[str, ...]]:
        """The settings from which a difference in a plan field follows: one of the configs loses the
        difference, or gets another one, if it takes such a setting from the other.
        """
        causes: dict[str, list[str]] = {}
        # Each setting costs one reading of a whole config.
        for path in self.changed[:TRIED]:
            for config, values, meaning in (
                (self.one, self.other.given, self.meant),
                (self.other, self.one.given, self.kept),
            ):
                substitute = {path: values[path]} if path in values else {}
                rest = {other: value for other, value in config.given.items() if other != path}
                try:
                    fields = unlike(
                        meaning, meaning_of(replace(config, given=Values({**rest, **substitute})))
                    )
                except BridgeError:
                    continue  # the stack refuses this mixture: the other one may run
                for ours in fields:
                    causes.setdefault(ours, []).append(path)
                break
        return {ours: tuple(paths) for ours, paths in causes.items()}

    @cached_property
    def changed(self) -> tuple[str, ...]:
        """The settings that the two configs give differently."""
        return tuple(sorted(differing(self.one.given, self.other.given)))

    def follows(self, ours: str) -> str:
        """Return a sentence that names the settings from which a difference in a plan field follows."""
        if not self.changed:
            return (
                "this follows from the number of ranks"
                if self.one.world_size != self.other.world_size
                else ""
            )
        paths = self.sources.get(ours) or self.changed
        more = f" and {len(paths) - SOURCES} other settings" if len(paths) > SOURCES else ""
        return f"this follows from {', '.join(paths[:SOURCES])}{more}"

    def meaning(self, config: Config) -> Meaning:
        """Return the meaning of one of the two configs."""
        return self.meant if config is self.one else self.kept

    def alone(self, config: Config) -> str:
        """Return words that tell one of the two configs from the other."""
        if self.one.dialect.name != self.other.dialect.name:
            return f"in {config.dialect.title} alone"
        return f"in the {'first' if config is self.one else 'second'} file alone"

    @property
    def uneven(self) -> bool:
        """Whether a setting of one of the configs leaves some tokens out of the loss."""
        sides = (self.one, self.other)
        return any(side.effective.get(path) for side in sides for path in side.dialect.masking)

    def by_ranks(self, fields: tuple[str, ...]) -> tuple[Effect, str] | None:
        """Return the effect of a difference in plan fields that the arrangement of ranks decides,
        with the reason, or None if it does not decide the effect of all of them.
        """
        sides = self.meant.plain, self.kept.plain
        verdicts = [effect_of_ranks(ours, *sides, self.uneven) for ours in fields]
        effects = [effect for effect in verdicts if effect is not None]
        if not effects or len(effects) < len(verdicts):
            return None
        return min(effects, key=lambda effect: effect[0].rank)

    @classmethod
    def of(cls, one: Config, other: Config) -> ConfigPair:
        """The pair of the two configs; raises `BridgeError` if a stack refuses one of them."""
        meaning, other_meaning = meaning_of(one), meaning_of(other)
        return cls(one, other, meaning, other_meaning, frozenset(unlike(meaning, other_meaning)))


def compare(one: Config, other: Config) -> tuple[Finding, ...]:
    """A finding for each difference from `one` to `other`. `before` is the value in `one`, `after`
    is the value in `other`, and the line is a line of `other`.

    Raises `BridgeError` if a stack refuses its config.
    """
    pair = ConfigPair.of(one, other)
    rows = [*(_settings(pair) if one.dialect.name == other.dialect.name else _apart(pair))]
    if one.caller and other.caller:
        rows += (
            row for row in compare(one.caller, other.caller) if not is_decided(other, row.path)
        )
    return (*_add_rule_findings(pair, [*rows, *_find_world_difference(pair)]), *_unknown(pair))


def _unknown(pair: ConfigPair) -> Iterator[Finding]:
    """Yield a finding for each setting that nobody knows and that only one of the configs has, or that
    has another value there. Two configs of one stack with the same such setting agree in it, whatever
    it does. What belongs to the program of a launch counts between two launches alone.
    """
    one, other = _unread(pair.one), _unread(pair.other)
    alike = pair.one.dialect.name == pair.other.dialect.name
    launches = all(
        any(it.effect is Effect.NONE for it, *_ in side.values()) for side in (one, other)
    )
    for path in {**one, **other}:
        sides = one.get(path, []), other.get(path, [])
        before, after = (
            ", ".join(it.change or "given" for it in side) or "not set" for side in sides
        )
        if not alike or before != after:
            origin = sides[1][0].origin if sides[1] else None
            change, rule = f"{before} -> {after}", f"{DIFFERENCE}/unknown"
            row = replace((*sides[1], *sides[0])[0], change=change, origin=origin, rule=rule)
            yield replace(row, effect=Effect.NUMBERS) if alike and launches else row


def _unread(config: Config) -> dict[str, list[Finding]]:
    """Return the findings on settings of `config` that nobody knows, by path."""
    findings: dict[str, list[Finding]] = {}
    for finding in config.remarks:
        if finding.unknown:
            findings.setdefault(finding.path, []).append(finding)
    return findings


def _add_rule_findings(pair: ConfigPair, rows: list[Finding]) -> Iterator[Finding]:
    """Yield `rows`, and what the rules of both stacks have to add: a difference is never milder
    than the loss in a translation of one of the configs to the stack of the other. Rows about the
    same setting or plan fields are joined.
    """
    # In an order of their own, so that the other way round the same rows are joined.
    sides = sorted((pair.one, pair.other), key=lambda config: config.dialect.name)
    for source, target in (sides, sides[::-1]):
        for loss in _losses(pair, source, target):
            about = [at for at, row in enumerate(rows) if _concerns(row, loss)]
            for at in about:
                # Two commands give one reason, unless it is only that a default applies.
                better = bool(loss.message) and loss.how is not How.DEFAULTED
                if rows[at].effect.rank > loss.effect.rank or (
                    better and rows[at].effect is loss.effect
                ):
                    rows[at] = replace(rows[at], effect=loss.effect, message=loss.message)
            in_remarks = bool(loss.about) and _is_remarked(pair, loss.effect, loss.about)
            if not in_remarks and all(rows[at].effect is not loss.effect for at in about):
                rows.append(_as_difference(pair, loss, source))
    yield from rows
    yield from _find_remarks(pair)


def _losses(pair: ConfigPair, source: Config, target: Config) -> Iterator[Finding]:
    """Yield the losses in a translation of `source` to the stack of `target` that hold for `target`
    too: what no plan can hold, and what differs in the plans.
    """
    try:
        result = translate(source, target.dialect, target.version, target.world_size)
    except BridgeError:
        return  # the other stack has no such run: the plans tell the differences
    same = source.dialect.name == target.dialect.name
    usual, values = result.trip.kept.plain, pair.meaning(target).plain
    for loss in result.findings:
        if loss.how is None or loss.how is How.MISSING or loss.effect is Effect.NONE:
            continue
        # Another value that the other config gives is no default.
        if loss.how is How.DEFAULTED and all(
            writes(target, ours) and values.get(ours) != usual.get(ours) for ours in loss.about
        ):
            continue
        # A part of a section is none of the paths: that the other release lacks it is a loss.
        agrees = same and loss.path in source.given and loss.path in target.given
        agrees = agrees and source.given[loss.path] == target.given[loss.path]
        if not pair.strayed.isdisjoint(loss.about) if loss.about else not agrees:
            # The other config need not have the default of its stack.
            open_ = f"{source.dialect.title} leaves the value open"
            yield replace(loss, message=open_) if loss.how is How.DEFAULTED else loss


def _concerns(row: Finding, loss: Finding) -> bool:
    """Return whether a row reports on the plan fields of a loss, or on its setting if it is about none."""
    if loss.about and row.about:
        return not {*row.about}.isdisjoint(loss.about)
    return loss.path in (row.path, *row.about)


def _as_difference(pair: ConfigPair, loss: Finding, source: Config) -> Finding:
    """Return a loss in a translation of `source` as a difference between the two configs."""
    back = source is pair.other
    values = (pair.meant if back else pair.kept).plain
    rule = claims(source.dialect).get(loss.path)
    # What the translation made of the value is not what the user's other config has.
    fields = loss.about or (rule.paths_of_plan(loss.path) if rule else ())
    others = [values[ours] for ours in fields if ours in values]
    other = others[0] if len(others) == 1 else None
    before, after = (other, loss.before) if back else (loss.before, other)
    alone = f"{full_text(loss.before)}, {pair.alone(source)}"
    transition = "" if before == after else f"{full_text(before)} -> {full_text(after)}"
    change = alone if other is None else transition
    row = replace(
        loss,
        how=How.APPROXIMATE,
        before=before,
        after=after,
        origin=loss.origin if back else None,
        rule=f"{DIFFERENCE}/{loss.path}",
        change=loss.change or change,
        cause="",
    )
    return plainly(row, pair.meant.plain, pair.kept.plain)


def _find_remarks(pair: ConfigPair) -> Iterator[Finding]:
    """Yield the remarks of a stack on one of the configs that do not hold for the other. That a
    stack does something else than a setting says is no difference between two runs of the stack.
    """
    alike = pair.one.dialect.name == pair.other.dialect.name
    remark_ids = [
        {(config.dialect.name, remark.id) for remark in remarks(config)}
        for config in (pair.one, pair.other)
    ]
    for config, others in ((pair.one, remark_ids[1]), (pair.other, remark_ids[0])):
        for remark in remarks(config):
            if remark.unknown or remark.effect is Effect.NONE:
                continue
            if (config.dialect.name, remark.id) not in others:
                origin = remark.origin if config is pair.other else None
                alone = f"{full_text(config.given.get(remark.path))}, {pair.alone(config)}"
                yield replace(
                    remark,
                    effect=Effect.NONE if alike and remark.surprising else remark.effect,
                    how=None,
                    origin=origin,
                    rule=f"{DIFFERENCE}/{remark.id}",
                    change=alone,
                )


def _find_world_difference(pair: ConfigPair) -> Iterator[Finding]:
    """Yield a finding if the two configs have different numbers of ranks and no plan field shows
    it.
    """
    one, other = pair.one.world_size, pair.other.world_size
    if one and other and one != other and "parallel.data" not in pair.strayed:
        message = "the number of ranks differs, but a step has the same number of sequences"
        yield Finding(
            "world_size",
            message,
            Effect.ROUNDING,
            False,
            How.APPROXIMATE,
            one,
            other,
            rule=f"{DIFFERENCE}/world_size",
        )


def _settings(pair: ConfigPair) -> Iterator[Finding]:
    """Differences between two configs of one stack, setting by setting."""
    one, other = pair.one, pair.other
    table, before, after = claims(one.dialect), one.effective.flat(), other.effective.flat()
    explicit_paths = one.given.keys() | other.given.keys()
    paths, finding_fields = differing(before, after), set[str]()
    # Written settings come first: one that nobody wrote differs because of them, and is left out if
    # they tell the same fields.
    for path in sorted(paths, key=lambda path: (path not in explicit_paths, path)):
        rule = table.get(path)
        if rule is None:
            continue
        fields = tuple(ours for ours in rule.paths_of_plan(path) if ours in pair.strayed)
        if path not in explicit_paths and (not fields or finding_fields.issuperset(fields)):
            continue
        finding_fields.update(fields)
        why = "; ".join(
            dict.fromkeys(_rounding_text(pair.one, path) + _rounding_text(pair.other, path))
        )
        lossy_configs = [config for config in (pair.one, pair.other) if _blurs(config, path)]
        if rule.ours and not fields and not why and lossy_configs:
            why = told_of(rule, lossy_configs[0])
        elif path in rule.kernels and not fields:
            why = "another kernel for the same computation"
        elif rule.ours and not fields and not why:
            why = "both configs mean the same here, or the setting has no effect in this run"
        effect, why = pair.by_ranks(fields) or (_weight(pair, rule.ours, fields, path), why)
        whole = replace(
            _finding(path, effect, why, before.get(path), after.get(path), pair), about=fields
        )
        yield from _in_parts(pair, rule, whole, fields)
    yield from _untold(pair, finding_fields)


def _in_parts(
    pair: ConfigPair, rule: Rule, whole: Finding, fields: tuple[str, ...]
) -> Iterator[Finding]:
    """Yield one finding for each setting that differs in a section, with its own line. A finding
    that is not on a section is yielded as it is.
    """
    one, other = pair.one.given.get(whole.path), pair.other.given.get(whole.path)
    parts = (
        *settings(pair.one, rule, whole.path, other),
        *settings(pair.other, rule, whole.path, one),
    )
    if not parts:
        yield whole
        return
    effects: dict[str, Effect] = {}
    for part in parts:
        effect = min(
            _worth_of(rule, whole, part, fields), effects.get(part.path, Effect.NONE), key=_rank
        )
        effects[part.path] = effect
    # Settings may matter only together: then each of them has the effect of the section.
    apart = min(effects.values(), key=_rank) is whole.effect
    before, after = dict(values_in_section(one or {})), dict(values_in_section(other or {}))
    for part in {part.path: part for part in parts}.values():
        row = _finding(
            part.path,
            effects[part.path] if apart else whole.effect,
            whole.message,
            before.get(part.keys),
            after.get(part.keys),
            pair,
        )
        yield replace(row, given=True, rule=whole.rule, about=whole.about)


def _worth_of(rule: Rule, whole: Finding, part: SectionSetting, fields: tuple[str, ...]) -> Effect:
    mine = tuple(ours for ours in fields if ours in part.stands)
    if mine:
        return rule.effect_of_losing(mine, part.alone)
    return Effect.NONE if rule.ours and not part.behind else worth(rule, whole.effect, part)


def _rank(effect: Effect) -> int:
    return effect.rank


def _weight(pair: ConfigPair, ours: tuple[str, ...], fields: tuple[str, ...], path: str) -> Effect:
    """Return the effect on the run of a setting that differs between the two configs. Each config
    has an effect of losing the setting. Unless the rule states the effect of another value, the
    worse of these two effects is returned.
    """
    lossless = not any(
        _rounding_text(config, path) or _blurs(config, path) for config in (pair.one, pair.other)
    )
    rule = claims(pair.one.dialect)[path]
    if ours and not fields and lossless:
        return Effect.ROUNDING if path in rule.kernels else Effect.NONE
    if rule.other:
        return rule.other
    effects = (rule.effect_of_losing(fields, config.effective) for config in (pair.one, pair.other))
    return worst(effects)


def _blurs(config: Config, path: str) -> bool:
    """Return whether `config` sets `path` and no plan holds all that the rule of `path` says."""
    rule = claims(config.dialect).get(path)
    if rule is None or rule.blurs is None or path not in config.given:
        return False
    view = rule.values_in_view(rule.theirs, config.effective)
    return rule.blurs(view) and not (rule.becomes and not rule.becomes(path, view))


def _rounding_text(config: Config, path: str) -> tuple[str, ...]:
    """Return how a plan rounds the value at `path`, in words, or nothing if a plan holds it."""
    rule = claims(config.dialect).get(path)
    if rule is None or rule.becomes is None or path not in config.given:
        return ()
    text = rule.becomes(path, rule.values_in_view(rule.theirs, config.effective))
    return (text,) if text else ()


def _finding(
    path: str, effect: Effect, why: str, before: Any, after: Any, pair: ConfigPair
) -> Finding:
    explicit = path in pair.one.given or path in pair.other.given
    change = f"{full_text(before)} -> {full_text(after)}"
    origin, rule = pair.other.origins.get(path), f"{DIFFERENCE}/{path}"
    return Finding(
        path, why, effect, explicit, How.APPROXIMATE, before, after, origin, rule, change
    )


def _untold(pair: ConfigPair, finding_fields: Iterable[str]) -> Iterator[Finding]:
    """Yield a finding for each plan field that differs and is not in `finding_fields`, the plan
    fields that findings on settings already report.
    """
    for ours in sorted(pair.strayed.difference(finding_fields)):
        rule = plan_claims(pair.one.dialect)[ours]
        effects = (
            rule.effect_of_losing((ours,), config.effective) for config in (pair.one, pair.other)
        )
        effect, why = pair.by_ranks((ours,)) or (min(effects, key=_rank), "")
        why = why or pair.follows(ours) or rule.why(ours)
        row = _finding(
            _spoken(pair, ours),
            effect,
            why,
            pair.meant.plain.get(ours),
            pair.kept.plain.get(ours),
            pair,
        )
        yield replace(row, rule=f"{DIFFERENCE}/{ours}", about=(ours,))


def _spoken(pair: ConfigPair, ours: str) -> str:
    """Return the setting that stands for a plan field, or what the field is, in plain English, if the
    setting has another value than the field.
    """
    path = _setting_for(pair, pair.one, ours)
    for config in (pair.one, pair.other):
        value = config.effective.get(path)
        if path == ours or value not in (None, pair.meaning(config).plain.get(ours)):
            return in_words(ours)
    return path


# Two stacks


def _apart(pair: ConfigPair) -> Iterator[Finding]:
    """Yield the differences between configs of two stacks. First come plan fields, with the names
    that the two stacks have for them, then the settings of each stack that no plan field stands
    for.
    """
    sides = (pair.one, pair.other)
    # Several fields may have one setting on both sides; they make one row.
    rows: dict[tuple[str, str], list[str]] = {}
    for ours in sorted(pair.strayed):
        rows.setdefault(
            (_setting_for(pair, pair.one, ours), _setting_for(pair, pair.other, ours)), []
        ).append(ours)
    for (mine, theirs), fields in rows.items():
        row = _row(pair, mine, theirs, fields)
        told = all(any(is_told_by_setting(side, ours) for side in sides) for ours in fields)
        if told or _is_remarked(pair, row.effect, fields):
            continue
        if row.given or theirs in pair.other.given or row.effect.reaches(Effect.NUMBERS):
            yield row
    for config in (pair.one, pair.other):
        yield from _counts(pair, config)
        other = pair.other if config is pair.one else pair.one
        for finding in unheld(config):
            # The script that builds the model of the other has to build the same: the verdict says so.
            if claims(config.dialect)[finding.path].about_model and not other.dialect.model:
                continue
            for part in _alone(config, finding):
                change = f"{full_text(part.before)}, {pair.alone(config)}"
                origin = part.origin if config is pair.other else None
                yield replace(
                    part,
                    how=None,
                    origin=origin,
                    rule=f"{DIFFERENCE}/{finding.path}",
                    change=change,
                )


def _is_remarked(pair: ConfigPair, effect: Effect, fields: Iterable[str]) -> bool:
    """Return whether a remark on one of the configs already says what the stacks do alike in all runs
    in `fields`.
    """
    sides = (pair.one, pair.other)
    return all(
        ours.startswith(HABITS) and any(has_remark(side, ours, effect) for side in sides)
        for ours in fields
    )


def _counts(pair: ConfigPair, config: Config) -> Iterator[Finding]:
    """Yield a finding for each value of `config` that a plan rounds. Two meanings can be equal only
    because of the rounding; where they differ, the plan field has a finding already.
    """
    for path in config.given:
        rule = claims(config.dialect).get(path)
        for text in _rounding_text(config, path):
            if rule and pair.strayed.isdisjoint(rule.paths_of_plan(path)):
                yield Finding(
                    path,
                    rule.lossy,
                    rule.effect_of(config.effective),
                    True,
                    before=config.given[path],
                    origin=config.origins.get(path) if config is pair.other else None,
                    rule=f"{DIFFERENCE}/{path}",
                    change=text,
                )


def _alone(config: Config, whole: Finding) -> Iterator[Finding]:
    """Yield one finding for each setting in a section, or the finding itself if it is on no
    section.
    """
    rule = claims(config.dialect)[whole.path]
    parts = settings(config, rule, whole.path)
    for part in parts:
        yield replace(
            whole,
            path=part.path,
            effect=worth(rule, whole.effect, part),
            before=part.value,
            origin=config.origins.get(part.path, whole.origin),
        )
    if not parts:
        yield whole


def _setting_for(pair: ConfigPair, config: Config, ours: str) -> str:
    """Return the setting of `config` that stands for a plan field, preferably a given one. Return
    the plan field if there is no such setting.
    """
    rule = plan_claims(config.dialect).get(ours)
    if rule is None or not (paths := rule.carriers(ours)):
        return ours
    if unheld := untranslated(config, pair.meaning(config), rule):
        return unheld
    if ours.startswith(HABITS):
        # What a habit goes with says something else, and a setting may be of another release.
        paths = tuple(path for path in paths if config.effective.get(path) is not None)
        paths = tuple(path for path in paths if path in rule.theirs)
        if not paths:
            return ours
    # Of settings that make several fields together, the one that says most about this field alone.
    return min(
        paths,
        key=lambda path: (
            path not in config.given,
            len(rule.paths_of_plan(path)),
            not config.effective.get(path),
        ),
    )


def _row(pair: ConfigPair, mine: str, theirs: str, fields: list[str]) -> Finding:
    weights = {ours: _worth(pair, ours) for ours in fields}
    worst = min(weights, key=lambda ours: weights[ours][0].rank)
    effect, why = weights[worst]
    values = pair.meant.plain.get(worst), pair.kept.plain.get(worst)
    before, after = _own(pair.one, mine, values[0]), _own(pair.other, theirs, values[1])
    # A setting of several fields may have the value of another one than this.
    names = {
        mine: _tells(pair.one, mine, worst, values[0]),
        theirs: _tells(pair.other, theirs, worst, values[1]),
    }
    section = any(
        isinstance(config.effective.get(path), Mapping)
        for config, path in ((pair.one, mine), (pair.other, theirs))
    )
    kinds = {type(value) for value in (before, after) if value is not None}
    if section and bool in kinds and len(kinds) > 1:
        # A switch of one stack does not compare with a field's word that a section stands for.
        names = dict.fromkeys(names, False)
    if not all(names.values()):
        before, after = values
    if worst.startswith(HABITS):
        why = why or _note_of_habit(pair, worst)
    elif before != after and (before, after) != values and (not why or pair.by_ranks((worst,))):
        # The files' own values may be equal, or in other units: what they amount to differs.
        amount = f"{in_words(worst)}: {full_text(values[0])} -> {full_text(values[1])}"
        why = "; ".join(filter(None, (amount, why)))
    # A plan field stands for itself where a stack has no setting: no reader of the files knows it.
    own, other = (name not in fields for name in (mine, theirs))
    own, other = own and names[mine], other and names[theirs]
    path = theirs if other and not own else mine if own else in_words(worst)
    label = f"{theirs} " if other and theirs != path else ""
    change = "" if before == after else f"{full_text(before)} -> {label}{full_text(after)}"
    origin, explicit = pair.other.origins.get(theirs), mine in pair.one.given
    row = Finding(
        path,
        why,
        effect,
        explicit,
        How.APPROXIMATE,
        before,
        after,
        origin,
        f"{DIFFERENCE}/{worst}",
        change,
        about=(worst, *fields),
    )
    return replace(plainly(row, pair.meant.plain, pair.kept.plain), about=(mine, theirs, *fields))


def _tells(config: Config, path: str, ours: str, value: Any) -> bool:
    """Return whether the value of `path` can stand for the plan field `ours`: the path is about no other
    field, or its value is of the kind of the field's `value`. A section's is.
    """
    table, own = claims(config.dialect), config.effective.get(path)
    if path not in table or None in (own, value) or isinstance(own, Mapping):
        return True
    kinds = {int if type(one) is float else type(one) for one in (own, value)}
    return len(kinds) == 1 or table[path].paths_of_plan(path) == (ours,)


def _note_of_habit(pair: ConfigPair, ours: str) -> str:
    """Return what one of the stacks does alike in all runs, in words: that of the stack without a
    choice, if only one of them has a choice.
    """
    tables = (plan_claims(side.dialect) for side in (pair.one, pair.other))
    rules = [rule for table in tables if (rule := table.get(ours)) and rule.note]
    best = min(rules, key=lambda rule: (len(rule.theirs), rule.note), default=None)
    return best.note if best else ""


def _own(config: Config, path: str, field_value: Any) -> Any:
    """Return the value at `path` as the file or its stack has it, or None if nobody wrote it and it
    has no effect. Return `field_value`, the value of the plan field, if `path` is no single
    setting.
    """
    if path not in claims(config.dialect):
        return field_value
    usual = None if field_value is None else config.effective.get(path)
    value = config.given.get(path, usual)
    return field_value if isinstance(value, Mapping) else value


def _worth(pair: ConfigPair, ours: str) -> tuple[Effect, str]:
    """The effect of a difference in a plan field on the run, and the reason for the difference."""
    sides: tuple[tuple[Config, Mapping[str, Any]], ...] = (
        (pair.one, pair.meant.plain),
        (pair.other, pair.kept.plain),
    )
    for config, values in sides:
        dialect = config.dialect
        elsewhere = not ours.startswith(dialect.about)
        in_script = ours.startswith((HABITS, *SCRIPTED[dialect.model]))
        rule = plan_claims(dialect).get(ours)
        # A size that only follows from others is the script's too.
        unset = rule is None or config.given.keys().isdisjoint(rule.carriers(ours))
        open_ = values.get(ours) is None or (unset and ours.startswith("model."))
        if open_ and (elsewhere or in_script):
            return (
                Effect.NONE,
                f"the training script sets this value, not the config of {dialect.title}",
            )
    by_ranks = pair.by_ranks((ours,))
    if by_ranks and None not in [values.get(ours) for _, values in sides]:
        return by_ranks
    effects, why, open_ = list[Effect](), "", False
    for config, values in sides:
        rule = plan_claims(config.dialect).get(ours)
        if rule is None:
            continue
        effects.append(rule.effect_of_losing((ours,), config.effective))
        if values.get(ours) is None:
            unheld = (
                told_of(rule, config) if untranslated(config, pair.meaning(config), rule) else ""
            )
            # A section that is given may make the value in a way that no plan can hold.
            sections = {path.partition(".")[0] for path in config.given}
            unset = sections.isdisjoint(path.partition(".")[0] for path in rule.theirs)
            reason = f"{config.dialect.title} leaves the value open" if unset else rule.why(ours)
            open_, why = True, unheld or why or reason
    # A field that no table knows may change the numbers: unknown is not harmless.
    effect = min(effects, key=lambda effect: effect.rank, default=Effect.NUMBERS)
    # What a stack decides by itself costs neither more nor less than a value. A value that the
    # stack could not take is a loss, which the rules tell.
    return (Effect.NONE if open_ and effect is Effect.COST else effect), why
