"""Rules: each row of a dialect's table maps a group of the stack's fields to a group of plan
fields, and states the possible loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeVar

from packaging.version import Version

from bridge.plan.plan import paths
from bridge.stack.effects import (
    Effect as Effect,  # tables name an effect beside its rule
    Use as Use,
    worst as worst,
)

Group = Mapping[str, Any]
T = TypeVar("T")


class How(StrEnum):
    """The way in which a value of the target came about."""

    EXACT = "exact"
    DERIVED = "derived"
    APPROXIMATE = "approximate"
    DEFAULTED = "defaulted"
    DROPPED = "dropped"
    MISSING = "missing"


# Parsing a version is slow, and a table asks for the same few in every row.
@cache
def _since(release: str, version: str) -> bool:
    return Version(release) >= Version(version)


@dataclass(frozen=True)
class Context:
    """Facts that a rule may use besides the values: the release, and the world size in ranks (None
    if unknown).

    `had` names the settings of the file that is rewritten. If two settings can express a value, a
    rule uses the one in this file.
    """

    version: str
    world_size: int | None = None
    had: frozenset[str] = frozenset()

    @cached_property
    def release(self) -> Version:
        """The release as a comparable value."""
        return Version(self.version)

    def since(self, version: str) -> bool:
        """Whether this release is `version` or a later one."""
        return _since(self.version, version)


_LOSSES: Mapping[Effect, str] = {
    Effect.NUMBERS: (
        "model adapters habits run.steps run.epochs run.exit_interval run.seed run.weights_only run.load_optimizer "
        "run.load_random run.resumed_schedule run.host_init optimizer.nesterov optimizer.update_scale "
        "optimizer.amsgrad optimizer.bias_correction optimizer.decay_scope optimizer.decay_ramp "
        "optimizer.embedding_lr optimizer.output_lr precision.fp8_recipe precision.autocast"
    ),
    Effect.ROUNDING: (
        "zero.prescale zero.predivide zero.average_in_collective precision.reduce precision.fp8_weights precision.residual "
        "precision.router precision.moments precision.communicate"
    ),
    Effect.COST: (
        "zero.gather_bucket zero.double_buffer zero.registered zero.fp8_transposes zero.meta_init zero.offload.pinned "
        "parallel.tensor_overlap parallel.vocabulary parallel.context_method parallel.dispatcher recompute "
        "run.collect_interval run.loaders run.backend run.timers run.async_save"
    ),
    Effect.NONE: (
        "habits.nonfinite model.embedding.begin model.embedding.ends "
        "model.family run.log_interval run.save_interval run.save_optimizer run.save_random run.eval_interval run.timeout "
        "run.keep_checkpoints run.eval_steps run.project run.entity"
    ),
}


def longest(path: str, reasons: Mapping[str, T], other: T) -> T:
    """Return the reason under the longest prefix of `path` in `reasons`, or `other` if no prefix
    matches.
    """
    while path and path not in reasons:
        path = path.rpartition(".")[0]
    return reasons.get(path, other)


_STARTS = {start: effect for effect, starts in _LOSSES.items() for start in starts.split()}
EFFECTS: Mapping[str, Effect] = {
    path: effect for path in paths() if (effect := longest(path, _STARTS, None)) is not None
}
"""The effect of losing a plan field, for fields whose effect is the same in every stack."""

Side = Callable[[Group, Context], Group]


def nothing(values: Group, context: Context) -> Group:
    """The side of a rule that gives no field a value."""
    return {}


class Switch(NamedTuple):
    """Settings of the stack without which others take no effect: one of `paths`, which are separated
    by spaces, has to have one of the values `on`, or, without these, any true value. A section is
    on if its key `enabled` is true.
    """

    paths: str
    on: tuple[Any, ...] = ()

    def is_off(self, values: Group) -> bool:
        """Return whether the settings that need this switch take no effect with these values."""
        return not any(self._is_on(values.get(path)) for path in self.paths.split())

    def _is_on(self, value: Any) -> bool:
        if isinstance(value, Mapping):
            return bool(value.get("enabled"))
        return value in self.on if self.on else bool(value)


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A row of a table: the group of fields `theirs` of a stack <-> the group of plan fields
    `ours`.

    `read` turns effective values of the stack into plan values; `write` turns plan values into
    settings of the stack. Both functions see the values of their group and the values at the paths
    in `sees`, which other rules claim. The results leave out fields without a known value. Both
    functions may raise `BridgeError`.

    - `effect`: the effect of losing the group on the run, or a function of the stack's values.
    - `lossy`: the loss that is possible between the two groups, in words.
    - `blurs`: whether reading these values of the stack already loses something.
    - `tells`: the loss by reading, in words.
    - `reasons`: why single plan fields are lost, by field or prefix, if `lossy` does not describe
      their loss.
    - `note`: a remark for people. `source`: the place in the stack's source that confirms the row.
    - `carries`: the plan fields that one path of the stack stands for, if these are not the whole
      group.
    - `model`: whether the values are facts about the model itself. None: they are if all plan fields
      of the group are.
    - `mixed`: true if each plan field has an effect of its own, listed in `EFFECTS`.
    - `becomes`: the change of a path's value in words, if units or rounding need them; else empty.
    - `other`: the effect of another value in the same stack, if it differs from the effect of
      losing the group: whoever loses a place of data sets the same data in the target.
    - `under`: the switch without which the group takes no effect.
    - `kernels`: the paths that choose between kernels of one computation: another value of such a
      path, with the same plan, is the same up to rounding.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    read: Side
    write: Side
    effect: Effect | Callable[[Group], Effect] = Effect.NUMBERS
    lossy: str = ""
    note: str = ""
    source: str = ""
    sees: tuple[str, ...] = ()
    blurs: Callable[[Group], bool] | None = None
    carries: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    model: bool | None = None
    mixed: bool = False
    tells: Callable[[Group], str] | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    becomes: Callable[[str, Group], str] | None = None
    other: Effect | None = None
    under: Switch | None = None
    kernels: tuple[str, ...] = ()

    @property
    def about_model(self) -> bool:
        """Whether the rule is about the model only."""
        if self.model is not None:
            return self.model
        return bool(self.ours) and all(path.startswith("model.") for path in self.ours)

    def paths_of_plan(self, theirs: str) -> tuple[str, ...]:
        """Return the plan paths that `theirs`, a path of the stack, stands for."""
        return self.carries.get(theirs, self.ours)

    @cache  # noqa: B019 - tables live as long as the program
    def carriers(self, ours: str) -> tuple[str, ...]:
        """Return the paths of the stack that stand for the plan path `ours`: paths of this rule's
        group, and paths in `sees` that `carries` names.
        """
        paths = (path for path in self.sees if path in self.carries)
        return tuple(path for path in (*self.theirs, *paths) if ours in self.paths_of_plan(path))

    def why(self, ours: str) -> str:
        """Return the reason why a plan path may be lost. This is the reason under the longest
        prefix of the path in `reasons`, else `lossy` or `note`.
        """
        starts = [start for start in self.reasons if ours == start or ours.startswith(start + ".")]
        return self.reasons[max(starts, key=len)] if starts else self.lossy or self.note

    def effect_of(self, values: Group) -> Effect:
        """Return the effect of losing the group on a run with the stack's `values`. Further values
        are ignored.
        """
        if self.under and self.under.is_off(values):
            return Effect.NONE
        return (
            self.effect
            if isinstance(self.effect, Effect)
            else self.effect(self.values_in_view(self.theirs, values))
        )

    def effect_of_losing(self, ours: tuple[str, ...], values: Group) -> Effect:
        """Return the effect of losing the plan fields `ours` on a run with the stack's `values`. If
        `ours` is empty, return the effect of losing the whole group.
        """
        if not self.mixed or not ours:
            return self.effect_of(values)
        return worst(EFFECTS.get(path, Effect.NUMBERS) for path in ours)

    def values_in_view(self, own_paths: tuple[str, ...], values: Group) -> dict[str, Any]:
        """Return the values that one side of this rule sees: the values at `own_paths` and at the
        paths in `sees`.
        """
        return {path: values[path] for path in (*own_paths, *self.sees) if path in values}


def effects(table: Iterable[Rule]) -> Mapping[str, Effect]:
    """Return the effect of losing each setting in a table, whatever the values of a config are. It is
    `NUMBERS` if it depends on the values.
    """

    def effect(rule: Rule, path: str) -> Effect:
        fallback = rule.effect if isinstance(rule.effect, Effect) else Effect.NUMBERS
        ours = rule.paths_of_plan(path) if rule.mixed else ()
        effects = (EFFECTS.get(field, Effect.NUMBERS) for field in ours)
        return worst(effects, fallback)

    return {path: effect(rule, path) for rule in table for path in rule.theirs}


def _paths(paths: str | tuple[str, ...]) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else paths


def rename(
    theirs: str, ours: str, *, effect: Effect | None = None, note: str = "", source: str = ""
) -> Rule:
    """Return a rule for one value that the stack and the plan have under different names. By
    default the effect is the effect of losing the plan field.
    """

    def read(values: Group, context: Context) -> Group:
        return {ours: values[theirs]} if values.get(theirs) is not None else {}

    def write(values: Group, context: Context) -> Group:
        return {theirs: values[ours]} if values.get(ours) is not None else {}

    return Rule(
        (theirs,),
        (ours,),
        read,
        write,
        effect or EFFECTS.get(ours, Effect.NUMBERS),
        note=note,
        source=source,
    )


def spare_parameters(
    decay: str, scope: str, note: str, *, lossy: str = "", source: str = ""
) -> Rule:
    """A rule for parameters that a stack never decays. It has an effect only if the setting `decay`
    is given.
    """
    return Rule(
        (),
        ("optimizer.decay_scope",),
        lambda values, context: {"optimizer.decay_scope": scope},
        lambda values, context: {},
        lambda values: Effect.NUMBERS if values.get(decay) else Effect.NONE,
        lossy=lossy,
        note=note,
        source=source,
        sees=(decay,),
        carries={decay: ("optimizer.decay_scope",)},
    )


def count_rule(
    theirs: str, ours: str, *, never: int | None = 0, note: str = "", source: str = ""
) -> Rule:
    """Return a rule for one number of steps or parts. In the plan 0 means never, and `never` is the
    stack's value with this meaning.
    """

    def read(values: Group, context: Context) -> Group:
        return {ours: max(0, values[theirs])} if values.get(theirs) is not None else {}

    return convert(
        theirs,
        ours,
        read,
        # None leaves the setting open, which is not the same as their word for never.
        lambda values, context: {theirs: values.get(ours) or never if ours in values else None},
        effect=EFFECTS[ours],
        blurs=lambda values: (values.get(theirs) or 0) < 0,
        note=note,
        source=source,
    )


def opposite_switch(theirs: str, ours: str, *, note: str = "", source: str = "") -> Rule:
    """Return a rule for a switch of the stack that is the opposite of the switch in a plan field."""
    return convert(
        theirs,
        ours,
        lambda values, context: {ours: not values[theirs]} if theirs in values else {},
        lambda values, context: {theirs: True} if values.get(ours) is False else {},
        effect=EFFECTS[ours],
        note=note,
        source=source,
    )


def scale_rule(theirs: str, ours: str, factor: float, *, note: str = "", source: str = "") -> Rule:
    """Return a rule for one quantity in two units: the plan's value is `factor` times the stack's
    value.
    """
    return convert(
        theirs,
        ours,
        lambda values, context: {ours: values[theirs] * factor} if values.get(theirs) else {},
        lambda values, context: {theirs: values[ours] / factor} if values.get(ours) else {},
        effect=EFFECTS[ours],
        note=note,
        source=source,
    )


def _side(
    function: Side | Callable[[Group], Group] | None,
    sources: tuple[str, ...],
    targets: tuple[str, ...],
) -> Any:
    """Return a side of a rule: one that copies each source to its target if there is no function, and
    without the context if the function takes the values alone.
    """
    if function is None:
        pairs = tuple(zip(sources, targets, strict=True))
        return lambda values, context: {target: values.get(source) for source, target in pairs}
    if function.__code__.co_argcount > 1:
        return function
    alone: Any = function
    return lambda values, context: alone(values)


def convert(
    theirs: str | tuple[str, ...],
    ours: str | tuple[str, ...],
    read: Side | Callable[[Group], Group] | None = None,
    write: Side | Callable[[Group], Group] | None = None,
    *,
    lossy: str = "",
    effect: Effect | Callable[[Group], Effect] = Effect.NUMBERS,
    note: str = "",
    source: str = "",
    sees: tuple[str, ...] = (),
    blurs: Callable[[Group], bool] | None = None,
    carries: Mapping[str, str | tuple[str, ...]] | None = None,
    model: bool | None = None,
    mixed: bool = False,
    tells: Callable[[Group], str] | str | None = None,
    reasons: Mapping[str, str] | None = None,
    becomes: Callable[[str, Group], str] | None = None,
    kernels: tuple[str, ...] = (),
) -> Rule:
    """Return a rule for two groups of fields, with the functions `read` and `write` that convert
    between the groups, of the values alone or with the context. Without a function each field has the value
    of the one at its place in the other group. The further parameters are the fields of `Rule`.
    """
    text = tells if isinstance(tells, str) else ""
    carriers = {path: _paths(stands_for) for path, stands_for in (carries or {}).items()}
    stack, plan = _paths(theirs), _paths(ours)
    group = (stack, plan, _side(read, stack, plan), _side(write, plan, stack))
    return Rule(
        *group,
        effect,
        lossy,
        note,
        source,
        sees,
        blurs,
        carriers,
        model,
        mixed,
        (lambda values: text) if isinstance(tells, str) else tells,
        reasons or {},
        becomes,
        kernels=kernels,
    )


class Since(NamedTuple):
    """A value that a stack has in the releases from `release` on; before, the value is `before`."""

    release: str
    value: Any
    before: Any = None

    def at(self, context: Context) -> Any:
        """Return the value in the release of `context`."""
        return self.value if context.since(self.release) else self.before


def always(
    ours: str, value: Any, note: str, effect: Effect = Effect.NUMBERS, source: str = ""
) -> Rule:
    """Return a rule for a plan field that the stack cannot set, because the stack always uses
    `value`.
    """
    return Rule(
        (),
        (ours,),
        lambda values, context: {ours: value},
        nothing,
        effect,
        note=note,
        source=source,
    )


HABITS = "habits."
"""Prefix of the plan fields for what a stack does alike in all runs."""


class Habit(NamedTuple):
    """What a stack does alike in all runs: the value of a field of the plan's habits, or a function of
    the settings `beside`, which are separated by spaces; what the stack does in words; and the place in its
    source.
    """

    value: Any
    note: str
    source: str
    beside: str = ""

    def rule(self, name: str) -> Rule:
        """Return the rule for this habit, which is called `name` in the plan."""
        ours, settings = HABITS + name, tuple(self.beside.split())

        def read(values: Group, context: Context) -> Group:
            if isinstance(self.value, Since):
                return {ours: self.value.at(context)}
            return {ours: self.value(values) if callable(self.value) else self.value}

        return convert(
            (),
            ours,
            read,
            nothing,
            effect=EFFECTS[ours],
            note=self.note,
            source=self.source,
            sees=settings,
            carries=dict.fromkeys(settings, ours),
        )


def habits(rows: Mapping[str, Habit]) -> tuple[Rule, ...]:
    """Return the rules for a stack's table of habits."""
    return tuple(habit.rule(name) for name, habit in rows.items())


ADAM = {"optimizer.nesterov": False, "optimizer.amsgrad": False, "optimizer.bias_correction": True}


def plain_adam(*ours: str, note: str) -> tuple[Rule, ...]:
    """Return a rule for each of the plan fields `ours`, for a stack whose Adam has no setting for
    these fields. Each field has the value of plain Adam, listed in `ADAM`.
    """
    return tuple(always(path, ADAM[path], note, EFFECTS[path]) for path in ours)


def only_theirs(
    *theirs: str,
    note: str,
    effect: Effect | Callable[[Group], Effect] = Effect.NONE,
    source: str = "",
    model: bool = False,
    other: Effect | None = None,
    under: Switch | None = None,
) -> Rule:
    """Return a rule for fields of the stack that no plan field stands for. `note` is the reason."""
    return Rule(
        theirs,
        (),
        nothing,
        nothing,
        effect,
        note=note,
        source=source,
        sees=tuple(under.paths.split()) if under else (),
        model=model,
        other=other,
        under=under,
    )


class Why(NamedTuple):
    """The reason why no plan field stands for a field of the stack, and what the stack does with
    the field, from which the effect of losing it follows. A function gives the effect itself, by
    the values.

    `other` is the effect of another value in the same stack, if it is not that of the loss. With
    `under`, the field takes no effect unless this switch is on.
    """

    note: str
    use: Use | Callable[[Group], Effect]
    model: bool = False
    other: Effect | None = None
    under: Switch | None = None

    @property
    def effect(self) -> Effect | Callable[[Group], Effect]:
        """The effect of losing the field where it takes effect."""
        return self.use.effect if isinstance(self.use, Use) else self.use


def _effect_of_loss(path: str) -> Effect:
    if path not in EFFECTS:
        raise KeyError(
            f"{path}: _LOSSES does not state the effect of losing this field; list the field there"
        )
    return EFFECTS[path]


def complete_rules(
    rules: Iterable[Rule],
    lacks: Mapping[str, str],
    theirs: Iterable[str],
    why: Callable[[str], Why],
) -> tuple[Rule, ...]:
    """Return `rules`, and further rules for all fields without a rule. For a plan field,
    the reason is taken from `lacks`, under the longest prefix of the field. The fields in `theirs`
    get one rule for each reason that `why` returns.
    """
    rules = tuple(rules)
    plan_paths = {path for rule in rules for path in rule.ours}
    lacks = {"habits": "the training script decides", **lacks}
    notes = {path: longest(path, lacks, "") for path in paths() if path not in plan_paths}
    stack_paths = {path for rule in rules for path in rule.theirs}
    rows: dict[Why, list[str]] = {}
    for path in theirs:
        if path not in stack_paths:
            rows.setdefault(why(path), []).append(path)
    return (
        *rules,
        *(
            only_ours(path, note=note, effect=_effect_of_loss(path))
            for path, note in notes.items()
            if note
        ),
        *(
            only_theirs(
                *group,
                note=reason.note,
                effect=reason.effect,
                model=reason.model,
                other=reason.other,
                under=reason.under,
            )
            for reason, group in rows.items()
        ),
    )


def each_only_ours(*ours: str, note: str) -> tuple[Rule, ...]:
    """Return a rule for each of these plan fields, which the stack cannot express. Each rule has
    the effect of losing its field.
    """
    return tuple(only_ours(path, note=note, effect=EFFECTS[path]) for path in ours)


def only_ours(*ours: str, note: str, effect: Effect = Effect.NUMBERS) -> Rule:
    """Return a rule for plan fields that the stack cannot express. `note` is the reason."""
    return Rule((), ours, nothing, nothing, effect, note=note)


def lacks(section: str, note: str, effect: Effect = Effect.NUMBERS) -> Rule:
    """Return a rule for a whole section of the plan that the stack does not have. `note` is the
    reason.
    """
    inside = tuple(path for path in paths() if path == section or path.startswith(section + "."))
    return Rule((), inside, nothing, nothing, effect, note=note)
