"""Translate: lift a config to a Plan and lower that to a dialect, with every loss measured and named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from bridge.carry import Carry
from bridge.config import Values
from bridge.dialect import Config, Dialect, Written
from bridge.errors import BridgeError
from bridge.findings import Finding
from bridge.lifting import Meaning, differing, lowered, meaning_of, unlike, world_of
from bridge.lifting import claims as claims
from bridge.lifting import lift as lift
from bridge.lifting import lower as lower
from bridge.lifting import plan_claims as plan_claims
from bridge.lifting import seen_by as seen_by
from bridge.lifting import written_by as written_by
from bridge.plan import Plan
from bridge.restoring import Way, sound
from bridge.rules import Effect, How, Rule
from bridge.sections import Setting, leaves, settings, tellers, worth

HABITS = ("precision.loss_scale.late", "precision.loss_scale.final")
"""What a stack does with a setting whose value means the same elsewhere, so that no value tells that it is lost."""
DECAYED = "optimizer.decay_scope"
ALWAYS = (*HABITS, DECAYED, "loss")
"""That, and what it does whatever is set."""
SEQUENCE = "model.sequence"
CARRIED = "carry-over"
"""Source of a field that only a sidecar can have told."""


@dataclass(frozen=True, slots=True)
class FieldReport:
    """One field of the target: its value, the source fields it came from, how, and what it does to the run.

    Where no source field was given, `default_of` names the dialect whose default the value is.
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
    """A translation: the target config, the plan in between, and what there is to say about each field."""

    source: Config
    config: Config
    plan: Plan
    findings: tuple[Finding, ...]
    carry: Carry = field(repr=False)
    trip: _Trip = field(repr=False)
    put: Written | None = field(default=None, repr=False)
    lacking: tuple[Finding, ...] = ()

    @cached_property
    def written(self) -> Written:
        """The target in its stack's own form; as it is put into a file, where there is one."""
        return self.put or self.config.dialect.render(self.config)

    @cached_property
    def fields(self) -> tuple[FieldReport, ...]:
        """Each field of the target: its value, and where that came from."""
        return tuple(_reports(self.trip))

    @property
    def code(self) -> Mapping[str, Any]:
        """What the target stack keeps outside its file."""
        return self.written.code

    @cached_property
    def missing(self) -> tuple[Finding, ...]:
        """What the target's stack cannot start without and the source did not say.

        Where the source is a part of a launch, or of a stack that keeps the rest in code, the target is a part too.
        """
        source, whole = self.source, self.source.dialect.whole(self.source)
        known = {finding.path for finding in source.missing} if source.dialect.name == self.config.dialect.name else set()
        wanted = (finding for finding in self.config.missing if finding.path not in known)
        return (*(_weighed(finding, whole) for finding in wanted), *self.lacking)

    @property
    def exact(self) -> bool:
        """Whether nothing that the user set, and nothing that matters for the numbers, was dropped or changed."""
        return not any(finding.matters for finding in self.findings)


def _weighed(finding: Finding, whole: bool) -> Finding:
    """What lacks stops the run where a whole launch was translated; a part of one goes on elsewhere."""
    if whole:
        return replace(finding, effect=Effect.STOPS)
    return replace(finding, effect=Effect.NUMBERS) if finding.effect is Effect.STOPS else finding


def _remarks(target: Config) -> Iterator[Finding]:
    """Findings on the target but for what it lacks, which is no loss (`Result.missing`)."""
    return (finding for finding in target.findings if finding.how is not How.MISSING)


def unheld(config: Config) -> Iterator[Finding]:
    """What `config` sets otherwise than its stack's default and no Plan holds, with what it does to the run."""
    table, values = claims(config.dialect), config.effective.flat()
    back = _back(meaning_of(config), config)
    usual = back.effective if back else Values()
    for path in config.given:
        rule, value = table.get(path), values.get(path)
        if rule is not None and not rule.ours and value != usual.get(path):
            yield Finding(path, rule.note, rule.effect_of(values), True, How.DROPPED, value, origin=config.origins.get(path))


def translate(
    config: Config,
    dialect: Dialect,
    version: str | None = None,
    world_size: int | None = None,
    carry: Carry | None = None,
) -> Result:
    """`config` in another dialect (or in another release of its own), with every loss and its reason.

    `carry` is what an earlier translation could not express; it fills in what was not edited since.
    """
    release, meant = dialect.release(version), meaning_of(config)
    world = world_size or world_of(meant) or config.world_size
    same, told = dialect.name == config.dialect.name, carry
    if carry is None and same:
        carry = Carry.of(config, config, meant)
    if told is not None:
        carry = replace(told, given=sound(told, dialect))
    way = Way(meant, dialect, release, world, carry) if carry and carry.dialect == dialect.name else None
    target = way.restored() if way else lowered(meant, dialect, release, world)
    if same:
        target = replace(target, opaque=config.opaque)
    kept = meaning_of(target)
    back = target if same else _back(kept, config)
    kept_back = _put_back_as_given(told, target)
    as_it_was = way.as_it_was(kept) if way and told else set[str]()
    trip = _Trip(config, meant, target, kept, back, frozenset(unlike(meant, kept) - as_it_was), kept_back)
    losses, openings = tuple(_losses(trip)), _openings(trip, as_it_was)
    losses += tuple(_nameless(trip, losses))
    left = way.unused(told.given, config, target) if way and told else ()
    findings = (*losses, *openings, *left, *_left_behind(config, target), *_remarks(target))
    return Result(config, target, Plan.of(meant), findings, Carry.of(config, target, kept), trip)


def _back(kept: Mapping[str, Any], config: Config) -> Config | None:
    """The config after the way there and back; None if the source stack refuses what came back."""
    try:
        return lowered(kept, config.dialect, config.version, config.world_size or world_of(kept))
    except BridgeError:
        return None


@dataclass(frozen=True)
class _Trip:
    """A config with what it means, what it became with what that means, and the config after the way back, if there is one.

    `lost` are the fields of a plan that do not mean the same, but for those that are again what they were before; `restored`
    the settings of the target that are as a person gave them before.
    """

    config: Config
    meant: Meaning
    target: Config
    kept: Meaning
    back: Config | None
    lost: frozenset[str]
    restored: frozenset[str]

    def returned(self, path: str) -> Any:
        """What there is at `path` after the way back."""
        return self.back.effective.get(path) if self.back else None

    def gone(self, fields: tuple[str, ...]) -> bool:
        """Whether the target says nothing of these fields of a plan."""
        return all(self.kept.get(ours) is None for ours in fields)

    def found(self, fields: tuple[str, ...], otherwise: Any) -> Any:
        """What the target has for a setting that the way back writes in other words: the value of the field it stands for."""
        found = [self.kept[ours] for ours in fields if self.kept.get(ours) is not None]
        return found[0] if len(found) == 1 else otherwise


def _losses(trip: _Trip) -> Iterator[Finding]:
    config, back = trip.config, trip.back
    before, after = config.effective.flat(), back.effective.flat() if back else {}
    # What its stack moves elsewhere fares as its group does.
    elsewhere = {path for path, value in config.given.items() if value is not None and before.get(path) is None}
    theirs = differing(before, after) - elsewhere
    for rule, paths in _at_stake(config, theirs | elsewhere):
        lost = tuple(path for path in rule.ours if path in trip.lost)
        lost = tuple(path for path in lost if path in trip.meant) or lost
        gone = elsewhere if lost else () if rule.ours else elsewhere - trip.target.given.keys()
        changed = [path for path in paths if path in theirs or path in gone]
        if changed:
            yield from _lost(trip, rule, changed, lost)


def _at_stake(config: Config, moved: Set[str]) -> Iterator[tuple[Rule, Sequence[str]]]:
    """Rules with the paths of which some `moved`: all of a group that means something, else those that were given."""
    table = claims(config.dialect)
    touched = {id(table[path]) for path in moved if path in table}
    yield from ((rule, rule.theirs) for rule in config.dialect.rules if id(rule) in touched and rule.ours)
    yield from ((table[path], [path]) for path in config.given if path in moved and path in table and not table[path].ours)


def _lost(trip: _Trip, rule: Rule, changed: Sequence[str], lost: tuple[str, ...]) -> Iterator[Finding]:
    config, back, told, named_ = trip.config, trip.back, set[str](), set[str]()
    if not lost and not any(path in config.given for path in changed):
        return
    seen = rule.seen(rule.theirs, config.effective) if rule.blurs else {}
    blurred = rule.blurs is not None and rule.blurs(seen)
    unheld = blurred and _holds_nothing(rule, trip.meant)
    effect = _weight(rule, lost, blurred, config, trip.target)
    for path in sorted(changed, key=lambda path: path not in config.given):
        before, after, given = config.effective.get(path, config.given.get(path)), trip.returned(path), path in config.given
        mine = tuple(ours for ours in lost if ours in rule.carried(path))
        whole = rule.becomes is not None and not mine and not rule.becomes(path, rule.seen(rule.theirs, config.effective))
        if not given and (not lost or not effect.reaches(Effect.NUMBERS) or _told_elsewhere(trip, path, mine, told)):
            continue
        how = _fate(rule, path, mine, blurred and not whole, unheld or (bool(mine) and trip.gone(mine)))
        if how is not How.DROPPED and (after is None if mine else not (back and path in back.given)):
            after = trip.found(mine or rule.carried(path), after)
        named = path if given else _given(config, rule, mine, path)
        if named in named_ or (named != path and named in changed):
            continue  # the setting that the user wrote has a finding of its own
        if named != path:
            before, after = config.effective.get(named), trip.returned(named)
        weight = Effect.NONE if how is How.DERIVED else effect
        reason = _reason_of(rule, how, mine, trip.target, seen, blurred, unheld)
        told.update(mine)
        named_.add(named)
        change = rule.becomes(named, rule.seen(rule.theirs, config.effective)) if rule.becomes and how is not How.DERIVED else ""
        finding = Finding(named, reason, weight, given, how, before, after, config.origins.get(named), change=change)
        yield from _in_parts(trip, rule, lost, finding)


def _holds_nothing(rule: Rule, meant: Meaning) -> bool:
    """Whether a plan says nothing of all that a rule is about."""
    return not any(ours in meant for ours in rule.ours)


def _told_elsewhere(trip: _Trip, path: str, mine: tuple[str, ...], told: set[str]) -> bool:
    """Whether what a setting that nobody wrote stands for is told by another row.

    What the source leaves open is told by what the target takes for it (`_openings`), a fact of a family of models by itself
    (`_nameless`), and what two settings say alike by the first.
    """
    if mine and told.issuperset(mine):
        return True
    if trip.config.effective.get(path) is not None:
        return False
    facts = trip.target.dialect.model and bool(mine) and all(ours.startswith("model.") for ours in mine)
    return facts or not any(ours in trip.meant for ours in mine)


def _in_parts(trip: _Trip, rule: Rule, lost: tuple[str, ...], whole: Finding) -> Iterator[Finding]:
    """A finding on a section as one on each setting of it that comes back otherwise, and one on what none of these tells."""
    config, section = trip.config, trip.returned(whole.path)
    changed = settings(config, rule, whole.path, section)
    if not changed:
        yield whole
        return
    held = dict(leaves(section))
    for part in changed:
        mine = tuple(ours for ours in lost if ours in part.stands)
        how = _fate_of(rule, part, mine, trip)
        weight = Effect.NONE if how is How.DERIVED else _worth(trip, rule, whole, part, mine)
        after = None if how is How.DROPPED else trip.found(mine or tuple(part.stands), held.get(part.keys))
        told = rule.tells(part.alone) if part.behind and rule.tells else ""
        reason = "; ".join(filter(None, (told, _reason(rule, how, mine, trip.target))))
        yield Finding(part.path, reason, weight, True, how, part.value, after, config.origins.get(part.path, whole.origin))
    left = tuple(ours for ours in lost if not ours.startswith("model.") and not any(ours in part.stands for part in changed))
    effect = rule.effect_of_losing(left, config.effective)
    if left and rule.ours and effect.reaches(Effect.NUMBERS):
        reason = _reason(rule, How.APPROXIMATE, left, trip.target)
        yield Finding(whole.path, reason, effect, False, How.APPROXIMATE, None, None, whole.origin)


def _fate_of(rule: Rule, part: Setting, mine: tuple[str, ...], trip: _Trip) -> How:
    if mine:
        return How.DROPPED if trip.gone(mine) else How.APPROXIMATE
    return How.DROPPED if part.behind or not rule.ours else How.DERIVED


def _worth(trip: _Trip, rule: Rule, whole: Finding, part: Setting, mine: tuple[str, ...]) -> Effect:
    """What losing a setting of a section does to the run."""
    of_fields = [_weight(rule, mine, False, trip.config, trip.target)] if mine else []
    of_itself = [] if mine and not part.behind else [worth(rule, whole.effect, part)]
    return min((*of_fields, *of_itself), key=lambda effect: effect.rank)


def _weight(rule: Rule, lost: tuple[str, ...], blurred: bool, config: Config, target: Config) -> Effect:
    """What losing these fields of a plan, and what a plan cannot hold of the group, does to the run."""
    if rule.about_model and not target.dialect.model:
        beside = tuple(path for path in lost if not path.startswith("model."))
        return rule.effect_of_losing(beside, config.effective) if rule.mixed and beside else Effect.NONE
    effect = rule.effect_of_losing(lost, config.effective)
    return min(effect, rule.effect_of(config.effective), key=lambda one: one.rank) if blurred else effect


def _nameless(trip: _Trip, told: Sequence[Finding]) -> Iterator[Finding]:
    """Facts of the model that are lost though no setting tells them alone: what goes without saying in a family of models.

    What one reason leaves open is one finding.
    """
    config, meant, kept, target = trip.config, trip.meant, trip.kept, trip.target
    table, named = plan_claims(config.dialect), {finding.path for finding in told if finding.effect.reaches(Effect.NUMBERS)}
    lost = trip.lost & meant.keys() if target.dialect.model else ()
    yield from _otherwise(trip, named)
    yield from _unmoved(trip, {finding.path for finding in told})
    open_: dict[str, list[str]] = {}
    for ours in sorted(path for path in lost if path.startswith("model.")):
        rule = table[ours]
        effect = rule.effect_of_losing((ours,), config.effective)
        if effect.reaches(Effect.NUMBERS) and named.isdisjoint(tellers(config, rule, ours)):
            reason = _reason(rule, How.DROPPED, (ours,), target)
            if kept.get(ours) is None:
                open_.setdefault(reason, []).append(ours)
            else:
                yield Finding(ours, reason, effect, False, How.APPROXIMATE, meant[ours], kept[ours])
    for reason, paths in open_.items():
        before = {path.removeprefix("model."): meant[path] for path in paths}
        path = paths[0] if len(paths) == 1 else "model"
        yield Finding(path, reason, Effect.NUMBERS, False, How.DROPPED, before if len(paths) > 1 else meant[path])


def _otherwise(trip: _Trip, named: set[str]) -> Iterator[Finding]:
    """What arrives with its value, or stands in no setting, and the target takes otherwise."""
    config, meant, kept, target = trip.config, trip.meant, trip.kept, trip.target
    for ours in ALWAYS:
        said = meant.plain.get(ours) is not None and ours in trip.lost
        if not said or kept.get(ours) in (None, meant[ours]) or _spared_alike(ours, meant, kept):
            continue
        rule = plan_claims(config.dialect)[ours]
        path = next(iter((*rule.theirs, *rule.carriers(ours))), ours)
        before = config.effective.get(path) if rule.theirs else meant[ours]
        if named.isdisjoint({path, *rule.carriers(ours)}):
            reason, effect = _reason(rule, How.APPROXIMATE, (ours,), target), rule.effect_of(config.effective)
            yield Finding(path, reason, effect, False, How.APPROXIMATE, before, kept.get(rule.ours[0]), config.origins.get(path))


def _unmoved(trip: _Trip, named: set[str]) -> Iterator[Finding]:
    """What the user set and is something else in the target, though it comes back as it was."""
    config, meant, kept = trip.config, trip.meant.plain, trip.kept.plain
    moved = [ours for ours in sorted(trip.lost.difference(ALWAYS)) if None not in (meant.get(ours), kept.get(ours))]
    for ours in moved:
        rule = plan_claims(config.dialect).get(ours)
        if rule is None or rule.about_model or not named.isdisjoint(tellers(config, rule, ours)):
            continue
        path = next((path for path in rule.carriers(ours) if path in config.given), "")
        effect = rule.effect_of_losing((ours,), config.effective)
        if path and effect.reaches(Effect.COST) and not _remarked(trip.target, ours, effect):
            named.add(path)
            reason = _reason(rule, How.APPROXIMATE, (ours,), trip.target)
            yield Finding(path, reason, effect, False, How.APPROXIMATE, meant[ours], kept[ours], config.origins.get(path))


def _remarked(target: Config, ours: str, effect: Effect) -> bool:
    """Whether the target's own stack has something as grave to say of the settings that stand for a field of a plan."""
    rule = plan_claims(target.dialect).get(ours)
    paths = rule.carriers(ours) if rule else ()
    return any(remark.path in paths and remark.effect.reaches(effect) for remark in _remarks(target))


def _spared_alike(ours: str, meant: Meaning, kept: Meaning) -> bool:
    """Whether the same parameters decay in a model all of whose norms are LayerNorm."""
    return ours == DECAYED and meant.get("model.norm.kind") == "layer" and "all" not in (meant[ours], kept[ours])


def _given(config: Config, rule: Rule, lost: tuple[str, ...], path: str) -> str:
    """The setting that the user wrote, where it stands for what `path`, which nobody wrote, tells of a plan."""
    carriers = (carrier for ours in lost for carrier in rule.carriers(ours))
    return next((carrier for carrier in carriers if carrier in config.given), path)


def _fate(rule: Rule, path: str, lost: tuple[str, ...], blurred: bool, gone: bool) -> How:
    if not rule.carried(path) or gone:
        return How.DROPPED
    if lost:
        return How.APPROXIMATE
    return How.APPROXIMATE if blurred else How.DERIVED


def _reason_of(
    rule: Rule, how: How, lost: tuple[str, ...], target: Config, seen: Mapping[str, Any], blurred: bool, unheld: bool
) -> str:
    """Why a setting is lost: what reading it loses, and, where a plan holds any of it, what the target cannot say."""
    told = rule.tells(seen) if blurred and rule.tells else ""
    if unheld:
        return told or rule.lossy or rule.note
    return "; ".join(filter(None, (told, _reason(rule, how, lost, target))))


def _reason(rule: Rule, how: How, lost: tuple[str, ...], target: Config) -> str:
    if how is How.DERIVED:
        return "said in other words, or without effect in this run"
    if not lost and how is How.DROPPED:
        return rule.note
    others = plan_claims(target.dialect)
    reasons = dict.fromkeys(others[path].why(path) for path in lost if path in others)
    return "; ".join(reason for reason in reasons if reason) or rule.lossy or rule.note or "the same meaning in other words"


def _left_behind(config: Config, target: Config) -> Iterator[Finding]:
    """Live Python objects, which only the stack's own config class can hold."""
    for path in sorted(config.opaque.keys() - target.opaque.keys()):
        message = f"a live Python object, which {target.dialect.title} has no place for; set it up in the training script"
        yield Finding(path, message, Effect.NUMBERS, True, How.DROPPED, config.opaque[path], origin=config.origins.get(path))


def _put_back_as_given(carry: Carry | None, target: Config) -> frozenset[str]:
    """Paths of the target whose values are those that a sidecar kept for it."""
    if carry is None or carry.dialect != target.dialect.name:
        return frozenset()
    return frozenset(path for path, value in target.given.items() if path in carry.given and carry.given[path] == value)


def _openings(trip: _Trip, as_it_was: Set[str]) -> Iterator[Finding]:
    """What the source left to the training script and the target decides by a default of its own."""
    config, meant, kept, target = trip.config, trip.meant, trip.kept, trip.target
    mine, theirs, said, left = plan_claims(config.dialect), plan_claims(target.dialect), meant.plain, kept.plain
    opened: dict[tuple[str, str], list[str]] = {}
    for ours, value in kept.items():
        if (
            ours in said
            or ours in meant
            or ours in as_it_was
            or ours not in left
            or ours not in mine
            or not _looked_at(ours, config.dialect, target.dialect)
        ):
            continue
        rule = theirs[ours]
        effect = rule.effect_of_losing((ours,), target.effective)
        if not effect.reaches(Effect.NUMBERS):
            continue
        if not trip.restored.isdisjoint(rule.carriers(ours)):
            continue  # nobody's default: it is as it was before the file was converted
        opened.setdefault((_teller(rule, ours, value, target), repr(value)), []).append(ours)
    for (path, taken), fields in opened.items():
        effects = (theirs[ours].effect_of_losing((ours,), target.effective) for ours in fields)
        unheld = next(filter(None, (_unheld(config, meant, mine[ours]) for ours in fields)), "")
        why = f"no Plan form holds what {unheld} says" if unheld else f"{config.dialect.name} leaves {', '.join(fields)} open"
        message = f"{why}; {target.dialect.name} takes {taken} by default"
        cause = "" if unheld else f"left open by {config.dialect.title}; {target.dialect.title} takes what it has by default"
        effect = min(effects, key=lambda one: one.rank)
        yield Finding(path, message, effect, False, How.DEFAULTED, None, kept[fields[0]], cause=cause)


def _unheld(config: Config, meant: Meaning, rule: Rule) -> str:
    """The setting that says what a plan cannot hold, of a group of which it holds nothing."""
    if rule.blurs is None or not _holds_nothing(rule, meant) or not rule.blurs(rule.seen(rule.theirs, config.effective)):
        return ""
    return next((path for path in rule.theirs if path in config.given), "")


def _teller(rule: Rule, ours: str, value: Any, target: Config) -> str:
    """The setting of the target that says `value` and stands for this field of a plan, rather than for its whole group."""
    told = (path for path in rule.carriers(ours) if path in rule.carries or rule.ours == (ours,))
    return next((path for path in told if repr(target.effective.get(path)) == repr(value)), ours)


def _looked_at(ours: str, dialect: Dialect, target: Dialect) -> bool:
    """Whether a field is of those that a config of the dialect decides: what it leaves to others is not lost.

    The course of a run is up to a training script, often the model too; and some configs are about one thing alone. The length
    of a sequence is part of the batch where the target's config is the whole run.
    """
    if ours == SEQUENCE and target.model:
        return True
    scripted = ("run.",) if dialect.model else ("run.", "model.")
    return ours.startswith(dialect.about) and not ours.startswith(scripted)


def _reports(trip: _Trip) -> Iterator[FieldReport]:
    config, meant, target, restored = trip.config, trip.meant, trip.target, trip.restored
    sources, table, said, left = plan_claims(config.dialect), claims(target.dialect), meant.plain, trip.kept.plain
    for path, value in target.given.items():
        rule = table[path]
        ours = tuple(name for name in rule.carried(path) if name in meant)
        origins = tuple(dict.fromkeys(p for name in ours for p in _written(config, sources.get(name), name)))
        changed = any(name in said and said[name] != left.get(name) for name in ours)
        how = How.EXACT if path in restored and not origins else _came(rule, path, ours, origins, changed)
        origins = origins or ((CARRIED,) if path in restored or not rule.ours else ())
        effect = rule.effect_of(target.effective)
        note, default_of = rule.lossy if changed else rule.note, (config if ours else target).dialect.name
        yield FieldReport(path, value, origins, how, effect, note, "" if origins else default_of)


def _written(config: Config, rule: Rule | None, ours: str) -> tuple[str, ...]:
    return tuple(path for path in rule.carriers(ours) if path in config.given) if rule else ()


def _came(rule: Rule, path: str, ours: tuple[str, ...], origins: tuple[str, ...], changed: bool) -> How:
    if changed:
        return How.APPROXIMATE
    if not rule.ours:
        return How.EXACT
    if not origins:
        return How.DEFAULTED
    ours = tuple(name for name in ours if name not in HABITS)
    alone = len(ours) == len(origins) == 1 and rule.carriers(ours[0]) == (path,)
    return How.EXACT if alone else How.DERIVED
