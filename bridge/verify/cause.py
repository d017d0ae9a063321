"""Finds out why two runs differ: tries changes, and measures after which of them the runs agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

from bridge.engine.interface import Backend, Workload
from bridge.errors import BridgeError
from bridge.files.progress import Course
from bridge.layout.architecture import Architecture
from bridge.plan.plan import LearningRate, Plan
from bridge.stack.dialect import Config
from bridge.stack.rules import Effect
from bridge.translation.edit import edit_config, without
from bridge.translation.lift import claims, lower
from bridge.verify.measure import (
    LOSS,
    UPDATE,
    Distance,
    EngineRun,
    Measured,
    OtherModelError,
    differ_beyond_rounding,
    distance,
    measure,
)
from bridge.verify.size import TWO, change_plan, small_model

SGD = {"optimizer.name": "sgd", "optimizer.betas": None, "optimizer.eps": None}

TRIALS: tuple[tuple[Mapping[str, Any], ...], ...] = (
    ({"optimizer.clip": 0.0},),
    ({"optimizer.weight_decay": 0.0},),
    (SGD,),
    ({"precision.compute": "fp32"},),
    ({"batch.accumulation": 1, "batch.global_": None},),
    ({f"optimizer.schedule.{name}": None for name in LearningRate.model_fields},),
    ({"parallel.pipeline": 1},),
    ({"parallel.tensor": 1},),
    ({"zero.stage": 1}, {"zero.stage": 0}, {"zero.stage": 3}),
)
"""Changes of a plan that are tried to find a cause, as plan fields with new values. Each row is
about one feature. If a row has several changes, they are tried in order, until a run with one of
them agrees.
"""


@dataclass(frozen=True)
class Bench:
    """The settings of all measurements: sequences in a microbatch, steps, padding, ranks, and the
    reference engine. `kept` has the finished runs of the reference engine, so that none is
    repeated. `course` reports the progress of all runs.
    """

    micro: int
    steps: int
    padded: bool
    world: int
    reference: Backend
    kept: dict[str, Measured] = field(default_factory=dict)
    course: Course = field(default_factory=Course)

    def measure(self, run: EngineRun, plan: Plan) -> Measured:
        """Train `self.steps` steps of `run` on the small model of `plan`, and return the numbers."""
        with self.course.part():
            return self._measure_plan(run, plan)

    def _measure_plan(self, run: EngineRun, plan: Plan) -> Measured:
        model = small_model(plan)
        workload = Workload(Architecture.of(model), micro=self.micro, model=model)
        return measure(run, workload, self.steps, self.padded)

    def reference_numbers(self, plan: Plan) -> Measured:
        """Return the numbers of `plan` on the reference engine."""
        key = plan.model_dump_json(exclude_none=True)
        if key not in self.kept:
            self.kept[key] = self.measure(EngineRun(self.reference, plan), plan)
        return self.kept[key]


@dataclass(frozen=True)
class Cure:
    """A changed config whose run on its own stack agrees with the run of its plan on the reference
    engine. `words` names the changes by the stack's own settings.
    """

    words: str
    config: Config


@dataclass(frozen=True)
class Suspect:
    """A config whose stack trains with other numbers than the config's plan gives on the reference
    engine. `backend` is the engine of the stack, and `plan` has the fields of the model.
    """

    config: Config
    backend: Backend
    plan: Plan

    def meaning(self, config: Config) -> Plan:
        """Return the plan of a changed config, with the model of `self.plan`."""
        model = {
            path: value for path, value in self.plan.values().items() if path.startswith("model.")
        }
        return change_plan(self.backend.meaning(config), model)


def stack_cures(suspect: Suspect, bench: Bench, rounding: Distance) -> Iterator[Cure]:
    """Yield, for each row of `TRIALS`, the first change after which the stack gives the numbers of
    the plan.

    If no row has such a change, yield one set of changes after which the stack gives these numbers.
    None of the changes in the set can be left out.
    """
    settings, success = suspect.config.given, False
    for forms in _trials(suspect.config, suspect.backend, bench.world):
        form = next((form for form in forms if _heals(suspect, form, bench, rounding)), None)
        if form is not None:
            success = True
            yield Cure(_difference(settings, form.given), form)
    if success:
        return
    together = _together(suspect, bench, rounding)
    if together is not None:
        yield Cure(_difference(settings, together.given), together)


def _together(suspect: Suspect, bench: Bench, rounding: Distance) -> Config | None:
    """Return the config with a set of changes that together remove the difference. None of the
    changes in the set can be left out. Return None if not even all changes together remove it.
    """
    # All are changed at once. Then each is taken back, and stays as it was if the rest still heals.
    firsts = [forms[0] for forms in TRIALS] + list(suspect.backend.optional)
    trials = [trial for trial in firsts if _try_changes(suspect, [trial], bench.world) is not None]
    cure = _try_changes(suspect, trials, bench.world)
    if cure is None or not _heals(suspect, cure, bench, rounding):
        return None
    for trial in trials:
        fewer = [other for other in trials if other is not trial]
        config = _try_changes(suspect, fewer, bench.world)
        if config is not None and _heals(suspect, config, bench, rounding):
            trials, cure = fewer, config
    return cure


def _try_changes(
    suspect: Suspect, trials: Iterable[Mapping[str, Any]], world: int
) -> Config | None:
    """Return the suspect's config with all changes of `trials`. Return None if the stack refuses
    the changed config, or if the changes have no effect on it.
    """
    config = suspect.config
    try:
        for trial in trials:
            optional = trial in suspect.backend.optional
            config = (
                without(config, trial)
                if optional
                else edit_config(config, _whole(trial, world), world)
            )
    except BridgeError:
        return None
    return config if config.given != suspect.config.given else None


def plan_loss(
    suspect: Suspect, bench: Bench, rounding: Distance, reference: Measured, gap: Distance
) -> list[str]:
    """Return the names of settings that are not carried into the plan, if they cause the
    difference `gap`. To find out, the plan is written as a config again, and the stack trains with
    this second config. The lost settings are the cause if this run gives the numbers `reference`.
    Settings that change nothing of the difference are left out.
    """
    config, backend = suspect.config, suspect.backend
    try:
        again = lower(backend.meaning(config), config.dialect, config.version, config.world_size)
        mine, theirs = config.effective, again.effective
        settings = [path for path in config.given if mine.get(path) != theirs.get(path)]
        run = bench.measure(EngineRun(backend, again), suspect.plan) if settings else None
        if run is None or differ_beyond_rounding(run, reference, rounding):
            return []
    except BridgeError:
        return []
    groups = list(_by_rule(config, settings))
    if len(groups) < TWO:
        return settings
    causes = []
    for paths in groups:
        partly = _set(
            config,
            {path: again.given.get(path) for path in _settings_of_rule(config, paths, again)},
        )
        share = _share_without(suspect, partly, bench, gap, reference) if partly else None
        # A group that does not run alone is not cleared.
        if share is None or share >= LEAST:
            causes.append((share or 0.0, paths))
    by_share = sorted(causes, key=lambda cause: -cause[0])
    return [path for _, paths in by_share for path in paths] or settings


LEAST = 0.1
"""Share of a difference that has to disappear without a cause, so that the cause is claimed."""


def explain_by_findings(
    suspect: Suspect, cures: Sequence[Cure], bench: Bench, gap: Distance
) -> Iterator[str]:
    """Yield the findings on numbers that cause the difference `gap`, the one that explains most of
    it first. Such a finding is a known defect of the stack.

    A finding is a cause if the difference changes with the finding alone taken away.
    """
    causes = []
    for finding in suspect.config.findings:
        if not finding.effect.reaches(Effect.NUMBERS):
            continue
        variant = _spare_finding(suspect, cures, finding.id)
        share = _share_without(suspect, variant, bench, gap) if variant else None
        if share is not None and share >= LEAST:
            causes.append((share, f"{finding.path}: {finding.message}"))
    several = len(causes) > 1
    for share, words in sorted(causes, reverse=True):
        yield f"{words} ({share:.0%} of the difference)" if several else words


def _ids(config: Config) -> set[str]:
    return {finding.id for finding in config.findings}


def _spare_finding(suspect: Suspect, cures: Sequence[Cure], id: str) -> Config | None:
    """Return the suspect's config with so few changes that the stack no longer has the finding
    `id`. Return None if none of the `cures` removes the finding.
    """
    config = suspect.config
    configs = [cure.config for cure in cures if id not in _ids(cure.config)]
    if not configs:
        return None
    with suppress(BridgeError):
        # The same meaning in other settings takes away nothing but the finding.
        plan = suspect.backend.meaning(config)
        configs.insert(0, lower(plan, config.dialect, config.version, config.world_size))
    for other in configs:
        before, after = config.given, other.given
        differences = [path for path in {**before, **after} if before.get(path) != after.get(path)]
        for paths in (*([path] for path in differences), *_by_rule(config, differences)):
            part = _set(config, {path: after.get(path) for path in paths})
            if part is not None and id not in _ids(part):
                return part
    return configs[-1]


def _by_rule(config: Config, paths: Iterable[str]) -> Iterable[list[str]]:
    """Return the paths in groups, one for each rule that claims some of them."""
    table, groups = claims(config.dialect), dict[int, list[str]]()
    for path in paths:
        groups.setdefault(id(table.get(path)), []).append(path)
    return groups.values()


def _settings_of_rule(config: Config, paths: Sequence[str], again: Config) -> Iterator[str]:
    """Yield all settings of the rule of `paths` that one of the two configs sets."""
    rule = claims(config.dialect).get(paths[0])
    for path in rule.theirs if rule else paths:
        if path in config.given or path in again.given:
            yield path


def _set(config: Config, settings: Mapping[str, Any]) -> Config | None:
    """Return `config` with other settings, or None if the stack refuses it. None unsets a setting."""
    try:
        return without(config, settings)
    except BridgeError:
        return None


def _share_without(
    suspect: Suspect,
    variant: Config,
    bench: Bench,
    gap: Distance,
    reference: Measured | None = None,
) -> float | None:
    """Return the share of the difference `gap` that disappears with the config `variant`, or None
    if it does not run. `reference` are the numbers to compare with; None stands for those of the
    plan of `variant`.
    """
    try:
        plan = suspect.meaning(variant)
        run = bench.measure(
            EngineRun(suspect.backend, variant), plan if reference is None else suspect.plan
        )
        rest = distance(
            run, bench.reference_numbers(plan) if reference is None else reference, gap.noise
        )
    except BridgeError:
        return None
    return 1 - _length(rest) / _length(gap) if _length(gap) else None


def _length(gap: Distance) -> float:
    """Return the length of a difference, in the differences that always count as rounding."""
    return max(gap.loss / LOSS, (gap.norm or 0.0) / LOSS, gap.update / UPDATE)


def _apart(reference: Measured, rounding: Distance, run: Measured) -> float:
    """Return the length of the difference between a run and the numbers `reference`."""
    try:
        return _length(distance(run, reference, rounding.noise))
    except OtherModelError:
        return inf


def _heals(suspect: Suspect, variant: Config, bench: Bench, rounding: Distance) -> bool:
    """Return whether two runs agree: the changed config on its own stack, and the plan of this
    config on the reference engine. Return False if one of them does not run.
    """
    try:
        plan = suspect.meaning(variant)
        run, reference = (
            bench.measure(EngineRun(suspect.backend, variant), plan),
            bench.reference_numbers(plan),
        )
    except BridgeError:
        return False
    return not differ_beyond_rounding(run, reference, rounding)


def _trials(config: Config, backend: Backend, world: int) -> Iterator[list[Config]]:
    """Yield, for each row of `TRIALS` and each optional setting of the engine, the changed configs
    to try. Changes that have no effect are left out, and so are configs that the stack refuses.
    """
    for forms in TRIALS:
        yield list(
            _forms(
                config, [partial(edit_config, config, _whole(form, world), world) for form in forms]
            )
        )
    for settings in backend.optional:
        yield list(_forms(config, [partial(without, config, settings)]))


def _forms(config: Config, makes: Iterable[Callable[[], Config]]) -> Iterator[Config]:
    for make in makes:
        with suppress(BridgeError):
            variant = make()
            if variant.given != config.given:
                yield variant


def _whole(trial: Mapping[str, Any], world: int) -> dict[str, Any]:
    """Return the changes of a trial. If the trial changes a number of ranks, all ranks of the run
    become data ranks.
    """
    # The global batch follows from the new number of data ranks.
    has_ranks = any(path.startswith("parallel.") for path in trial)
    return {**trial, "parallel.data": world, "batch.global_": None} if has_ranks else dict(trial)


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return a text with the changed settings and their new values, by the stack's own names.
    Settings that were unset and are now off are left out, unless nothing else changed.
    """
    differences = [
        path for path in dict.fromkeys((*before, *after)) if before.get(path) != after.get(path)
    ]
    paths = [path for path in differences if path in before or after[path]] or differences
    return " and ".join(f"{path} {_value_text(after.get(path))}" for path in paths)


def _value_text(value: Any) -> str:
    return "unset" if value is None else str(value)


def plan_causes(
    source: Plan, target: Plan, bench: Bench, reference: Measured, rounding: Distance
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the fields that explain why `target` gives other numbers than `source`, with a text on
    their values. A field is a cause if `source` gives other numbers once this field alone is
    changed, and if the difference changes once it alone is changed back in `target`. The cause that
    explains most comes first. Fields that only have a meaning together are changed together
    (`TOGETHER`).
    """
    mine, theirs = source.values(), target.values()
    groups: dict[str, dict[str, Any]] = {}
    for path in dict.fromkeys((*mine, *theirs)):
        if mine.get(path) != theirs.get(path):
            together = next((section for section in TOGETHER if path.startswith(section)), path)
            groups.setdefault(together, {})[path] = theirs.get(path)
    felt = partial(_felt, source, bench, reference, rounding)
    causes = list(_alone(list(groups.values()), felt))
    for changes in _rank_causes(
        causes, source, target, bench, partial(_apart, reference, rounding)
    ):
        paths = [path for path, new in changes.items() if new or mine.get(path)] or list(changes)
        words = (
            f"{path} changed from {_value_text(mine.get(path))} to {_value_text(changes[path])}"
            for path in paths
        )
        yield tuple(changes), " and ".join(words)


Changes = Mapping[str, Any]


def _rank_causes(
    causes: list[Changes],
    source: Plan,
    target: Plan,
    bench: Bench,
    length: Callable[[Measured], float],
) -> list[Changes]:
    """Return the causes without which the difference is another one, the cause that explains most
    of it first. If there is one cause, nothing is left to rank.
    """
    if len(causes) < TWO:
        return causes
    mine = source.values()
    whole = length(bench.reference_numbers(target))
    ranking = []
    for at, changes in enumerate(causes):
        back = {path: mine.get(path) for path in changes}
        share = 1.0
        with suppress(BridgeError):
            rest = length(bench.reference_numbers(change_plan(target, back)))
            share = abs(1 - rest / whole) if 0 < whole < inf else 1.0
        if share >= LEAST:
            ranking.append((-share, at, changes))
    return [changes for _, _, changes in sorted(ranking, key=lambda cause: cause[:2])] or causes


def _alone(groups: list[Changes], felt: Callable[[Changes], bool | None]) -> Iterator[Changes]:
    """Yield each group of changes that changes the numbers by itself."""
    # By halves, since most groups are not felt: a half that is not felt as a whole needs no more
    # runs. If a half does not run, it is divided all the same.
    differs = (
        felt({path: value for changes in groups for path, value in changes.items()})
        if groups
        else False
    )
    if len(groups) > 1 and differs is not False:
        middle = len(groups) // 2
        yield from (*_alone(groups[:middle], felt), *_alone(groups[middle:], felt))
    elif differs:
        yield from groups


def _felt(
    source: Plan, bench: Bench, reference: Measured, rounding: Distance, changes: Changes
) -> bool | None:
    """Return whether `source` with the changes `changes` gives other numbers than `reference`, or
    None if the changed plan does not run.
    """
    with suppress(BridgeError):
        return differ_beyond_rounding(
            bench.reference_numbers(change_plan(source, changes)), reference, rounding
        )
    return None


TOGETHER = (
    "batch.",
    "optimizer.schedule.",
    "optimizer.decay_ramp.",
    "precision.loss_scale.",
    "model.rotary.scaling.",
)
"""Prefixes of plan fields that only have a meaning together with the other fields of the same
prefix.
"""
